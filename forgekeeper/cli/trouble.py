"""What is wrong now, in sentences: `status` and `processes` show them first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from forgekeeper.batches import BATCHES, queues
from forgekeeper.runs.processes import Process

NAMED = "\0"
"""Stands for the batch's name while sentences are compared."""


def warnings(processes: Sequence[Process], instant: datetime) -> Iterator[str]:
    """Yield a sentence for each thing that somebody should see to; *processes* are all that are known.

    PostgreSQL alone is asked: `status` has to answer without Redis.
    """
    living = [process for process in processes if not process.is_silent(instant)]
    schedulers = [process for process in living if process.kind == "scheduler"]
    if not schedulers:
        yield "no scheduler lives: nothing is sent when it is due; start `forgekeeper scheduler`"
    yield from different_timetables(schedulers)
    yield from queues_without_worker([process for process in living if process.kind == "worker"])


def different_timetables(schedulers: Sequence[Process]) -> Iterator[str]:
    """Name each batch whose schedulers do not agree when it is due: it runs at all these times."""
    for batch in BATCHES:
        kept: dict[str, list[str]] = {}
        for one in schedulers:
            kept.setdefault((one.timetable or {}).get(batch, "off"), []).append(one.name)
        if len(kept) > 1:
            each = " and ".join(f"{schedule} ({', '.join(names)})" for schedule, names in sorted(kept.items()))
            yield f"schedulers keep different timetables: {batch} is due at {each}; give them the same settings"


def queues_without_worker(workers: Sequence[Process]) -> Iterator[str]:
    """Name each queue whose messages nobody fetches; a worker that drains fetches none."""
    served = {queue for worker in workers if not worker.draining for queue in worker.queues or ()}
    lacking: dict[str, list[str]] = {}
    for queue in sorted({*queues()} - served):
        draining = ", ".join(worker.name for worker in workers if queue in (worker.queues or ()))
        lacking.setdefault(draining, []).append(queue)
    for draining, names in lacking.items():
        but = f" ({draining} drains)" if draining else ""
        which = f"queue{'' if len(names) == 1 else 's'} {', '.join(names)}"
        yield f"no worker for {which}{but}: start `forgekeeper worker --queues {','.join(names)}`"


def together(sentences: Iterable[str]) -> Iterator[str]:
    """Yield one sentence for those that differ in nothing but the batch that they begin with."""
    alike: dict[str, set[str]] = {}
    for sentence in sentences:
        name = sentence.partition(" ")[0]
        known = name in BATCHES
        alike.setdefault(sentence.replace(name, NAMED) if known else sentence, set()).update({name} if known else ())
    for sentence, named in alike.items():
        names = [name for name in BATCHES if name in named]
        plural = sentence.replace(f"{NAMED} is ", f"{', '.join(names)} are ", 1) if len(names) > 1 else sentence
        yield plural.replace(NAMED, " ".join(names))
