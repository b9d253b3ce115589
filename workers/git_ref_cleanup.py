"""Delete the git refs that projects want deleted (batch 58).

Every minute the parent walks the projects that have pending rows, a hundred at a time and
at most ten thousand in a run, and starts a child for each; the next run goes on where this
one ended.  A child deletes its project's refs, all in one git transaction where it can,
and closes their rows: git first, the table second, so that a crash between the two
repeats a harmless deletion.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import structlog

from forgekeeper.batches import Record, Threshold, batch, child
from forgekeeper.connections import client
from forgekeeper.database import backlog, database
from forgekeeper.database.backlog import Backlog
from forgekeeper.installation.row import Installation
from forgekeeper.locks import Lease, LeaseTaken, lease
from forgekeeper.runs.attempt import identity
from forgekeeper.runs.bad_records import BadRecords
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.blocked import Blocked
from forgekeeper.runs.deadline import Deadline
from forgekeeper.runs.run import Run
from forgekeeper.settings import Settings
from forgekeeper.storage import git_refs, git_repository, sentinel
from models import GitRefDeletion, Project
from models.projects import LAST, Closed, Settled

LOCK_TIMEOUT = timedelta(minutes=10)
BATCH_SIZE = 100
MAX_PROJECTS = 10_000
KEEP_PROCESSED = timedelta(days=1)
"""So long after it was made, a deletion's row goes: `prune` removes it."""
MAX_DELETES = 10_000

log = structlog.get_logger(__name__)


@dataclass
class Outcome:
    """How many projects have a child on its way, how many of those had one already, and how many lack repositories."""

    total_projects: int = 0
    enqueued: int = 0
    deduplicated: int = 0
    stopped: Literal["drained", "max_projects", "queue_full", "deadline"] = "drained"
    missing_repositories: int = 0


@dataclass
class ProjectOutcome:
    """What a child comes to: rows whose refs are gone, rows refused, and rows that went with their repository."""

    total_deletes: int = 0
    rejected: int = 0
    stopped: Literal["drained", "max_deletes", "lease_held", "deadline", "missing"] = "drained"
    gone: int = 0


@batch(
    document=58,
    cron="* * * * *",
    cron_sentence="When projects' pending ref deletions are looked for.",
    pace_sentence="Refs that each child deletes per second at most; unset: no limit.",
    budget=LOCK_TIMEOUT,
    time_limit=timedelta(minutes=12),
    outcome=Outcome,
    tables=[GitRefDeletion, Project],
    deletes_from="repositories",
    records=[Record("project", examined=("total_projects",))],
    counters={"missing_repositories": ("missing_repositories",)},
    thresholds=[Threshold("dead_letter")],
    steps=["enqueued"],
)
def git_ref_cleanup(run: Run[Outcome]) -> None:
    """Delete the git refs that projects want deleted, a child for each project."""
    try:
        if run.settings.repositories_root is None:
            raise Blocked("no_repositories", "no repositories are configured; set FORGEKEEPER_REPOSITORIES_ROOT")
        start_children(run)
    finally:
        structlog.contextvars.bind_contextvars(stats=asdict(run.outcome))


@child(
    git_ref_cleanup,
    queue="git",
    budget=LOCK_TIMEOUT,
    time_limit=timedelta(minutes=12),
    outcome=ProjectOutcome,
    enqueued_as="enqueued",
    records=[
        Record(
            "git_ref_deletion",
            examined=("total_deletes", "rejected", "gone"),
            processed=("total_deletes",),
            errors={"database": (), "gitaly": ("rejected",)},
            objective=timedelta(hours=2),
        ),
        Record("gone_ref_deletion", processed=("gone",)),
        Record("rejected_ref", given_up=True),
    ],
    thresholds=[Threshold("dead_letter")],
    steps=["deleted", "settled"],
    lease=True,
)
def clean_project_refs(run: Run[ProjectOutcome], project_id: int, missing: bool = False) -> None:  # noqa: FBT001, FBT002, a message
    """Delete one project's refs, and leave a successor while there are more.

    Where *missing*, the parent has found no repository, and few enough like it: then its rows are closed.
    """
    clean(run, project_id, missing=missing)
    run.more = run.outcome.stopped == "max_deletes"


