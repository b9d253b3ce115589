"""Restore deleted refs: only missing refs, and only while git has their objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forgekeeper.targets.git_command import Git, clean_first_line, parse_complaint
from forgekeeper.targets.git_repository import Repository, RepositoryFailed, open_repository, read_refs, why_ref_refused

_OID = re.compile(r"(?:[0-9a-f]{40}|[0-9a-f]{64})\Z")
_SYMBOLIC_REF = re.compile(r"ref: (?P<target>\S+)\Z")


@dataclass(frozen=True)
class RestoreOutcome:
    """The outcome of one ref; *reason* is a sentence unless it was or would be restored."""

    state: Literal["restored", "would be restored", "exists", "pruned", "symbolic", "refused"]
    reason: str = ""
    command: tuple[str, ...] = ()
    """A command that restores the ref, for a person in the repository."""


REF_RESTORED = RestoreOutcome("restored")
WOULD_BE_RESTORED = RestoreOutcome("would be restored")
REF_EXISTS = RestoreOutcome("exists", "the ref exists already")
OBJECT_PRUNED = RestoreOutcome("pruned", "git has deleted the object of the ref: fetch it from a clone or backup first")
OLD_VALUE_UNKNOWN = RestoreOutcome("refused", "the audit has no value of the ref")
OUTCOMES_BY_GIT_MESSAGE = {b"reference already exists": REF_EXISTS, b"with nonexistent object": OBJECT_PRUNED}
"""Outcomes by git's objections."""


def restore_missing_refs(
    root: Path,
    disk_path: str,
    wanted: Mapping[str, str],
    *,
    until: float,
    dry_run: bool = False,
    before: Callable[[Mapping[str, str]], None] = lambda _: None,
) -> dict[str, RestoreOutcome]:
    """Restore refs of a repository, each at its last value; return the outcomes.

    A ref that exists stays as it is.  A symbolic ref is not restored: its command is returned.
    In a *dry_run* git only reads.  Git is ended at *until*, an instant of the monotonic clock.
    *before* is called with the refs that git is about to restore; if it raises, git is not asked.

    Raises `GitError`, also if the forge could not read git's files.
    """
    repository = open_repository(root, disk_path)
    git = Git(repository.git_dir, until) if dry_run else repository.git_for_writing(until)
    outcomes = {ref: _find_objection(repository, ref, was) for ref, was in wanted.items()}
    left = {ref: was for ref, was in wanted.items() if outcomes[ref] is None}
    if left and not dry_run:
        before(left)
    foreseen = _predict_outcomes(repository, git, left) if dry_run and left else {}
    return {
        ref: said or foreseen.get(ref) or _create_ref(repository, git, ref, wanted[ref])
        for ref, said in outcomes.items()
    }


def _find_objection(repository: Repository, ref: str, old_value: str) -> RestoreOutcome | None:
    """Return an objection to restoring the ref that is known before git is asked."""
    if reason := why_ref_refused(ref):
        return RestoreOutcome("refused", reason)
    repository.require_enclosed([ref.encode()])
    try:
        # Git would write over a symbolic ref that leads nowhere.
        if repository.has_file(ref.encode()):
            return REF_EXISTS
    except OSError as error:
        return RestoreOutcome("refused", f"cannot read the ref: {error.strerror}")
    if link := _SYMBOLIC_REF.match(old_value):
        command = ("git", "symbolic-ref", ref, link["target"])
        return RestoreOutcome(
            "symbolic", "it was a symbolic ref: run this command in its repository to restore it", command
        )
    return None if _OID.match(old_value) else OLD_VALUE_UNKNOWN


def _predict_outcomes(repository: Repository, git: Git, wanted: Mapping[str, str]) -> dict[str, RestoreOutcome]:
    """Return the expected outcomes of refs.

    A try of git's would lock each ref for a moment and leave empty folders.
    """
    there = read_refs(git, repository, [ref.encode() for ref in wanted]).oids
    # Git answers "OID missing" for a missing object.
    asked = "".join(f"{was}\n" for was in wanted.values()).encode()
    answer = git.run("cat-file", "--batch-check=%(objectname)", input_bytes=asked)
    kept = {line.decode() for line in answer.out.splitlines() if b" " not in line}
    return {
        ref: REF_EXISTS if ref.encode() in there else WOULD_BE_RESTORED if was in kept else OBJECT_PRUNED
        for ref, was in wanted.items()
    }


def _create_ref(repository: Repository, git: Git, ref: str, old_value: str) -> RestoreOutcome:
    repository.require_enclosed([ref.encode()])
    answer = git.update_refs([f"create {ref}\0{old_value}".encode()], confirm=lambda: True)
    repository.confirm_identity()
    if answer.is_committed:
        return REF_RESTORED
    said = answer.error_output()
    if answer.code < 0 or parse_complaint(said, repository.git_dir).general:
        raise RepositoryFailed(f"git could not restore all refs: {clean_first_line(said)}")
    return next(
        (became for text, became in OUTCOMES_BY_GIT_MESSAGE.items() if text in said),
        RestoreOutcome("refused", clean_first_line(said)),
    )
