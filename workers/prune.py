"""Remove forgekeeper's own old records.

Runs hourly, in bounded chunks: processed ref deletions after a day, closed runs after
thirty days (the newest of each batch stays), dead letters past their time to live,
processes that fell silent a day ago.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal

from coordination.messages import forget_dead
from models import GitRefDeletion, JobRun, Process, now
from workers.attempt import Attempt
from workers.broker import QUEUES, broker
from workers.deadline import Deadline
from workers.declaring import batch
from workers.failpoints import failpoint

CHUNK = 1_000
MAX_RUNTIME = timedelta(minutes=5)
KEEP_REF_DELETIONS = timedelta(days=1)
KEEP_RUNS = timedelta(days=30)
KEEP_PROCESSES = timedelta(days=1)


@dataclass
class Outcome:
    """How many records of each kind were removed; it grows with each chunk."""

    ref_deletions: int = 0
    runs: int = 0
    dead_letters: int = 0
    processes: int = 0
    stopped: Literal["drained", "deadline"] = "drained"


@batch(document=None, outcome=Outcome)
def prune(attempt: Attempt) -> None:
    """Run the batch for the message's row."""
    run(attempt.outcome, attempt.deadline(MAX_RUNTIME))


def run(outcome: Outcome, deadline: Deadline) -> None:
    """Remove what has been kept for long enough."""
    instant = now()
    removals: list[tuple[str, Callable[..., int]]] = [
        ("ref_deletions", partial(GitRefDeletion.delete_processed, instant - KEEP_REF_DELETIONS)),
        ("runs", partial(JobRun.delete_closed, instant - KEEP_RUNS)),
        *(("dead_letters", partial(forget_dead, broker, queue)) for queue in QUEUES),
        ("processes", partial(Process.delete_silent, instant - KEEP_PROCESSES)),
    ]
    for kind, remove in removals:
        count = CHUNK
        while count == CHUNK:
            count = remove(limit=CHUNK)
            setattr(outcome, kind, getattr(outcome, kind) + count)
            failpoint("prune.removed")
            if deadline.passed(count) and count == CHUNK:
                outcome.stopped = "deadline"
                return
