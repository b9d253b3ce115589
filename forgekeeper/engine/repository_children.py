"""The fan-out of `ChildPerRepository`: projects with pending rows, page by page, missing repositories last."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from forgekeeper.api.answers import Children, Mistake, Note
from forgekeeper.api.batches import BatchSpec, ChildSpec
from forgekeeper.api.refs import ChildPerRepository
from forgekeeper.engine.run import Run
from forgekeeper.guards.repositories import require_repositories
from forgekeeper.ledger.holds import Batch
from forgekeeper.sources.status_queue import MAX_PROJECT_ID, RefQueue
from forgekeeper.targets.missing_repositories import doubt_missing, find_missing
from forgekeeper.targets.repositories_root import prove_root

MAX_PROJECTS_PER_MESSAGE, MAX_REFS_OF_SMALL_PROJECT = 25, 10
"""Maximum projects that share a message, each with at most that many pending refs when the message is sent."""
ENQUEUED_FIELD, TOTAL_FIELD = "enqueued", "total_projects"
"""Fields of the result: children that were sent, and these plus children on their way."""


def find_child_with_refs(batch: BatchSpec) -> ChildSpec:
    """Return the child of *batch* that answers with `Refs`; raise `Mistake` unless there is exactly one."""
    children = [child for child in batch.children if child.refs is not None]
    if len(children) != 1:
        found = ", ".join(child.name for child in children) or "none"
        raise Mistake(
            f"{batch.name} returns ChildPerRepository: return Refs from exactly one of its children, not from {found}"
        )
    return children[0]


def plan_repository_children(run: Run[Any], answer: ChildPerRepository) -> Generator[Children | Note, None, str | None]:
    """Yield a child for each project with pending rows; return why the run stopped, None if all have one.

    Raises `Blocked` if no repositories are configured, `RootUnavailable` if their disk is not mounted, and
    `RepositoriesMissing` if too many are missing: children would only fail.
    """
    child, batch, settings = find_child_with_refs(run.declared.batch), run.declared.batch.name, run.settings
    assert child.refs is not None, "find_child_with_refs checks that"
    require_repositories(settings)
    root, queue = prove_root(settings), RefQueue(child.refs, batch)
    options: dict[str, Any] = {"sent": ENQUEUED_FIELD, "all_of": TOTAL_FIELD, "by_project": True}
    missing, total = dict[int, str](), 0
    for projects in _list_project_pages(queue, batch, answer):
        lacking, total = find_missing(root, queue.read_paths(projects)), total + len(projects)
        present = [project for project in projects if project not in lacking]
        small = queue.find_small_projects(present, most=MAX_REFS_OF_SMALL_PROJECT)
        yield Children(child, [one for one in present if one not in small], **options)
        yield Children(child, sorted(small), per_message=MAX_PROJECTS_PER_MESSAGE, **options)
        missing |= lacking
        yield Note(missing_repositories=len(missing))
    if missing:
        doubt_missing(root, missing, projects=total, share=settings.missing_repositories, batch=batch)
        yield Children(child, {str(project): (project, True) for project in missing}, **options)
    return "max_projects" if total == answer.most else None


def _list_project_pages(queue: RefQueue, batch: str, answer: ChildPerRepository) -> Iterator[list[int]]:
    """Yield pages of projects in one round from the position that the last run of *batch* left.

    The position is recorded when a page is done: a page that is cut off is sent again.
    """
    began, left = Batch.read_position(batch), answer.most
    for after, last in ((began, MAX_PROJECT_ID), (0, began)):
        position = after
        while left and (
            projects := queue.find_waiting_projects(after=position, until=last, limit=min(answer.page, left))
        ):
            yield projects
            left, position = left - len(projects), projects[-1]
            Batch.store_position(batch, position)