def start_children(run: Run[Outcome]) -> None:
    """Start a child for each project with pending rows, beginning behind the last one of the run before.

    Projects without a repository come last, once it is known how many they are.  Raises
    `RepositoriesMissing` where they are too many, and `RootUnavailable` where the
    repositories' disk is not there: children would only fail.
    """
    root, outcome = _require_root(run.settings), run.outcome
    missing: dict[int, str] = {}
    outcome.stopped = _walk(run, root, missing)
    if not missing:
        return
    _believe(root, missing, outcome.total_projects + len(missing), run.settings.missing_repositories)
    _start(run, [(project_id, True) for project_id in missing])


def _walk(
    run: Run[Outcome], root: Path, missing: dict[int, str]
) -> Literal["drained", "max_projects", "queue_full", "deadline"]:
    """Start the children of projects that have a repository; put the others and their paths into *missing*."""
    outcome = run.outcome
    began = position = Batch.position(run.batch)
    last = LAST
    while left := MAX_PROJECTS - outcome.total_projects - len(missing):
        projects = GitRefDeletion.projects(after=position, until=last, limit=min(BATCH_SIZE, left))
        if not projects:
            if last == began or not began:
                return "drained"
            position, last = 0, began  # round once, up to where we began
            continue
        lacking = _missing(root, projects)
        if not _start(run, [(number,) for number in projects if number not in lacking]):
            return "queue_full"
        missing |= lacking
        outcome.missing_repositories = len(missing)
        position = projects[-1]
        Batch.move_to(run.batch, position)
        if run.deadline.passed():
            return "deadline"
    return "max_projects"


def _start(run: Run[Outcome], calls: Sequence[tuple[int] | tuple[int, bool]]) -> bool:
    """Start a child for each call; return False when the queue was full before all were."""
    outcome = run.outcome
    sent = run.fan_out(clean_project_refs, [(f"clean_project_refs:{call[0]}", call) for call in calls])
    outcome.enqueued += sent.enqueued
    outcome.deduplicated += sent.deduplicated
    outcome.total_projects = outcome.enqueued + outcome.deduplicated
    run.step("enqueued")
    return not sent.queue_full


def _missing(root: Path, projects: Sequence[int]) -> dict[int, str]:
    """Return those of *projects* that lack their repositories, with their paths; that of no project is not missed."""
    return {n: path for n, path in Project.paths(projects).items() if git_repository.is_missing(root, path)}


def _believe(root: Path, missing: Mapping[int, str], projects: int, share: float) -> None:
    """Raise `RepositoriesMissing` unless those *missing* of so many *projects* may be gone."""
    for project_id, path in missing.items():
        if other := git_repository.misnamed(root, path):
            raise git_repository.RepositoriesMissing(
                f"project {project_id} has no repository at {path}, but there is one at {other}: no row of a missing"
                " repository was closed; correct disk_path, `forgekeeper check` looks for more"
            )
    if git_repository.too_many_missing(len(missing), projects, share):
        raise git_repository.RepositoriesMissing(
            f"{len(missing)} of {projects} projects have no repository below {root}, {min(missing)} the first of them:"
            " no row of theirs was closed; is a disk not mounted, or the root another? Where they are gone indeed,"
            " FORGEKEEPER_MISSING_REPOSITORIES=1 lets `forgekeeper run git_ref_cleanup` close them"
        )


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
            run.bad_records("git_ref_deletion", GitRefDeletion.still_pending) as bad,
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
        rows, last = _pending(project_id, position, bad)
        if last is None:
            return "drained"
        held.check()
        try:
            reasons = _delete(project_id, rows, run.deadline, run.settings)
        except git_refs.GitTimedOut as error:
            log.warning("git ended, it took too long", project_id=project_id, error=str(error))
            return "deadline"
        except git_refs.RepositoryMissing:
            if not missing and Project.paths([project_id]):
                log.warning("repository missing, its rows are kept", project_id=project_id)
                return "missing"
            _settle(bad, project_id, {row.id: Closed(row.id, row.ref) for row in rows}, partial(_grow_gone, outcome))
        else:
            run.step("deleted")
            failed = bad.failed
            closed = {row.id: Closed(row.id, row.ref, reasons[row.id]) for row in rows if row.id in reasons}
            _settle(bad, project_id, closed, partial(_grow, outcome))
            if bad.error is not None and bad.failed - failed == len(reasons):
                raise bad.error  # none at all: not these records, but what their table is in
        run.step("settled")
        position = last
        if run.deadline.passed(len(rows)):
            return "deadline"
    more = GitRefDeletion.next_pending_of(project_id, after=position, limit=1, without=bad.keys)
    return "max_deletes" if more else "drained"


