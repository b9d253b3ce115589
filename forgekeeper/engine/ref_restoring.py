"""Restoring deleted refs: the audit says which they were, and git may still have their objects."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

from forgekeeper.api.answers import Recoverable
from forgekeeper.api.batches import CHILDREN, ChildSpec
from forgekeeper.audit import acts
from forgekeeper.audit.deletions import expand_records
from forgekeeper.platform.database import database
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.status_queue import RefQueue
from forgekeeper.targets import git_restore
from forgekeeper.targets.git_command import GitError, GitTimedOut
from forgekeeper.targets.git_repository import RootUnavailable
from forgekeeper.targets.git_restore import WOULD_BE_RESTORED, RestoreOutcome
from forgekeeper.targets.repositories_root import prove_root

RESTORE_TIMEOUT_SECONDS = 300.0
"""Seconds that git may take for one repository."""
PROJECT_MISSING = RestoreOutcome("refused", "its project does not exist any more")

# The latest first: an id may have been given out again.
SELECT_DELETED_REFS = """
    select at, run, ids, detail from audit_deletions
    where record = %(record)s and phase = 'outcome'
      and (ids && %(ids)s::bigint[] or run = %(run)s)
    order by id desc
"""


class DeletedRef(NamedTuple):
    """A deleted ref: the id of the row that requested the deletion, its instant and run, and the ref's value."""

    id: int
    at: datetime
    run: int | None
    project_id: int
    ref: str
    oid: str


def list_children_with_refs() -> list[ChildSpec]:
    """Return the declared children that delete refs."""
    return [child for child in CHILDREN.values() if child.refs is not None]


def count_recoverable_refs(child: ChildSpec, run: int, until: float, settings: Settings) -> Recoverable:
    """Count the refs that *run* has deleted and that can be restored, project by project until that instant."""
    outcomes = list[RestoreOutcome]()
    try:
        for _, outcome in restore_refs(child, find_deleted_refs(child, (), run), settings, dry_run=True, until=until):
            outcomes.append(outcome)
    except GitTimedOut:
        pass
    except RootUnavailable as error:
        return Recoverable(0, 0, str(error))
    return Recoverable(outcomes.count(WOULD_BE_RESTORED), len(outcomes))


def find_deleted_refs(child: ChildSpec, ids: Sequence[int], run: int | None) -> list[DeletedRef]:
    """Return the refs that *child* has deleted for these rows, or in that run: of each the latest deletion."""
    assert child.refs is not None, "only such a child deletes refs"
    values = {"record": child.refs.record, "ids": list(ids), "run": run}
    found: dict[tuple[int, str], DeletedRef] = {}
    for at, by, numbers, detail in database.execute_sql(SELECT_DELETED_REFS, values).fetchall():
        for facts in expand_records(numbers, detail, len(numbers)):
            is_chosen = facts["id"] in ids or (run is not None and by == run)
            if is_chosen and facts["state"] == "deleted":
                one = DeletedRef(facts["id"], at, by, facts["project_id"], facts["ref"], facts["oid"])
                found.setdefault((one.project_id, one.ref), one)
    return sorted(found.values())


def restore_refs(
    child: ChildSpec, deleted: Sequence[DeletedRef], settings: Settings, *, dry_run: bool, until: float | None = None
) -> Iterator[tuple[DeletedRef, RestoreOutcome]]:
    """Restore refs that *child* has deleted, a project at a time; yield the outcome of each.

    The act is recorded before git is asked; if that fails, nothing is restored.  Raises `RootUnavailable`, and
    `GitTimedOut` at *until*, an instant of the monotonic clock; without it each project has five minutes.
    """
    assert child.refs is not None, "only such a child deletes refs"
    batch = child.batch.name
    root, projects = prove_root(settings), sorted({one.project_id for one in deleted})
    paths = RefQueue(child.refs, batch).read_paths(projects)
    for project in projects:
        refs = {one.ref: one for one in deleted if one.project_id == project}
        wanted, end = {ref: one.oid for ref, one in refs.items()}, until or time.monotonic() + RESTORE_TIMEOUT_SECONDS
        outcomes = dict.fromkeys(refs, PROJECT_MISSING)
        record = partial(_record_act, batch, project)
        try:
            if project in paths:
                outcomes = git_restore.restore_missing_refs(
                    root, paths[project], wanted, until=end, dry_run=dry_run, before=record
                )
        except RootUnavailable:
            raise
        except GitError as error:
            if until is not None and isinstance(error, GitTimedOut):
                raise
            outcomes = dict.fromkeys(refs, RestoreOutcome("refused", str(error)))
        yield from ((one, outcomes[ref]) for ref, one in refs.items())


def _record_act(batch: str, project: int, refs: Mapping[str, str]) -> None:
    acts.record_act("refs restore", f"project:{project}", batch=batch, after={"refs": dict(refs)})
