"""The preview of a batch and its children, in one snapshot that is only read."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import redis

from forgekeeper.api.batches import BatchSpec, Declaration, FeatureFlag
from forgekeeper.api.inspection import PreviewContext, PreviewPart
from forgekeeper.guards import breaker, preconditions
from forgekeeper.guards.preconditions import Blocked
from forgekeeper.ledger import holds, quarantine
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.platform.database import exclusions, now
from forgekeeper.platform.database.read_only import read_only_snapshot
from forgekeeper.platform.settings import Settings

PREVIEW_TIME_LIMIT = timedelta(seconds=10)
"""Time limit for counting in a preview; the rest is estimated."""
DEFAULT_SAMPLE_SIZE = 10


@dataclass(frozen=True)
class BatchPreview:
    """The effect of a run of the batch, begun at *now*, and notes on its obstacles.

    *due* is the number of all due records, as the breaker counts them, and the number to release; None if it is
    unknown.  *is_held* says that the circuit breaker holds the batch, or that the batch is new.
    """

    batch: str
    now: datetime
    parts: list[PreviewPart]
    notes: list[str]
    due: int | None
    is_held: bool

    def as_json(self) -> dict[str, Any]:
        """Return it as `--json` shows it."""
        return {
            "batch": self.batch,
            "at": self.now,
            "dry_run": True,
            "notes": self.notes,
            "due": self.due,
            "parts": [part.as_json() for part in self.parts],
        }


def preview_batch(
    batch: BatchSpec,
    settings: Settings,
    *,
    sample: int = DEFAULT_SAMPLE_SIZE,
    within: timedelta = PREVIEW_TIME_LIMIT,
    on_part: Callable[[PreviewPart], None] = lambda _part: None,
    at: datetime | None = None,
) -> BatchPreview:
    """Preview a run that begins now, or *at* an instant; change nothing and keep no locks.

    PostgreSQL is read in one snapshot.  Others may change the records meanwhile: a run sees that.  Needs a connection,
    and no transaction.  Raises `Blocked` if the forge lacks relations that the batch needs, and the errors of servers
    that are away.
    """
    for lacks in preconditions.find_missing_needs(batch):
        raise Blocked("schema", lacks)
    notes = [*_find_blockers(batch, settings)]
    with read_only_snapshot(batch.name):
        instant = at or now()
        notes += describe_restrictions(batch, settings)
        notes += batch.list_obstacles()
        due = breaker.count_due(batch, instant)
        notes += _describe_guard_holds(batch, settings, instant)
        look = PreviewContext(
            batch.name, instant, settings, time.monotonic() + within.total_seconds(), sample, on_progress=on_part
        )
        declared = (batch, *batch.children)
        parts = [
            part
            for number, one in enumerate(declared)
            for part in _preview_declaration(one, look, len(declared) - number)
        ]
        if not any(one.previews for one in declared):
            notes.append(f"{batch.name} declares no preview, so the effect of a run is unknown")
        held = bool(holds.Hold.list_active(*holds.GUARD_HOLD_KINDS, batch=batch.name))
        return BatchPreview(batch.name, instant, parts, notes, due, held)


def _describe_guard_holds(batch: BatchSpec, settings: Settings, instant: datetime) -> Iterator[str]:
    """Yield how many records are released, or else whether the breaker would hold a run."""
    released = breaker.is_released(batch.name)
    if released and (left := RunTotal.read_usage(batch.name, breaker.NEXT_RUN).released) is not None:
        yield f"a release allows {left:,} records, until a run stays within the limits of the circuit breaker"
    try:
        verdict = breaker.judge_run(batch, settings, breaker.NEXT_RUN, instant, released=released)
    except redis.RedisError:
        return
    if verdict.sentence is not None and not released:
        yield f"the circuit breaker would hold the batch: {verdict.sentence}"


def _preview_declaration(declared: Declaration, whole: PreviewContext, left: int) -> Iterator[PreviewPart]:
    """Yield the parts of a declaration, which gets 1/*left* of the time that is left."""

    def passed_over(record: str) -> Collection[int]:
        return [key for key, waits in quarantine.find_bad_keys(declared.name, record).items() if waits]

    look = replace(whole.within_share(1 / left), batch=declared.name, passed_over=passed_over)
    for ask in declared.previews:
        yield from ask(look)


def _find_blockers(batch: BatchSpec, settings: Settings) -> Iterator[str]:
    """Yield why a run would be blocked before it began."""
    try:
        with read_only_snapshot(batch.name):
            preconditions.require_met(batch, settings, claims=False)
    except redis.RedisError as error:
        yield f"Redis does not answer, and a run may need it: {error}"
    except Blocked as error:
        yield f"a run would be blocked: {error}"


def describe_restrictions(batch: BatchSpec, settings: Settings) -> Iterator[str]:
    """Yield the reasons that keep the batch from running, or limit its runs."""
    name = batch.name
    if batch.flag is not None and not FeatureFlag.is_on(batch.flag):
        until = "the forge turns it on" if FeatureFlag.find_forge_relation() else f"`forgekeeper flags on {batch.flag}`"
        yield f"flag {batch.flag} is off: runs do nothing until {until}"
    yield from holds.describe_obstacles(name)
    yield from exclusions.describe_exclusions(name)
    if settings.schedule_of(name) is None:
        yield f"{name} has no schedule: it only runs by hand"
    per_run, per_day, bytes_per_run, bytes_per_day = settings.deletion_limits(name)
    limits = {"records a run": per_run, "records a day": per_day}
    limits |= {"bytes a run": bytes_per_run, "bytes a day": bytes_per_day}
    if said := ", ".join(f"{limit:,} {what}" for what, limit in limits.items() if limit is not None):
        yield f"limits: {said}"
