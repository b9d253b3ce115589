"""What is wrong now, in sentences: `status` and `processes` show them first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from forgekeeper.batches import BATCHES, queues
from forgekeeper.cli.console import moment
from forgekeeper.runs.processes import Process


def of_processes(processes: Sequence[Process], instant: datetime) -> Iterator[str]:
    """Yield what is wrong with the processes; *processes* are all that are known."""
    living = [process for process in processes if not process.is_silent(instant)]
    schedulers = [process for process in living if process.kind == "scheduler"]
    if not schedulers:
        yield "no scheduler lives: nothing is sent when it is due; start `forgekeeper scheduler`"
    yield from _different_timetables(schedulers)
    yield from _queues_without_worker([process for process in living if process.kind == "worker"])


def of_clocks(clocks: Mapping[str, Any], ahead: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the clocks, and which ticks were claimed by a wrong one."""
    yield from (found["trouble"] for found in clocks.values() if found["trouble"])
    for name, found in ahead.items():
        yield (
            f"{name}: {found['ticks']} tick(s) were claimed before their time, up to that of "
            f"{moment(found['newest'])}: PostgreSQL's clock was ahead; they hold nothing back and run again"
        )


def _different_timetables(schedulers: Sequence[Process]) -> Iterator[str]:
    """Name each batch whose schedulers do not agree when it is due: it runs at all these times."""
    for batch in BATCHES:
        kept: dict[str, list[str]] = {}
        for one in schedulers:
            kept.setdefault((one.timetable or {}).get(batch, "off"), []).append(one.name)
        if len(kept) > 1:
            each = " and ".join(f"{schedule} ({', '.join(names)})" for schedule, names in sorted(kept.items()))
            yield f"schedulers keep different timetables: {batch} is due at {each}; give them the same settings"


def _queues_without_worker(workers: Sequence[Process]) -> Iterator[str]:
    """Name each queue from which no worker fetches; a worker that drains fetches nothing."""
    served = {queue for worker in workers if not worker.draining for queue in worker.queues or ()}
    lacking: dict[str, list[str]] = {}
    for queue in sorted({*queues()} - served):
        draining = ", ".join(worker.name for worker in workers if queue in (worker.queues or ()))
        lacking.setdefault(draining, []).append(queue)
    for draining, names in lacking.items():
        but = f" ({draining} drains)" if draining else ""
        which = f"queue{'' if len(names) == 1 else 's'} {', '.join(names)}"
        yield f"no worker for {which}{but}: start `forgekeeper worker --queues {','.join(names)}`"
