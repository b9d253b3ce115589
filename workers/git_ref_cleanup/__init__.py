"""Delete the git refs that projects want deleted (batch 58).

Every minute the parent walks the projects that have pending rows, a hundred at a time and
at most ten thousand in a run, and starts a child for each; the next run goes on where this
one ended.  A child deletes its project's refs, all in one git transaction where it can,
and closes their rows: git first, the table second, so that a crash between the two
repeats a harmless deletion.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import structlog

from forgekeeper import Children, Counter, Items, Note, Record, Rows, Subject, Threshold, batch, child
from forgekeeper.api.answers import Backlog
from forgekeeper.api.items import Deleted, Fence, Item, Page, State
from forgekeeper.api.shown import Refused, numbers
from forgekeeper.engine.work import settings
from forgekeeper.platform.database import queries, survey
from forgekeeper.platform.database.queries import Stake, among
from forgekeeper.platform.settings import Settings
from forgekeeper.targets import git_refs, git_repository
from forgekeeper.targets.git_command import GitError, GitTimedOut
from forgekeeper.targets.git_repository import RepositoryMissing
from models import DeletionStatus, GitRefDeletion, Project, ProjectGroup
from workers.git_ref_cleanup import deletions, repositories
from workers.git_ref_cleanup.deletions import NAME, RECORD, Pending
from workers.git_ref_cleanup.repositories import believe, missing_of, require_plain, require_root
from workers.git_ref_cleanup.restoring import count_recoverable

LOCK_TIMEOUT = timedelta(minutes=10)
BATCH_SIZE, MAX_PROJECTS, MAX_DELETES = 100, 10_000, 10_000
KEEP_PROCESSED = timedelta(days=1)
"""So long after it was made, a deletion's row goes: `prune` removes it."""
COUNTED: dict[str, Any] = {"sent": "enqueued", "all_of": "total_projects", "by_project": True}

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
    budget=LOCK_TIMEOUT,
    time_limit=timedelta(minutes=12),
    outcome=Outcome,
    tables=[GitRefDeletion, Project, ProjectGroup],
    deletes_from="repositories",
    records=[Record("project", examined=("total_projects",))],
    counters=[
        Counter("fanout_limit_reached", "Fan-outs cut off at their limit (MAX_PROJECTS).", stopped="max_projects"),
        Counter(
            "missing_repositories",
            "Projects with pending deletions that were found without a repository; each run counts them again.",
            ("missing_repositories",),
        ),
    ],
    thresholds=[Threshold("dead_letter")],
    logged_as="stats",
    commands="workers.git_ref_cleanup.commands",
)
def git_ref_cleanup(now: datetime) -> Generator[Children | Note, None, str]:
    """Delete the git refs that projects want deleted, a child for each project.

    It begins behind the last project of the run before.  Projects without a repository come last, once it is known how
    many they are.  Raises `RepositoriesMissing` where they are too many, and `RootUnavailable` where the repositories'
    disk is not there: children would only fail.
    """
    require_plain(settings())
    root, missing, total = require_root(settings()), dict[int, str](), 0
    for projects in deletions.pages(NAME, BATCH_SIZE, MAX_PROJECTS):
        lacking, total = missing_of(root, projects), total + len(projects)
        yield Children(clean_project_refs, [number for number in projects if number not in lacking], **COUNTED)
        missing |= lacking
        yield Note(missing_repositories=len(missing))
    if missing:
        believe(root, missing, total, settings().missing_repositories)
        yield Children(clean_project_refs, {str(number): (number, True) for number in missing}, **COUNTED)
    return "max_projects" if total == MAX_PROJECTS else "drained"


git_ref_cleanup.audited(
    Subject(
        "ref",
        "PROJECT:REF",
        "git_ref_deletion",
        name="ref",
        within="project_id",
        because="its project asked for that at {due}",
        restore="forgekeeper refs restore {id}",
        restore_run="forgekeeper refs restore --run {run}",
        undone="refs come back until `git gc` prunes their objects, two weeks by default",
        count_recoverable=count_recoverable,
    )
)


