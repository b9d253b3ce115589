"""The projects that a run of batch 58 looks after, page by page, from where the last run ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from forgekeeper.runs.batch import Batch
from workers.git_ref_cleanup.deletions import LAST, waiting_projects

BATCH_SIZE = 100
NAME = "git_ref_cleanup"


class Pages:
    """Pages of projects with pending rows, *most* of them in all; *ended* says why there are no more.

    Where the run is, it writes down once a page is done: one that is cut off is gone through again.
    """

    def __init__(self, most: int) -> None:
        self._left = most
        self.ended: Literal["drained", "max_projects"] = "drained"

    def __iter__(self) -> Iterator[list[int]]:
        """Go round once, up to where we began."""
        began = position = Batch.position(NAME)
        last = LAST
        while self._left:
            projects = waiting_projects(after=position, until=last, limit=min(BATCH_SIZE, self._left))
            if not projects:
                if last == began or not began:
                    return
                position, last = 0, began
                continue
            self._left -= len(projects)
            yield projects
            position = projects[-1]
            Batch.move_to(NAME, position)
        self.ended = "max_projects"
