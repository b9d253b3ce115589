"""The children of a run, for `why` and `status`: how many were sent, what has become of them, and which fail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from forgekeeper.batches import BATCHES, BatchSpec, ChildSpec
from forgekeeper.cli.console import moment
from forgekeeper.cli.without_redis import Looks
from forgekeeper.connections import client
from forgekeeper.delivery.queues import of_run
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.processes import Process
from forgekeeper.runs.quarantine import Quarantined

SHOWN = 10
"""How many failures are written out."""


def failing(batch: str) -> dict[str, Any] | None:
    """Sum up the batch's children that failed and have not ended well since, None where there are none."""
    found = Quarantined.of(batch)
    last = found.first()
    return None if last is None else {"count": found.count(), "last": _failure(last)}


def said(found: Mapping[str, Any]) -> str:
    """Say what `failing` has found, for a line of a table."""
    last, count = found["last"], found["count"]
    return f"{count} {_children(count)} failing, the last {last['key']}: {last['error']}"


def warning(batch: str, found: Mapping[str, Any]) -> str:
    """Say what `failing` has found, and where more is said."""
    return f"{batch}: {said(found)}; `forgekeeper why {batch}` lists them"


def of(run: JobRun, known: Sequence[Process], instant: datetime, redis: Looks) -> list[dict[str, Any]]:
    """Return what is known of the children that the run has sent, by their declarations; what it sent none of is not.

    What only Redis knows is None where it cannot be asked.
    """
    batch = BATCHES.get(run.batch)
    sent = [child for child in batch.children if _sent(child, run) or _rows(child, run)] if batch else []
    if sent:
        redis.begin()
    return [_of(child, run, known, instant, redis) for child in sent]


def _of(child: ChildSpec, run: JobRun, known: Sequence[Process], instant: datetime, redis: Looks) -> dict[str, Any]:
    sent = _sent(child, run)
    alive = [work for one in known if not one.is_silent(instant) for work in one.at_work or ()]
    running = {work["message_id"] for work in alive if work["what"] == child.name and work.get("run") == run.id}
    look = partial(of_run, client, child.queue, child.name, run.id)
    found = redis.ask(f"queue {child.queue}", look)
    counts: dict[str, Any] = dict.fromkeys(("queued", "ended"))
    if found is not None:
        counts = {"queued": len({*found} - running), "ended": max(0, sent - len(running | {*found}))}
    failures = [_failure(row) for row in _rows(child, run)]
    return {"child": child.name, "sent": sent, "running": len(running), **counts, "failing": failures}


def _rows(child: ChildSpec, run: JobRun) -> list[Quarantined]:
    return [row for row in Quarantined.of(run.batch, run=run.id) if row.record == child.name]


def _sent(child: ChildSpec, run: JobRun) -> int:
    """Add up what the run has sent, its earlier attempts included."""
    result = run.result or {}
    earlier = result.get("earlier")
    attempts = [result, *(earlier if isinstance(earlier, list) else [])]
    counts = [one.get(child.enqueued_as) for one in attempts if isinstance(one, dict)]
    return sum(count for count in counts if isinstance(count, int))


def sentences(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say what became of a run's children."""
    for one in found:
        words = {"running": "running", "queued": "queued"}
        states = [f"{one[state]:,} {word}" for state, word in words.items() if one[state]]
        ended = "" if one["ended"] is None else f"{one['ended']:,} ended"
        known = ", ".join([*states, *([ended] if ended else [])])
        yield f"It sent {one['sent']:,} {_children(one['sent'])} {one['child']}{f': {known}' if known else ''}."
        yield from _failures(one["failing"], "of them")


def others(batch: BatchSpec, run: JobRun | None) -> Iterator[str]:
    """Say which children of the batch fail that other runs than *run* have sent."""
    rows = [row for row in Quarantined.of(batch.name) if run is None or row.run != run.id]
    yield from _failures([_failure(row) for row in rows], "that other runs sent")


def _failures(failures: Sequence[Mapping[str, Any]], which: str) -> Iterator[str]:
    if not failures:
        return
    count = len(failures)
    yield f"{count:,} {_children(count)} {which} {'fails' if count == 1 else 'fail'}:"
    for one in failures[:SHOWN]:
        of_run = f" of run {one['run']}" if which != "of them" and one["run"] else ""
        times = "once" if one["failures"] == 1 else f"{one['failures']} times since {moment(one['since'])}"
        last = f"the last time at {moment(one['failed_at'])}: {one['error']}; {_again(one['retry_at'])}"
        yield f"  {one['key']}{of_run} failed {times}, {last}"
    if count > SHOWN:
        yield f"  and {count - SHOWN:,} more: `forgekeeper why RUN --json` has all of a run's"


def _again(retry_at: datetime | None) -> str:
    if retry_at is None:
        return "it waits for a person: `forgekeeper quarantine`"
    return f"the first run after {moment(retry_at)} tries it again"


def _failure(row: Quarantined) -> dict[str, Any]:
    fields = ("record", "key", "run", "error", "failures", "since", "failed_at")
    return {field: getattr(row, field) for field in fields} | {"retry_at": row.again}


def _children(count: int) -> str:
    return "child" if count == 1 else "children"
