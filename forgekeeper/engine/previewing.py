"""The preview of a batch and its children: asked of each, within one snapshot that nobody can write to."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import redis

from forgekeeper.api.batches import BatchSpec, Declared, FeatureFlag
from forgekeeper.api.shown import Look, Part
from forgekeeper.guards import breaker, preconditions
from forgekeeper.guards.preconditions import Blocked
from forgekeeper.ledger import holds, quarantine
from forgekeeper.ledger.totals import RunTotal
from forgekeeper.platform.database import exclusions, now
from forgekeeper.platform.database.looking import looking
from forgekeeper.platform.settings import Settings

WITHIN = timedelta(seconds=10)
"""So long a preview counts; what it has not counted by then it estimates."""
SAMPLE = 10


@dataclass(frozen=True)
class Preview:
    """What a run of the batch would do, begun at *now*, and what stands against that.

    *due* is how many records that is in all, as the breaker counts them: so many are released.  None: nobody can say.
    *held* says that a brake holds the batch.
    """

    batch: str
    now: datetime
    parts: list[Part]
    notes: list[str]
    due: int | None
    held: bool

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


def preview(
    batch: BatchSpec,
    settings: Settings,
    *,
    sample: int = SAMPLE,
    within: timedelta = WITHIN,
    told: Callable[[Part], None] = lambda _part: None,
    at: datetime | None = None,
) -> Preview:
    """Say what a run of the batch would do if it began now, or *at* an instant; nothing is changed or kept locked.

    What the databases hold of it is read in one snapshot, which others may change meanwhile: a run sees that.
    Needs a connection, and no transaction.  Raises `Blocked` if the forge lacks what the batch needs, and what the
    servers raise when they are away.
    """
    for lacks in preconditions.missing(batch):
        raise Blocked("schema", lacks)
    notes = [*_disagreement(batch, settings)]
    with looking(batch.name):
        instant = at or now()
        notes += states(batch, settings)
        notes += batch.obstacles()
        due = breaker.amount(batch, instant)
        notes += _brakes(batch, settings, instant)
        look = Look(batch.name, instant, settings, time.monotonic() + within.total_seconds(), sample, told=told)
        declared = (batch, *batch.children)
        parts = [part for number, one in enumerate(declared) for part in _parts(one, look, len(declared) - number)]
        if not any(one.previews for one in declared):
            notes.append(f"{batch.name} declares no preview: nobody can say what a run of it would do")
        held = bool(holds.Hold.standing(*holds.BRAKES, batch=batch.name))
        return Preview(batch.name, instant, parts, notes, due, held)


def _brakes(batch: BatchSpec, settings: Settings, instant: datetime) -> Iterator[str]:
    """Say what is released, or else whether the breaker would hold the next run."""
    released = breaker.released(batch.name)
    if released and (left := RunTotal.used(batch.name, breaker.NEXT).released) is not None:
        yield f"{left:,} records of it are released, for the next run and those that follow until one is ordinary"
    try:
        verdict = breaker.judge(batch, settings, breaker.NEXT, instant, released=released)
    except redis.RedisError:
        return
    if verdict.sentence is not None and not released:
        yield f"the breaker would hold it: {verdict.sentence}"


def _parts(declared: Declared, whole: Look, left: int) -> Iterator[Part]:
    """Ask one of those that are *left*, which gets its share of the time."""

    def passed_over(record: str) -> Collection[int]:
        return [key for key, waits in quarantine.known(declared.name, record).items() if waits]

    look = replace(whole.within_share(1 / left), batch=declared.name, passed_over=passed_over)
    for ask in declared.previews:
        yield from ask(look)


def _disagreement(batch: BatchSpec, settings: Settings) -> Iterator[str]:
    """Say for which reason a run would be blocked before it began."""
    try:
        with looking(batch.name):
            preconditions.require(batch, settings, claims=False)
    except redis.RedisError as error:
        yield f"Redis is away, and a run may need it: {error}"
    except Blocked as error:
        yield f"a run would be blocked: {error}"


def states(batch: BatchSpec, settings: Settings) -> Iterator[str]:
    """Say what keeps the batch from running, or lets a run do less than all."""
    name = batch.name
    if batch.flag is not None and not FeatureFlag.is_on(batch.flag):
        until = "the forge turns it on" if FeatureFlag.owner() else f"`forgekeeper flags on {batch.flag}`"
        yield f"flag {batch.flag} is off: no run does anything until {until}"
    yield from holds.sentences(name)
    yield from exclusions.sentences(name)
    if settings.cron(name) is None:
        yield f"{name} is on no timetable: it runs by hand alone"
    per_run, per_day, bytes_per_run, bytes_per_day = settings.limits(name)
    limits = {"records a run": per_run, "records a day": per_day}
    limits |= {"bytes a run": bytes_per_run, "bytes a day": bytes_per_day}
    if said := ", ".join(f"{limit:,} {what}" for what, limit in limits.items() if limit is not None):
        yield f"its limits: {said}"
