"""What is wrong now, in sentences: `status` and `processes` show them first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from forgekeeper.batches import BATCHES, queues
from forgekeeper.process.rows import Process


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
    for queue in sorted({*queues()} - served):
        draining = [worker.name for worker in workers if queue in (worker.queues or ())]
        but = f" ({', '.join(draining)} drains)" if draining else ""
        yield f"no worker for queue {queue}{but}: start `forgekeeper worker --queues {queue}`"
