"""Delete the git refs that projects want deleted (batch 58).

Every minute the parent walks the projects that have pending rows, a hundred at a time and
at most ten thousand in a run, and starts a child for each; the next run goes on where this
one ended.  A child deletes its project's refs, all in one git transaction where it can,
and closes their rows: git first, the table second, so that a crash between the two
repeats a harmless deletion.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from forgekeeper import Blocked, Children, Note, Record, Rows, Subject, Threshold, batch, child
from forgekeeper.database import queries, survey
from forgekeeper.database.queries import Backlog, Stake
from forgekeeper.declaring.shown import Refused, numbers
from forgekeeper.deleting.work import settings
from forgekeeper.runs.holds import Batch
from metrics.catalogue import Counter
from models import GitRefDeletion, Project
from workers.git_ref_cleanup import deletions, preview, repositories
from workers.git_ref_cleanup.cleaning import LOCK_TIMEOUT, ProjectOutcome, ProjectRefs
from workers.git_ref_cleanup.deletions import LAST, waiting_projects
from workers.git_ref_cleanup.repositories import believe, missing_of, require_root

NAME = "git_ref_cleanup"
BATCH_SIZE = 100
MAX_PROJECTS = 10_000
KEEP_PROCESSED = timedelta(days=1)
"""So long after it was made, a deletion's row goes: `prune` removes it."""


@dataclass
class Outcome:
    """How many projects have a child on its way, how many of those had one already, and how many lack repositories."""

    total_projects: int = 0
    enqueued: int = 0
    deduplicated: int = 0
    stopped: Literal["drained", "max_projects", "queue_full", "deadline"] = "drained"
    missing_repositories: int = 0


@batch(
    document=58,
    cron="* * * * *",
    budget=LOCK_TIMEOUT,
    time_limit=timedelta(minutes=12),
    outcome=Outcome,
    tables=[GitRefDeletion, Project],
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
def git_ref_cleanup(now: datetime) -> Generator[Children | Note, None, str]:  # noqa: ARG001, what is pending is due
    """Delete the git refs that projects want deleted, a child for each project.

    It begins behind the last project of the run before.  Projects without a repository come last, once it is known how
    many they are.  Raises `RepositoriesMissing` where they are too many, and `RootUnavailable` where the repositories'
    disk is not there: children would only fail.
    """
    if settings().repositories_root is None:
        raise Blocked("no_repositories", "no repositories are configured; set FORGEKEEPER_REPOSITORIES_ROOT")
    root, missing, total = require_root(settings()), dict[int, str](), 0
    for projects in pages(MAX_PROJECTS):
        lacking, total = missing_of(root, projects), total + len(projects)
        yield _children([(number,) for number in projects if number not in lacking])
        missing |= lacking
        yield Note(missing_repositories=len(missing))
    if missing:
        believe(root, missing, total, settings().missing_repositories)
        yield _children([(number, True) for number in missing])
    return "max_projects" if total == MAX_PROJECTS else "drained"


def pages(most: int) -> Iterator[list[int]]:
    """Yield pages of projects with pending rows, once round from where the last run ended, *most* of them in all.

    Where the run is, is written down once a page is done: a page that is cut off comes again.
    """
    began = position = Batch.position(NAME)
    last = LAST
    while most:
        projects = waiting_projects(after=position, until=last, limit=min(BATCH_SIZE, most))
        if projects:
            most -= len(projects)
            yield projects
            position = projects[-1]
            Batch.move_to(NAME, position)
        elif last == began or not began:
            return
        else:
            position, last = 0, began


def _children(calls: Sequence[tuple[int] | tuple[int, bool]]) -> Children:
    keyed = {str(call[0]): call for call in calls}
    return Children(clean_project_refs, keyed, sent="enqueued", all_of="total_projects")


git_ref_cleanup.audited(
    Subject(
        "ref",
        "PROJECT:REF",
        "git_ref_deletion",
        name="ref",
        within="project_id",
        because="its project asked for that at {due}",
        restore="forgekeeper refs restore {id}",
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
            "git_ref_deletion",
            examined=("total_deletes", "rejected", "gone"),
            processed=("total_deletes",),
            errors={"database": (), "gitaly": ("rejected",)},
            objective=timedelta(hours=2),
        ),
        Record("gone_ref_deletion", processed=("gone",)),
        Record("rejected_ref", refused=True),
    ],
    thresholds=[Threshold("dead_letter")],
    collector="git_refs",
    continues=["max_deletes"],
    lease=True,
)
def clean_project_refs(now: datetime, project_id: int, missing: bool = False) -> ProjectRefs:  # noqa: ARG001, FBT001, FBT002, a message
    """Delete one project's refs, and leave a successor while there are more.

    Where *missing*, the parent has found no repository, and few enough like it: then its rows are closed.
    """
    return ProjectRefs(project_id, missing=missing)


@clean_project_refs.backlog("git_ref_deletion")
def pending(_now: datetime) -> Backlog:
    """Count the pending deletions; one that was tried again counts from then."""
    return Backlog.of(GitRefDeletion.pending(), oldest=GitRefDeletion.updated_at)


@git_ref_cleanup.at_stake
def at_stake(_now: datetime) -> Stake:
    """Return the pending deletions, of all rows: refs cannot be counted."""
    return Stake.rows(GitRefDeletion.pending())


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
        GitRefDeletion.processed_before(now - KEEP_PROCESSED),
        since=GitRefDeletion.processed_at,
        record="ref_deletion",
        counted="ref_deletions",
        after=KEEP_PROCESSED,
    )


git_ref_cleanup.collector("git_locks", gauges=[repositories.STALE_LOCKS])(repositories.stale_locks)
clean_project_refs.preview(preview.refs)


@git_ref_cleanup.repositories
def known() -> list[str]:
    """Return where some projects' repositories should lie."""
    return survey.sample("projects", "id", "disk_path")
