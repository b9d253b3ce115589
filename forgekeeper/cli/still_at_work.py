"""What of a batch is still at work after it was stopped: its open run, and what workers say they are at."""

from __future__ import annotations

import time
from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

from forgekeeper.batches import spec
from forgekeeper.cli.console import err
from forgekeeper.database import now
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.processes import Process

PATIENCE = 20.0
"""Seconds that `stop` watches: workers say every few what they are at, and a chunk that takes long ends later."""
LOOK = 0.25


class Ended(NamedTuple):
    """What a watch has come to: who is *left*, how many there were, and when the last was seen to have ended."""

    left: list[str]
    seen: int
    seconds: float


def watch(batches: Collection[str], since: datetime, *, patience: float = PATIENCE) -> Ended:
    """Wait until nothing of *batches*, which are stopped *since* then, is at work, or *patience* is over."""
    began, known = time.monotonic(), set[str]()
    ends, left = began + patience, list[str]()
    with err.status("waiting for the last chunks") as status:
        while True:
            left, unheard = runs_of(batches), _unheard(since)
            left += children_of(batches)
            known |= set(left)
            if not (left or unheard) or time.monotonic() >= ends:
                return Ended(left, len(known), round(time.monotonic() - began, 1))
            status.update(f"{len(left)} still at work" if left else "waiting for the workers' next sign of life")
            time.sleep(LOOK)


def runs_of(batches: Collection[str]) -> list[str]:
    """Name the runs that have started."""
    found = (JobRun.open(name) for name in batches)
    rows = [row for row in found if row is not None and row.state == "started"]
    return [f"run {row.id} of {row.batch} on {row.started_by}" for row in rows]


def children_of(batches: Collection[str]) -> list[str]:
    """Name the children that workers said they are at when they were last heard of."""
    return [
        f"{work['message_id']} on {process.name}"
        for process in _living()
        for work in process.at_work or ()
        if _parent(work["what"]) in batches
    ]


def _unheard(since: datetime) -> list[Process]:
    """Return the workers that have not said since then what they are at."""
    return [process for process in _living() if process.alive_at <= since]


def _living() -> list[Process]:
    instant = now()
    return [one for one in Process.known() if one.kind == "worker" and not one.is_silent(instant)]


def _parent(name: str) -> str | None:
    """Return the batch whose child that is; of a batch there is a row."""
    declared = spec(name)
    return declared.batch.name if declared is not None and declared.batch.name != name else None