def _pending(project_id: int, position: int, bad: BadRecords) -> tuple[list[GitRefDeletion], int | None]:
    """Return the next page of rows, those aside that cannot be read, and the id it ends with; None without one."""
    rows: list[GitRefDeletion] = []

    def read(only: Sequence[int] | None) -> int | None:
        rows.extend(
            GitRefDeletion.pending_of(project_id, after=position, limit=MAX_DELETES, only=only, without=bad.keys)
        )
        return rows[-1].id if rows else None

    numbers = partial(GitRefDeletion.next_pending_of, project_id, after=position, limit=MAX_DELETES, without=bad.keys)
    return rows, bad.chunk(read, numbers)


def _settle(bad: BadRecords, project_id: int, closed: dict[int, Closed], grow: Callable[[Settled], None]) -> None:
    """Close the rows, those aside that cannot be written; let the outcome grow by each step's."""
    bad.each(lambda ids: grow(GitRefDeletion.settle(project_id, [closed[number] for number in ids])), list(closed))


def _grow(outcome: ProjectOutcome, settled: Settled) -> None:
    outcome.total_deletes += settled.processed
    outcome.rejected += settled.rejected


def _grow_gone(outcome: ProjectOutcome, settled: Settled) -> None:
    outcome.gone += settled.processed


def _delete(
    project_id: int, rows: Sequence[GitRefDeletion], deadline: Deadline, settings: Settings
) -> dict[int, str | None]:
    """Delete the rows' refs; map each row that can be closed to why it is refused, if it is.

    A row whose ref another process has locked is not in the answer: it stays pending.
    """
    root, project = _require_root(settings), Project.get_or_none(Project.id == project_id)
    if project is None:
        raise git_refs.RepositoryMissing("there is no such project")
    doomed = {row.id: git_refs.Doomed(row.ref, row.expected_oid) for row in rows}
    until = time.monotonic() + deadline.left()
    outcomes = git_refs.delete(root, project.disk_path, list(doomed.values()), until=until)
    closed = {number: outcomes[one].reason for number, one in doomed.items() if outcomes[one].state != "locked"}
    if locked := [one for number, one in doomed.items() if number not in closed]:
        reason = outcomes[locked[0]].reason
        log.warning("refs locked", project_id=project_id, refs=len(locked), first=locked[0].ref, reason=reason)
    return closed


def _require_root(settings: Settings) -> Path:
    root = settings.repositories_root
    if root is None:
        raise git_refs.RootUnavailable("FORGEKEEPER_REPOSITORIES_ROOT is not set")
    try:
        found = sentinel.Folder(root).sentinel()
    except sentinel.Unreadable as error:
        raise git_refs.RootUnavailable(str(error)) from None
    if found is None:
        raise git_refs.RootUnavailable(f"{root} has no {sentinel.NAME}; `forgekeeper check` says what to do")
    if said := sentinel.objection(root, found, Installation.ensure()):
        raise git_refs.RootUnavailable(said)
    return root


@clean_project_refs.backlog("git_ref_deletion")
def pending(_now: datetime) -> Backlog:
    """Count the pending deletions; one that was tried anew counts from then."""
    return backlog.git_ref_deletions()


clean_project_refs.given_up("rejected_ref")(backlog.rejected_refs)


git_ref_cleanup.old_records("ref_deletion", keep=KEEP_PROCESSED)(GitRefDeletion.processed_before)
