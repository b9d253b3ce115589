"""`status`: every batch, queue and process at a glance, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any

from rich.text import Text

from forgekeeper.batches import BATCHES, BatchSpec, all_declared, queues
from forgekeeper.cli import children, story, warnings, without_redis
from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import Json, emit, facts, lasting, moment, out, relative, say, table, warning
from forgekeeper.cli.leases import held
from forgekeeper.cli.process_list import facts_of
from forgekeeper.cli.timetable import Timetable
from forgekeeper.connections import client
from forgekeeper.database import LAST_INSTANT, now
from forgekeeper.database.backlog import BOUND
from forgekeeper.declaring.shown import Status
from forgekeeper.delivery.queues import depth, due_since
from forgekeeper.runs import clock_ahead, clocks, held_back
from forgekeeper.runs.batch import Batch as BatchRow
from forgekeeper.runs.holds import BRAKES, Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.processes import Process
from forgekeeper.settings import Settings

STATES = {"succeeded": "green", "failed": "red", "failing": "red", "blocked": "red"}
COUNTS = ("ready", "in_flight", "delayed", "dead")


def status(json: Json = False) -> None:
    """Show every batch: what it does, when it is due, its backlog, how its last run ended; and every queue.

    When a batch is due is what the living schedulers say.  What is wrong comes first.  Where Redis does not answer,
    is full or is another installation's, PostgreSQL alone is asked, and what could not be asked is named.
    """
    with connected("status", limits=without_redis.limits) as settings:
        found = gather(settings)
    if json:
        emit(found)
    else:
        _show(found)


def gather(settings: Settings) -> dict[str, Any]:
    """Return all that `status` shows; what only Redis knows is None where it cannot be asked."""
    with without_redis.looks() as redis:
        redis.begin()
        return _gathered(settings, redis)


def _gathered(settings: Settings, redis: without_redis.Looks) -> dict[str, Any]:
    instant, known = now(), Process.known()
    timetable = Timetable.of(known, instant, settings)
    ahead = {name: found._asdict() for name in BATCHES if (found := clock_ahead.ahead(name)).ticks}
    batches = {name: _batch(batch, timetable, instant, redis) for name, batch in BATCHES.items()}
    failing = {name: one["children_failing"] for name, one in batches.items() if one["children_failing"]}
    compared = redis.ask("the clocks", partial(_clocks, settings)) or {}
    return {
        "at": instant,
        "batches": batches,
        "timetable_of": timetable.source,
        "queues": {queue: _queue(queue, known, instant, redis) for queue in queues()},
        **{name: redis.ask(f"the {name}", part.look) for name, part in _statuses().items()},
        "leases": redis.ask("the leases", held),
        "processes": facts_of(known, instant),
        "clocks": compared,
        "ahead": ahead,
        "redis": {"trouble": redis.trouble, "unasked": redis.unasked},
        "warnings": [
            *redis.warnings(),
            *(children.warning(name, found) for name, found in failing.items()),
            *warnings.of_processes(known, instant),
            *warnings.of_clocks(compared, ahead),
            *held_back.warnings({name: timetable.cron(name, instant) for name in BATCHES}),
        ],
    }


def _statuses() -> dict[str, Status]:
    """Return the parts that batches declare, by their names."""
    return {name: part for one in all_declared() for name, part in one.statuses.items()}


def _clocks(settings: Settings) -> dict[str, Any]:
    return {
        f"{found.clock}_to_{found.reference}": {
            "seconds": round(found.seconds, 3),
            "trouble": found.sentence() if found.exceeds(settings.clock_tolerance) else None,
        }
        for found in clocks.differences()
    }


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
        "open": running and _run(running, "retry_at", "claimed_at", "enqueued_at", "alive_at"),
        "last": last and _run(last),
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
    hold = max(pauses, key=lambda hold: hold.until or LAST_INSTANT, default=None)
    return None if hold is None else _fields(hold, "until", "reason", "by")


def _brake(hold: Hold) -> dict[str, Any]:
    return {"since": hold.since, "reason": hold.kind, "sentence": hold.reason}


def _fields(row: Hold | JobRun, *names: str) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def _run(run: JobRun, *more: str) -> dict[str, Any]:
    wanted = ("id", "tick", "state", "reason", "attempt", "started_by", "started_at", "finished_at", "result", "error")
    return _fields(run, *wanted, *more) | {"result": story.result_of(run)}


def _queue(queue: str, known: list[Process], instant: datetime, redis: without_redis.Looks) -> dict[str, Any]:
    living = [one for one in known if not one.is_silent(instant) and not one.draining]
    counts = redis.ask("the queues", partial(depth, client, queue))
    oldest = redis.ask("the queues", partial(due_since, client, queue)) if counts else None
    workers = sum(queue in (one.queues or ()) for one in living)
    return (counts or dict.fromkeys(COUNTS)) | {"oldest": oldest, "workers": workers}


def _show(found: Mapping[str, Any]) -> None:
    """Print what was found for people."""
    batches, instant = found["batches"], found["at"]
    for sentence in found["warnings"]:
        out.print(warning(sentence))
    rows = (_batch_row(name, one, instant) for name, one in batches.items())
    table("", ("batch", "schedule", "next", "now", "backlog", "oldest"), rows)
    say(f"{name} is paused {_pause(one['paused'])}" for name, one in batches.items() if one["paused"])
    if found["timetable_of"] == "settings":
        out.print("Schedule and next are what this shell's settings say.", style="dim")
    out.print()
    rows = (_last_run_row(name, one, instant) for name, one in batches.items())
    table("", ("last run of", "ended", "state", "result"), rows)
    out.print()
    rows = (_queue_row(name, one, instant) for name, one in found["queues"].items())
    table("", ("queue", "ready", "in flight", "delayed", "dead", "oldest", "workers"), rows)
    out.print()
    say(_summary(found))


def _batch_row(name: str, one: dict[str, Any], instant: datetime) -> tuple[object, ...]:
    backlog = "" if one["backlog"] is None else f"{one['backlog']:,}{'+' if one['backlog_is_more'] else ''}"
    following = relative(one["next"], instant) if one["next"] else ""
    oldest = lasting(instant - one["backlog_oldest"]) if one["backlog_oldest"] else ""
    return name, one["schedule"], following, _now(one, instant), backlog, oldest


def _last_run_row(name: str, one: dict[str, Any], instant: datetime) -> tuple[object, ...]:
    last = one["last"]
    if last is None:
        return name, Text("never", "dim"), "", ""
    result = last["result"] or {}
    blocked = result.get("blocked")
    state = "blocked" if blocked else last["state"]
    failing = one["children_failing"] and children.said(one["children_failing"])
    if failing and state == "succeeded":
        state = "failing"
    # What is zero or false is in `ticks` and `why`.
    done = facts({name: value for name, value in result.items() if value})
    said = "; ".join(part for part in (failing, last["error"], blocked or done) if part)
    return name, relative(last["finished_at"], instant), Text(state, STATES.get(state, "")), said


def _queue_row(name: str, one: dict[str, Any], instant: datetime) -> tuple[object, ...]:
    ready, in_flight, delayed, dead = (_figure(one[count]) for count in COUNTS)
    oldest = lasting(instant - one["oldest"]) if one["oldest"] else ""
    workers = Text(str(one["workers"]), "" if one["workers"] else "red")
    return name, ready, in_flight, delayed, Text(dead, "red" if one["dead"] else ""), oldest, workers


def _figure(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def _summary(found: Mapping[str, Any]) -> list[str]:
    kinds = ["silent" if one["silent"] else one["kind"] for one in found["processes"]]
    silent = f", {kinds.count('silent')} silent: see `forgekeeper processes`" if "silent" in kinds else ""
    leases = None if found["leases"] is None else len(found["leases"])
    parts = [part.sentence(found[name]) for name, part in _statuses().items() if found[name] is not None]
    return [
        f"Processes: {_count(kinds, 'scheduler')}, {_count(kinds, 'worker')}{silent}.",
        " ".join([*parts, f"Leases held: {_figure(leases)}."]),
    ]


def _count(kinds: list[str], kind: str) -> str:
    number = kinds.count(kind)
    return f"{number} {kind}{'' if number == 1 else 's'}"


def _now(one: dict[str, Any], instant: datetime) -> Text:
    """Say what the batch does: its open run, which is not the one whose result is shown below."""
    run = one["open"]
    if run is None:
        return _idle(one)
    if run["state"] == "started":
        return Text(f"runs {lasting(instant - (run['started_at'] or instant))}", "cyan")
    if run["retry_at"]:
        return Text(f"retry {relative(run['retry_at'], instant)}", "yellow")
    waits = f"{run['state']} {lasting(instant - (run['enqueued_at'] or run['claimed_at'] or instant))}"
    return Text(waits, "yellow" if one["paused"] or one["stopped"] or one["held"] else "")


def _idle(one: dict[str, Any]) -> Text:
    """Say what keeps a batch from its next run, if anything does."""
    for why, colour in (("stopped", "red"), ("held", "red"), ("paused", "yellow"), ("blocked", "red")):
        if one[why]:
            return Text(why, colour)
    off = ((one["last"] or {}).get("result") or {}).get("skipped") == "flag_off"
    return Text("off" if off else "", "dim")


def _pause(paused: dict[str, Any]) -> str:
    until = f"until {moment(paused['until'])}" if paused["until"] else "until resumed"
    return until + (f" ({paused['reason']})" if paused["reason"] else "")
