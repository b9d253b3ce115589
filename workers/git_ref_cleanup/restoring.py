"""Restore deleted refs, at what the audit says that they were (batch 58)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from forgekeeper.audit import acts
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

# The latest first: an id may have been given out again.
DELETED = """
    select at, run, ids, detail from audit_deletions
    where record = %(record)s and phase = 'outcome'
      and (ids && %(ids)s::bigint[] or run = %(run)s)
    order by id desc
"""


class Deleted(NamedTuple):
    """A ref that was deleted: by which run and when, for which row, and what it was."""

    id: int
    at: datetime
    run: int | None
    project_id: int
    ref: str
    oid: str


def deleted(ids: Sequence[int], run: int | None = None) -> list[Deleted]:
    """Return what the audit knows to be deleted for these rows, or by that run: of each ref the latest deletion."""
    rows = database.execute_sql(DELETED, {"record": RECORD, "ids": list(ids), "run": run}).fetchall()
    found: dict[tuple[int, str], Deleted] = {}
    for one in (one for row in rows for one in _each(*row)):
        if one.id in ids or (run is not None and one.run == run):
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
        wanted, until = {ref: one.oid for ref, one in refs.items()}, time.monotonic() + TIMEOUT

        def record(refs: Mapping[str, str], project: int = project) -> None:
            acts.record("refs restore", f"project:{project}", batch="git_ref_cleanup", after={"refs": dict(refs)})

        became = dict.fromkeys(refs, LOST)
        try:
            if project in paths:
                became = git_restore.restore(root, paths[project], wanted, until=until, dry_run=dry_run, before=record)
        except RootUnavailable:
            raise
        except GitError as error:
            became = dict.fromkeys(refs, Restored("refused", str(error)))
        yield from ((one, became[ref]) for ref, one in refs.items())


def _each(at: datetime, run: int | None, ids: Sequence[int], detail: dict[str, Any]) -> Iterator[Deleted]:
    """Yield the refs of a row of the audit that were deleted."""
    names = ("state", "project_id", "ref", "oid")
    columns = [value if isinstance(value := detail[name], list) else [value] * len(ids) for name in names]
    for number, state, project, ref, oid in zip(ids, *columns, strict=True):
        if state == "deleted":
            yield Deleted(number, at, run, project, ref, oid)