@child(
    git_ref_cleanup,
    queue="git",
    budget=LOCK_TIMEOUT,
    time_limit=timedelta(minutes=12),
    outcome=ProjectOutcome,
    enqueued_as="enqueued",
    records=[
        Record(
            RECORD,
            examined=("total_deletes", "rejected", "gone"),
            processed=("total_deletes",),
            errors={"database": (), "gitaly": ("rejected",)},
            objective=timedelta(hours=2),
            excluded_by=("project", "pattern"),
        ),
        Record("gone_ref_deletion", processed=("gone",)),
        Record("rejected_ref", refused=True),
    ],
    thresholds=[Threshold("dead_letter")],
    collector="git_refs",
    continues=["max_deletes"],
    lease=True,
)
def clean_project_refs(now: datetime, project_id: int, missing: bool = False) -> Items[Pending]:  # noqa: FBT001, FBT002, a message
    """Delete one project's refs, and leave a successor while there are more.

    Where *missing*, the parent has found no repository, and few enough like it: then its rows are closed.
    """
    require_plain(settings())
    return _ProjectRefs(project_id, missing=missing)


class _ProjectRefs(Items[Pending]):
    """The refs that a project wants deleted, by its pending rows; where its repository is *missing*, these are closed.

    Raises `GitError` of the repository or the root as a whole: no row is consumed, and the message is retried.
    """

    record = RECORD
    name = "ref"
    project = "project_id"
    at_most = "max_deletes"
    gone = frozenset({"deleted", "gone"})
    stays = frozenset({"moved", "rejected"})
    all_bad = True

    def __init__(self, project_id: int, *, missing: bool) -> None:
        self._project = project_id
        self._missing = missing
        self._repository_gone = False
        # A whole page each time, though it may go beyond the most: locking costs as much for one ref as for all.
        self.chunk = self.most = MAX_DELETES

    def due_of(self, keys: Sequence[int]) -> set[int]:
        return among(GitRefDeletion.pending(), keys)

    def key(self, one: Pending) -> int:
        return one.id

    def next(self, page: Page) -> list[int]:
        return deletions.next_pending_of(self._project, page)

    def claim(self, page: Page) -> list[Pending]:
        # The project's lease is the claim.
        return deletions.pending_of(self._project, page)

    def scope(self, one: Pending) -> str:
        return str(one.project_id)

    def scopes(self) -> list[str]:
        return [str(self._project)]

    def became(self, _scope: str | None, until: float, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        # Where git cannot read the repository, it is unknown.
        with suppress(GitError):
            there = git_repository.standing(*self._where(), [row["ref"] for row in rows], until=until)
            now = [(row["oid"], there.get(row["ref"])) for row in rows]
            return ["deleted" if value is None else "kept" if value == was else "moved" for was, value in now]
        return [None] * len(rows)

    def mark(self, items: Sequence[Pending], kept: Mapping[Pending, State]) -> dict[Pending, State | None]:
        # Only at the deletion git says what each ref was.
        return {row: kept.get(row) for row in items}

    def record_look(self, items: Mapping[Pending, Item]) -> None:
        deletions.record_first_look(self._project, {row: item.detail["oid"] for row, item in items.items()})

    def find_lost(self, items: Sequence[Pending]) -> list[Pending]:
        still = deletions.still_pending(self._project, [row.id for row in items])
        return [row for row in items if row.id not in still]

    def delete(self, items: Sequence[Pending], fence: Fence[Pending]) -> Deleted[Pending]:
        doomed, begun = {row: git_refs.Doomed(row.ref, row.expected_oid) for row in items}, False

        def announce(values: Mapping[git_refs.Doomed, str]) -> None:
            nonlocal begun
            begun = True
            fence.announce({row: _item(row, values[one]) for row, one in doomed.items() if one in values})

        def find_lost() -> list[git_refs.Doomed]:
            return [doomed[row] for row in fence.find_lost(items)]

        try:
            outcomes = git_refs.delete(
                *self._where(), list(doomed.values()), until=fence.until, announce=announce, find_lost=find_lost
            )
        except GitError as error:
            missing = isinstance(error, RepositoryMissing)
            if not missing or (not self._missing and repositories.paths([self._project])):
                return Deleted({}, error=error, began=begun)
            self._repository_gone = True
            return Deleted(dict.fromkeys(items, git_refs.GONE), began=begun)
        if locked := [one for one in doomed.values() if outcomes[one].state == "locked"]:
            reason = outcomes[locked[0]].reason
            log.warning("refs locked", project_id=self._project, refs=len(locked), first=locked[0].ref, reason=reason)
        return Deleted({row: outcomes[one] for row, one in doomed.items()})

    def _where(self) -> tuple[Path, str]:
        root, project = repositories.require_root(settings()), Project.get_or_none(Project.id == self._project)
        if project is None:
            raise RepositoryMissing("there is no such project")
        return root, project.disk_path

    def settle(self, states: Mapping[Pending, State]) -> dict[str, int]:
        processed, rejected = deletions.settle(self._project, {row: one.reason for row, one in states.items()})
        return {"gone": processed} if self._repository_gone else {"total_deletes": processed, "rejected": rejected}

    def interrupted(self, _scope: str | None, error: Exception) -> Literal["deadline", "missing"]:
        if isinstance(error, GitTimedOut):
            log.warning("git ended, it took too long", project_id=self._project, error=str(error))
            return "deadline"
        if isinstance(error, RepositoryMissing):
            log.warning("repository missing, its rows are kept", project_id=self._project)
            return "missing"
        raise error


def _item(row: Pending, was: str) -> Item:
    return Item(row.id, row.ref, {"project_id": row.project_id, "ref": row.ref, "oid": was, "due": row.created_at})


@clean_project_refs.backlog(RECORD)
def pending(_now: datetime) -> Backlog:
    """Count the pending deletions; one that was tried again counts from then."""
    return Backlog.of(deletions.due(NAME), oldest=GitRefDeletion.updated_at)


@git_ref_cleanup.at_stake
def at_stake(_now: datetime) -> Stake:
    """Return the pending deletions, of all rows: refs cannot be counted."""
    return Stake.rows(deletions.due(NAME))


clean_project_refs.quarantines(
    Refused(
        kind="ref",
        record="rejected_ref",
        count=lambda: queries.count(GitRefDeletion.rejected()),
        entries=deletions.rejected,
        retry=lambda keys: deletions.retry(numbers(keys)),
        discard=lambda keys: deletions.discard(numbers(keys)),
    )
)


@git_ref_cleanup.old_records
def processed(now: datetime) -> Rows[GitRefDeletion]:
    """Return the rows of deletions that were made long enough ago."""
    return Rows(
        GitRefDeletion,
        GitRefDeletion.status == DeletionStatus.PROCESSED,
        since=GitRefDeletion.processed_at,
        record="ref_deletion",
        counted="ref_deletions",
        older_than=KEEP_PROCESSED,
    )


@clean_project_refs.shows_rows
def show_rows(_now: datetime, _settings: Settings) -> list[Rows[GitRefDeletion]]:
    """Return the deletions that have not been made."""
    pending = GitRefDeletion.status == DeletionStatus.PENDING
    return [Rows(GitRefDeletion, pending, since=GitRefDeletion.created_at, record=RECORD)]


git_ref_cleanup.collector("git_locks", gauges=[repositories.STALE_LOCKS])(repositories.stale_locks)
clean_project_refs.preview(repositories.previewed)


@git_ref_cleanup.repositories
def known() -> list[str]:
    """Return where some projects' repositories should lie."""
    return survey.sample("projects", "id", "disk_path")
