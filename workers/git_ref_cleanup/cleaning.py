"""A child of batch 58: it deletes one project's refs, and closes their rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal

import structlog

from forgekeeper.audit.intents import Intended
from forgekeeper.connections import client
from forgekeeper.database import database
from forgekeeper.database.writes import writing
from forgekeeper.identity import identity
from forgekeeper.locks import Lease, LeaseTaken, lease
from forgekeeper.runs.bad_records import BadRecords
from forgekeeper.runs.run import Run
from forgekeeper.runs.totals import Amount
from forgekeeper.storage import git_refs
from forgekeeper.storage.git_command import GitError
from models import Project
from workers.git_ref_cleanup import deletions, repositories
from workers.git_ref_cleanup.deletions import Closed, Pending, Settled
from workers.git_ref_cleanup.telling import close_interrupted, tell, told_of

LOCK_TIMEOUT = timedelta(minutes=10)
MAX_DELETES = 10_000

log = structlog.get_logger(__name__)


@dataclass
class ProjectOutcome:
    """What a child comes to: rows whose refs are gone, rows refused, and rows that went with their repository."""

    total_deletes: int = 0
    rejected: int = 0
    stopped: Literal["drained", "max_deletes", "lease_held", "deadline", "missing"] = "drained"
    gone: int = 0


def clean(run: Run[ProjectOutcome], project_id: int, *, missing: bool = False) -> None:
    """Delete the project's refs, unless another is at it; where its repository is *missing*, close its rows.

    Raises what `git_refs.delete` raises of the repository or the root as a whole: no row is
    consumed, and the message is retried.
    """
    try:
        with (
            lease(
                client,
                f"clean_project_refs:{project_id}",
                ttl=run.settings.dead_after,
                at_most=LOCK_TIMEOUT,
                holder=identity(),
                forbidden=database.in_transaction,
            ) as held,
            run.bad_records("git_ref_deletion", deletions.still_pending) as bad,
        ):
            run.outcome.stopped = _clean(run, project_id, held, bad, missing=missing)
    except LeaseTaken:
        run.outcome.stopped = "lease_held"


def _clean(
    run: Run[ProjectOutcome], project_id: int, held: Lease, bad: BadRecords, *, missing: bool
) -> Literal["drained", "max_deletes", "deadline", "missing"]:
    outcome, position = run.outcome, 0
    # A whole page each time, though it may go beyond the maximum: what is locked costs as much for one as for all.
    while outcome.total_deletes + outcome.rejected + outcome.gone < MAX_DELETES:
        limit = run.brakes.free(MAX_DELETES)
        rows, last = _page(project_id, position, bad, limit)
        if limit and last is None:
            return "drained"
        rows = rows[: run.brakes.reserve(len(rows)).records]
        if not rows:
            return "deadline"
        last = rows[-1].id
        held.check()
        told = told_of(run.audit, project_id)
        try:
            outcomes = _delete(run, project_id, rows, told)
        except git_refs.GitTimedOut as error:
            log.warning("git ended, it took too long", project_id=project_id, error=str(error))
            return "deadline"
        except git_refs.RepositoryMissing:
            if not missing and repositories.paths([project_id]):
                log.warning("repository missing, its rows are kept", project_id=project_id)
                return "missing"
            gone = {row.id: git_refs.GONE for row in rows}
            _settle(run, bad, rows, gone, told=told, grow=partial(_grow_gone, outcome))
        else:
            run.step("deleted")
            failed = bad.failed
            closed = _settle(run, bad, rows, outcomes, told=told, grow=partial(_grow, outcome))
            if bad.error is not None and bad.failed - failed == closed:
                raise bad.error  # none at all: not these records, but what their table is in
        run.step("settled")
        position = last
        if run.deadline.passed(len(rows)):
            return "deadline"
    more = deletions.next_pending_of(project_id, after=position, limit=1, without=bad.keys)
    return "max_deletes" if more else "drained"


def _page(project_id: int, position: int, bad: BadRecords, limit: int) -> tuple[list[Pending], int | None]:
    """Return the next page of rows, those aside that cannot be read, and the id it ends with; None without one."""
    rows: list[Pending] = []

    def read(only: Sequence[int] | None) -> int | None:
        rows.extend(deletions.pending_of(project_id, after=position, limit=limit, only=only, without=bad.keys))
        return rows[-1].id if rows else None

    numbers = partial(deletions.next_pending_of, project_id, after=position, limit=limit, without=bad.keys)
    return rows, bad.chunk(read, numbers)


def _delete(
    run: Run[ProjectOutcome], project_id: int, rows: Sequence[Pending], told: Intended[int]
) -> dict[int, git_refs.Outcome]:
    """Delete the rows' refs, of which is told before; say of each row what became of its ref."""
    # Where it does not matter, git need not verify what it was said of before.
    matters = told.on or run.brakes.limited
    begun = False

    def before(going: Mapping[git_refs.Doomed, str]) -> None:
        nonlocal begun
        begun = True
        tell(told, rows, going)

    doomed = {row.id: git_refs.Doomed(row.ref, row.expected_oid) for row in rows}
    try:
        root, project = repositories.require_root(run.settings), Project.get_or_none(Project.id == project_id)
        if project is None:
            raise git_refs.RepositoryMissing("there is no such project")
        until = time.monotonic() + run.deadline.left()
        close_interrupted(run.audit, project_id, root, project.disk_path, until=until)
        outcomes = git_refs.delete(
            root, project.disk_path, list(doomed.values()), until=until, before=before if matters else None
        )
    except GitError:
        # Once git has begun, some refs may have gone, even with their repository.
        run.brakes.leave_used() if begun else run.brakes.give_back()
        raise
    if locked := [one for one in doomed.values() if outcomes[one].state == "locked"]:
        reason = outcomes[locked[0]].reason
        log.warning("refs locked", project_id=project_id, refs=len(locked), first=locked[0].ref, reason=reason)
    return {number: outcomes[one] for number, one in doomed.items()}


def _settle(
    run: Run[ProjectOutcome],
    bad: BadRecords,
    rows: Sequence[Pending],
    outcomes: dict[int, git_refs.Outcome],
    *,
    told: Intended[int],
    grow: Callable[[Settled], None],
) -> int:
    """Close the rows, those aside that cannot be written; return how many that should be.

    What became of their refs is told in the same transaction; the outcome grows by each step's.
    One whose ref another process has locked stays pending.
    """
    states = {number: outcome.state for number, outcome in outcomes.items()}
    closing = {row.id: row for row in rows if states[row.id] != "locked"}

    def settle(ids: Sequence[int]) -> None:
        closed = [Closed(number, closing[number].ref, outcomes[number].reason) for number in ids]
        # Whatever a row came to: git has deleted its ref, unless it was refused.
        went = Amount(sum(outcomes[number].reason is None for number in ids))
        with writing(), told.ending({number: states[number] for number in ids}):
            settled = deletions.settle(rows[0].project_id, closed)
            run.brakes.settle(went, of=len(ids))
        run.brakes.went(went, of=len(ids))
        grow(settled)

    run.brakes.give_back(len(rows) - len(closing))
    bad.each(settle, list(closing))
    # Git has done what it has done, whatever stands in the way of the row.
    told.end({number: states[number] for number in told.open()})
    return len(closing)


def _grow(outcome: ProjectOutcome, settled: Settled) -> None:
    outcome.total_deletes += settled.processed
    outcome.rejected += settled.rejected


def _grow_gone(outcome: ProjectOutcome, settled: Settled) -> None:
    outcome.gone += settled.processed
