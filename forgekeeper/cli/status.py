"""`status`: every batch, queue and process at a glance, and what is wrong."""

from __future__ import annotations

import signal
import sys
import time
from datetime import datetime
from functools import partial
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import RenderableType
from rich.live import Live

from forgekeeper.batches import BATCHES, BatchSpec, all_declared, queues
from forgekeeper.cli import children, story, timing, without_redis
from forgekeeper.cli.connection import connected, explained
from forgekeeper.cli.console import Json, Problem, emit, out, warning, wrong_use
from forgekeeper.cli.glance import drawn
from forgekeeper.cli.leases import held
from forgekeeper.cli.presence import facts_of
from forgekeeper.cli.timetable import Timetable
from forgekeeper.cli.trouble import together, warnings
from forgekeeper.connections import client
from forgekeeper.database import LAST_INSTANT, database, now, release
from forgekeeper.database.backlog import BOUND
from forgekeeper.delivery.queues import depth, due_since
from forgekeeper.runs import held_back
from forgekeeper.runs.batch import Batch as BatchRow
from forgekeeper.runs.holds import BRAKES, Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.processes import Process
from forgekeeper.settings import Settings
from forgekeeper.shown import Status

EVERY = 2.0
"""Seconds between two looks; watch(1) has the same."""


def status(
    seconds: Annotated[
        float | None,
        typer.Argument(min=0.5, max=3600, help=f"With --watch: how often to look; by default {EVERY:.0f}."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")] = False,
    json: Json = False,
) -> None:
    """Show every batch: what it is at, when it is due, its backlog, how its last run ended; and every queue.

    When a batch is due is what the schedulers say that live.  What is wrong comes first.  Where Redis does not answer,
    is full or is another installation's, PostgreSQL alone is asked, and what could not be is named.
    """
    if seconds is not None and not watch:
        wrong_use("how often to look goes with --watch")
    if watch and (json or not out.is_terminal):
        wrong_use("--watch draws on a terminal; leave it away, or ask for --json as often as you like")
    with connected("status", limits=without_redis.limits) as settings:
        if watch:
            _watch(settings, seconds or EVERY)
            return
        found = gather(settings)
    if json:
        emit(found)
    else:
        out.print(_drawn(found), soft_wrap=False)


def gather(settings: Settings) -> dict[str, Any]:
    """Return all that `status` shows; what only Redis knows is None where it cannot be asked."""
    with without_redis.looks() as redis:
        redis.begin()
        return _gathered(settings, redis)


def _gathered(settings: Settings, redis: without_redis.Looks) -> dict[str, Any]:
    instant, known = now(), Process.known()
    timetable = Timetable.of(known, instant, settings)
    ahead = timing.ahead()
    batches = {name: _batch(batch, timetable, instant, redis) for name, batch in BATCHES.items()}
    failing = {name: one["children_failing"] for name, one in batches.items() if one["children_failing"]}
    clocks = redis.ask("the clocks", partial(timing.compared, settings)) or {}
    return {
        "at": instant,
        "batches": batches,
        "timetable_of": timetable.source,
        "queues": {queue: _queue(queue, known, instant, redis) for queue in queues()},
        **{name: redis.ask(f"the {name}", part.look) for name, part in statuses().items()},
        "leases": redis.ask("the leases", held),
        "processes": facts_of(known, instant),
        "clocks": clocks,
        "ahead": ahead,
        "redis": {"trouble": redis.trouble, "unasked": redis.unasked},
        "warnings": [
            *redis.warnings(),
            *(children.warning(name, found) for name, found in failing.items()),
            *warnings(known, instant),
            *timing.warnings(clocks, ahead),
            *together(held_back.warnings({name: timetable.cron(name, instant) for name in BATCHES})),
        ],
    }


def statuses() -> dict[str, Status]:
    """Return the parts that batches bring, by their names."""
    return {name: part for one in all_declared() for name, part in one.statuses.items()}


def _drawn(found: dict[str, Any]) -> RenderableType:
    said = [part.sentence(found[name]) for name, part in statuses().items() if found[name] is not None]
    return drawn(found, said, out.width)


def _batch(batch: BatchSpec, timetable: Timetable, instant: datetime, redis: without_redis.Looks) -> dict[str, Any]:
    holds = Hold.standing(batch=batch.name)
    # In this order a run that ends meanwhile is not shown as both.
    last, running = JobRun.last_ended(batch.name), JobRun.open(batch.name)
    due = redis.ask(f"the backlog of {batch.name}", partial(batch.due, instant))
    blocked = BatchRow.blocked(batch.name)
    schedule, following = timetable.next(batch.name, instant)
    return {
        "schedule": schedule,
        "next": following,
        "open": running and _row(running, "retry_at", "claimed_at", "enqueued_at", "alive_at"),
        "last": last and _row(last),
        "children_failing": children.failing(batch.name) if batch.children else None,
        "backlog": due and min(due.records, BOUND - 1),
        "backlog_is_more": bool(due and due.records >= BOUND),
        "backlog_oldest": due and due.oldest,
        "paused": _longest([hold for hold in holds if hold.kind == "pause"]),
        "stopped": next((_fields(hold, "since", "reason", "by") for hold in holds if hold.kind == "stop"), None),
        "held": next((_brake(hold) for hold in holds if hold.kind in BRAKES), None),
        "holds": [_fields(hold, "id", "kind", "reason", "by", "since", "until") for hold in holds],
        "blocked": blocked
        and {
            "since": blocked.blocked_since,
            "reason": blocked.blocked_reason,
            "sentence": blocked.blocked_sentence,
        },
    }


def _longest(pauses: list[Hold]) -> dict[str, Any] | None:
    """Return the pause that ends last, None where there is none."""
    if not pauses:
        return None
    hold = max(pauses, key=lambda hold: hold.until or LAST_INSTANT)
    return _fields(hold, "until", "reason", "by")


def _brake(hold: Hold) -> dict[str, Any]:
    return {"since": hold.since, "reason": hold.kind, "sentence": hold.reason}


def _fields(hold: Hold, *names: str) -> dict[str, Any]:
    return {name: getattr(hold, name) for name in names}


def _queue(queue: str, known: list[Process], instant: datetime, redis: without_redis.Looks) -> dict[str, Any]:
    living = [one for one in known if not one.is_silent(instant) and not one.draining]
    counts = redis.ask("the queues", partial(depth, client, queue))
    oldest = redis.ask("the queues", partial(due_since, client, queue)) if counts else None
    return (counts or dict.fromkeys(("ready", "in_flight", "delayed", "dead"))) | {
        "oldest": oldest,
        "workers": sum(queue in (one.queues or ()) for one in living),
    }


def _row(run: JobRun, *more: str) -> dict[str, Any]:
    wanted = ("id", "tick", "state", "reason", "attempt", "started_by", "started_at", "finished_at", "result", "error")
    return {field: getattr(run, field) for field in (*wanted, *more)} | {"result": story.result_of(run)}


def _watch(settings: Settings, seconds: float) -> None:
    """Draw anew every so many *seconds*; Ctrl-C is the orderly end of it, as of watch(1)."""
    signal.signal(signal.SIGTERM, _leave)  # the terminal gets its cursor back
    try:
        with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                live.update(_picture(settings), refresh=True)
                time.sleep(seconds)
    except KeyboardInterrupt:
        pass


def _picture(settings: Settings) -> RenderableType:
    try:
        with explained():
            database.connect(reuse_if_open=True)
            return _drawn(gather(settings))
    except Problem as problem:
        # It is watched for just that: the servers may come back.
        release()
        return warning(str(problem))


def _leave(_signal: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)
