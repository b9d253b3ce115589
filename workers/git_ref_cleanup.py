"""Delete the git refs that projects want deleted (batch 58).

Every minute the parent walks the projects that have pending rows, a hundred at a time and
at most ten thousand in a run, and starts a child for each; the next run goes on where this
one ended.  A child deletes its project's refs, all in one git transaction where it can,
and closes their rows: git first, the table second, so that a crash between the two
repeats a harmless deletion.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import structlog

from coordination.lease import Lease, LeaseTaken, lease
from models import Batch, GitRefDeletion, Project, database
from models.projects import LAST
from settings import Settings
from storage import git_refs, sentinel
from workers.attempt import Attempt, identity
from workers.blocked import Blocked
from workers.child import Child
from workers.clients import client
from workers.deadline import Deadline
from workers.declaring import batch, child_of
from workers.failpoints import failpoint

LOCK_TIMEOUT = timedelta(minutes=10)
BATCH_SIZE = 100
MAX_PROJECTS = 10_000
MAX_DELETES = 10_000

log = structlog.get_logger(__name__)


@dataclass
class Outcome:
    """How many projects have a child on its way, and how many of those had one already."""

    total_projects: int = 0
    enqueued: int = 0
    deduplicated: int = 0
    stopped: Literal["drained", "max_projects", "queue_full", "deadline"] = "drained"


@dataclass
class ProjectOutcome:
    """What a child comes to: rows closed because their refs are gone, and rows refused."""

    total_deletes: int = 0
    rejected: int = 0
    stopped: Literal["drained", "max_deletes", "lease_held", "deadline"] = "drained"


@batch(document=58, outcome=Outcome)
def git_ref_cleanup(attempt: Attempt) -> None:
    """Run the batch for the message's row."""
    try:
        if attempt.settings.repositories_root is None:
            raise Blocked("no_repositories", "no repositories are configured; set FORGEKEEPER_REPOSITORIES_ROOT")
        run(attempt, attempt.deadline(LOCK_TIMEOUT))
    finally:
        structlog.contextvars.bind_contextvars(stats=asdict(attempt.outcome))


@child_of(git_ref_cleanup, outcome=ProjectOutcome)
def clean_project_refs(child: Child, project_id: int) -> None:
    """Delete one project's refs, and leave a successor while there are more."""
    deadline = child.deadline(LOCK_TIMEOUT, pace=child.settings.pace(git_ref_cleanup.actor_name))
    clean(child.outcome, project_id, deadline, child.settings)
    child.more = child.outcome.stopped == "max_deletes"


def run(attempt: Attempt, deadline: Deadline) -> None:
    """Start a child for each project with pending rows, beginning behind the last one of the run before.

    Raises `RootUnavailable` where the repositories' disk is not there: children would only fail.
    """
    _require_root(attempt.settings)
    outcome: Outcome = attempt.outcome
    began = position = Batch.position(git_ref_cleanup.actor_name)
    last = LAST
    while left := MAX_PROJECTS - outcome.total_projects:
        projects = GitRefDeletion.projects(after=position, until=last, limit=min(BATCH_SIZE, left))
        if not projects:
            if last == began or not began:
                return
            position, last = 0, began  # round once, up to where we began
            continue
        sent = attempt.fan_out(clean_project_refs, [(f"clean_project_refs:{number}", (number,)) for number in projects])
        outcome.enqueued += sent.enqueued
        outcome.deduplicated += sent.deduplicated
        outcome.total_projects = outcome.enqueued + outcome.deduplicated
        failpoint("git_ref_cleanup.enqueued")
        if sent.queue_full:
            outcome.stopped = "queue_full"
            return
        position = projects[-1]
        Batch.move_to(git_ref_cleanup.actor_name, position)
        if deadline.passed():
            outcome.stopped = "deadline"
            return
    outcome.stopped = "max_projects"


def clean(outcome: ProjectOutcome, project_id: int, deadline: Deadline, settings: Settings) -> None:
    """Delete the project's refs, unless another is at it.

    Raises what `git_refs.delete` raises of the repository or the root as a whole: no row is
    consumed, and the message is retried.
    """
    try:
        with lease(
            client,
            f"clean_project_refs:{project_id}",
            ttl=settings.dead_after,
            at_most=LOCK_TIMEOUT,
            holder=identity(),
            forbidden=database.in_transaction,
        ) as held:
            outcome.stopped = _clean(outcome, project_id, held, deadline, settings)
    except LeaseTaken:
        outcome.stopped = "lease_held"


def _clean(
    outcome: ProjectOutcome, project_id: int, held: Lease, deadline: Deadline, settings: Settings
) -> Literal["drained", "max_deletes", "deadline"]:
    position = 0
    # A whole page each time, though it may go beyond the maximum: what is locked costs as much for one as for all.
    while outcome.total_deletes + outcome.rejected < MAX_DELETES:
        rows = GitRefDeletion.pending_of(project_id, after=position, limit=MAX_DELETES)
        if not rows:
            return "drained"
        held.check()
        try:
            reasons = _delete(project_id, rows, deadline, settings)
        except git_refs.GitTimedOut as error:
            log.warning("git ended, it took too long", project_id=project_id, error=str(error))
            return "deadline"
        failpoint("clean_project_refs.deleted")
        settled = GitRefDeletion.settle(reasons)
        outcome.total_deletes += settled.processed
        outcome.rejected += settled.rejected
        failpoint("clean_project_refs.settled")
        position = rows[-1].id
        if deadline.passed(len(rows)):
            return "deadline"
    more = GitRefDeletion.pending_of(project_id, after=position, limit=1)
    return "max_deletes" if more else "drained"


def _delete(
    project_id: int, rows: Sequence[GitRefDeletion], deadline: Deadline, settings: Settings
) -> dict[int, str | None]:
    """Delete the rows' refs; map each row that can be closed to why it is refused, if it is.

    A row whose ref another process has locked is not in the answer: it stays pending.
    """
    root, project = _require_root(settings), Project.get_or_none(Project.id == project_id)
    if project is None:
        return dict.fromkeys((row.id for row in rows), None)
    doomed = {row.id: git_refs.Doomed(row.ref, row.expected_oid) for row in rows}
    until = time.monotonic() + deadline.left()
    try:
        outcomes = git_refs.delete(root, project.disk_path, list(doomed.values()), until=until)
    except git_refs.RepositoryMissing:
        return dict.fromkeys(doomed, None)
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
        if sentinel.Folder(root).has_sentinel():
            return root
        raise git_refs.RootUnavailable(f"{root} has no {sentinel.NAME}; `forgekeeper check` says what to do")
    except sentinel.Unreadable as error:
        raise git_refs.RootUnavailable(str(error)) from None
