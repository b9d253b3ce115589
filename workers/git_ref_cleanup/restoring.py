"""Restore deleted refs, at what the audit says that they were (batch 58)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from forgekeeper.audit import acts
from forgekeeper.audit.deletions import hashed
from forgekeeper.database import database
from forgekeeper.settings import Settings
from forgekeeper.storage import git_restore
from forgekeeper.storage.git_command import GitError
from forgekeeper.storage.git_repository import RootUnavailable
from forgekeeper.storage.git_restore import Restored
from workers.git_ref_cleanup import repositories
from workers.git_ref_cleanup.cleaning import RECORD

TIMEOUT = 300.0
"""Seconds that git may take for one repository."""
LOST = Restored("refused", "its project has gone")

# The latest first: an id, or a name, may have been given out again.
DELETED = """
    select at, run, ids, detail from audit_deletions
    where record = %(record)s and phase = 'outcome'
      and (ids && %(ids)s::bigint[] or hashes && %(hashes)s::integer[] or run = any(%(runs)s::bigint[]))
    order by id desc
"""
NAMED = re.compile(r"(?P<project>[0-9]{1,18}):(?P<ref>.+)", re.DOTALL)
NUMBER = re.compile(r"[0-9]{1,18}\Z")


class Deleted(NamedTuple):
    """A ref that was deleted: by which run and when, for which row, and what it was."""

    id: int
    at: datetime
    run: int | None
    project_id: int
    ref: str
    oid: str


class Asked(NamedTuple):
    """What is to be restored: the ids of deletions, projects with refs of theirs, and all refs of runs."""

    ids: Sequence[int]
    refs: Sequence[tuple[int, str]] = ()
    runs: Sequence[int] = ()

    def includes(self, one: Deleted) -> bool:
        """Return whether the deletion is among it."""
        return one.id in self.ids or (one.project_id, one.ref) in self.refs or one.run in self.runs


def read(words: Sequence[str], runs: Sequence[int]) -> Asked:
    """Read what a person asks for: ids, and refs as ``PROJECT:REF``; raise ValueError for what is neither."""
    ids, refs = [], []
    for word in words:
        if NUMBER.match(word):
            ids.append(int(word))
        elif named := NAMED.fullmatch(word):
            refs.append((int(named["project"]), named["ref"]))
        else:
            raise ValueError(word)
    return Asked(ids, refs, runs)


def deleted(asked: Asked) -> list[Deleted]:
    """Return what was asked for of what the audit knows to be deleted: of each ref the latest deletion."""
    values = {"record": RECORD, "ids": list(asked.ids), "runs": list(asked.runs)}
    values["hashes"] = [hashed(ref) for _, ref in asked.refs]
    rows = database.execute_sql(DELETED, values).fetchall()
    found: dict[tuple[int, str], Deleted] = {}
    for one in (one for row in rows for one in _each(*row)):
        if asked.includes(one):
            found.setdefault((one.project_id, one.ref), one)
    return sorted(found.values())


def restore(found: Sequence[Deleted], settings: Settings, *, dry_run: bool) -> Iterator[tuple[Deleted, Restored]]:
    """Restore the refs, a project at a time; yield what became of each.

    The act is recorded before git is asked; where it cannot be, nothing is restored.

    Raises `RootUnavailable`.
    """
    root, projects = repositories.require_root(settings), sorted({one.project_id for one in found})
    paths = repositories.paths(projects)
    for project in projects:
        refs = {one.ref: one for one in found if one.project_id == project}
        if project not in paths:
            became = dict.fromkeys(refs, LOST)
        else:
            wanted, until = {ref: one.oid for ref, one in refs.items()}, time.monotonic() + TIMEOUT
            try:
                before = partial(_record, project)
                became = git_restore.restore(root, paths[project], wanted, until=until, dry_run=dry_run, before=before)
            except RootUnavailable:
                raise
            except GitError as error:
                became = dict.fromkeys(refs, Restored("refused", str(error)))
        yield from ((one, became[ref]) for ref, one in refs.items())


def _record(project: int, refs: Mapping[str, str]) -> None:
    acts.record("refs restore", f"project:{project}", batch="git_ref_cleanup", after={"refs": dict(refs)})


def _each(at: datetime, run: int | None, ids: Sequence[int], detail: dict[str, Any]) -> Iterator[Deleted]:
    """Yield the refs of a row of the audit that were deleted."""
    names = ("state", "project_id", "ref", "oid")
    columns = [value if isinstance(value := detail[name], list) else [value] * len(ids) for name in names]
    for number, state, project, ref, oid in zip(ids, *columns, strict=True):
        if state == "deleted":
            yield Deleted(number, at, run, project, ref, oid)
