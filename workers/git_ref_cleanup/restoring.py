"""Git refs that were deleted, as the audit has them, and the way back for them (batch 58)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from forgekeeper import Recoverable
from forgekeeper.audit import acts
from forgekeeper.audit.deletions import each_of
from forgekeeper.platform.database import database
from forgekeeper.platform.settings import Settings
from forgekeeper.targets import git_restore
from forgekeeper.targets.git_command import GitError, GitTimedOut
from forgekeeper.targets.git_repository import RootUnavailable
from forgekeeper.targets.git_restore import POSSIBLE, Restored
from workers.git_ref_cleanup import repositories
from workers.git_ref_cleanup.deletions import NAME, RECORD

TIMEOUT_SECONDS = 300.0
"""Seconds that git may take for one repository."""
PROJECT_MISSING = Restored("refused", "its project has gone")

# The latest first: an id may have been given out again.
DELETED = """
    select at, run, ids, detail from audit_deletions
    where record = %(record)s and phase = 'outcome'
      and (ids && %(ids)s::bigint[] or run = %(run)s)
    order by id desc
"""


class DeletedRef(NamedTuple):
    """A ref that was deleted: by which run and when, for which row, and what it was."""

    id: int
    at: datetime
    run: int | None
    project_id: int
    ref: str
    oid: str


def count_recoverable(run: int, until: float, settings: Settings) -> Recoverable:
    """Count the refs that *run* has deleted and that can come back, project by project until that instant."""
    became = list[Restored]()
    try:
        for _, outcome in restore(find_deleted((), run), settings, dry_run=True, until=until):
            became.append(outcome)
    except GitTimedOut:
        pass
    except RootUnavailable as error:
        return Recoverable(0, 0, str(error))
    return Recoverable(became.count(POSSIBLE), len(became))


def find_deleted(ids: Sequence[int], run: int | None) -> list[DeletedRef]:
    """Return what the audit knows to be deleted for these rows, or by that run: of each ref the latest deletion."""
    rows = database.execute_sql(DELETED, {"record": RECORD, "ids": list(ids), "run": run}).fetchall()
    found: dict[tuple[int, str], DeletedRef] = {}
    for at, by, numbers, detail in rows:
        for facts in each_of(numbers, detail, len(numbers)):
            chosen = facts["id"] in ids or (run is not None and by == run)
            if chosen and facts["state"] == "deleted":
                one = DeletedRef(facts["id"], at, by, facts["project_id"], facts["ref"], facts["oid"])
                found.setdefault((one.project_id, one.ref), one)
    return sorted(found.values())


def restore(
    found: Sequence[DeletedRef], settings: Settings, *, dry_run: bool, until: float | None = None
) -> Iterator[tuple[DeletedRef, Restored]]:
    """Restore the refs, a project at a time; yield what became of each.

    The act is recorded before git is asked; if that fails, nothing is restored.  Raises `RootUnavailable`, and
    `GitTimedOut` at *until*, an instant of the monotonic clock; without it each project has `TIMEOUT_SECONDS`.
    """
    root, projects = repositories.require_root(settings), sorted({one.project_id for one in found})
    paths = repositories.paths(projects)
    for project in projects:
        refs = {one.ref: one for one in found if one.project_id == project}
        wanted, end = {ref: one.oid for ref, one in refs.items()}, until or time.monotonic() + TIMEOUT_SECONDS

        def record(refs: Mapping[str, str], project: int = project) -> None:
            acts.record("refs restore", f"project:{project}", batch=NAME, after={"refs": dict(refs)})

        became = dict.fromkeys(refs, PROJECT_MISSING)
        try:
            if project in paths:
                became = git_restore.restore(root, paths[project], wanted, until=end, dry_run=dry_run, before=record)
        except RootUnavailable:
            raise
        except GitError as error:
            if until is not None and isinstance(error, GitTimedOut):
                raise
            became = dict.fromkeys(refs, Restored("refused", str(error)))
        yield from ((one, became[ref]) for ref, one in refs.items())
