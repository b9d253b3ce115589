"""`status`: every batch, queue and process, and warnings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Self, TypeVar

import peewee as pw
import redis
from rich import filesize
from rich.text import Text

from forgekeeper.api.answers import Backlog
from forgekeeper.api.batches import BATCHES, BatchSpec, all_declared, queues
from forgekeeper.cli import amounts, not_deleted, process_list, ticks
from forgekeeper.cli.connection import connected, sentence
from forgekeeper.cli.terminal import Json, emit, facts, lasting, out, relative, say, table, warning
from forgekeeper.delivery.queues import depth, due_since
from forgekeeper.guards import preconditions
from forgekeeper.ledger import holds, quarantine
from forgekeeper.ledger.holds import BRAKES, Hold
from forgekeeper.ledger.holds import Batch as BatchRow
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.processes import Process
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.ledger.rates import Rate, find_rates
from forgekeeper.platform.connections import Limits, asked, client
from forgekeeper.platform.database import now, writes
from forgekeeper.platform.database.looking import WritesInLook, looking
from forgekeeper.platform.database.queries import BOUND
from forgekeeper.platform.database.sessions import LAST_INSTANT
from forgekeeper.platform.installation import Installation, claim_by_writing, conflict, owner
from forgekeeper.platform.settings import Settings

TIMEOUT = timedelta(seconds=0.7)
"""Time limit of a question to Redis: the whole command has to answer within two seconds."""
HOUR_SECONDS = 3_600
RESULT_CHARACTERS = 100
"""Maximum characters of a result or error in a table; warnings and `why` show all of it."""
STATES = {"succeeded": "green", "failed": "red", "failing": "red", "blocked": "red"}
COUNTS = ("ready", "in_flight", "delayed", "dead")
RUN = ("id", "tick", "state", "reason", "attempt", "started_by", "started_at", "finished_at", "result", "error")
HOLD = ("id", "kind", "reason", "by", "since", "until")

Answer = TypeVar("Answer")


def status(json: Json = False) -> None:
    """Show every batch: what it does, when it is due, its backlog, how its last run ended; and every queue.

    When a batch is due is what the living schedulers say.  What is wrong comes first.  Where Redis does not answer,
    is full or is another installation's, PostgreSQL alone is asked.
    """
    with connected("status", limits=_limits) as settings, looking():
        found = gather(settings)
    if json:
        emit(found)
    else:
        _show(found)


def _limits(settings: Settings) -> Limits:
    usual = Limits.of_worker(settings)
    return replace(usual, redis=min(usual.redis, TIMEOUT))


class Looks:
    """Reads of Redis and of batches. *trouble* is an error of Redis, or None.

    *refused* has a sentence for each read that tried to write.

    Once Redis does not answer, or belongs to another installation, this thread does not ask Redis again inside the
    context.
    """

    def __init__(self) -> None:
        self.trouble: str | None = None
        self.refused: list[str] = []

    def __enter__(self) -> Self:
        """Check that Redis answers, belongs to this installation, and accepts writes."""
        self._token = asked.set(True)
        self.ask(self._whose)
        return self

    def __exit__(self, *_error: object) -> None:
        asked.reset(self._token)

    def _whose(self) -> None:
        ours, theirs = Installation.known(), owner(client)
        if theirs not in (None, ours):
            self.trouble = conflict(str(ours), str(theirs))
            asked.set(False)
        elif theirs is not None:
            claim_by_writing(client, theirs)

    def backlog(self, batch: BatchSpec, instant: datetime) -> tuple[Backlog | None, str | None]:
        """Return the backlog, or None and a sentence if the forge lacks tables or columns for it."""
        try:
            return self.ask(partial(batch.due, instant)), None
        except pw.ProgrammingError as error:
            return None, " ".join(preconditions.missing(batch)) or sentence(error)

    def ask(self, look: Callable[[], Answer]) -> Answer | None:
        """Call *look*; return None if Redis fails or if *look* tried to write."""
        try:
            return look()
        except WritesInLook as error:
            self.refused.append(str(error))
            return None
        except redis.RedisError as error:
            self.trouble = self.trouble or sentence(error)
            if isinstance(error, redis.ConnectionError | redis.TimeoutError):
                asked.set(False)
            return None


def gather(settings: Settings) -> dict[str, Any]:
    """Return everything that `status` shows. Facts of Redis are None if Redis does not answer."""
    with Looks() as looks:
        return _gather(settings, looks)


def _gather(settings: Settings, looks: Looks) -> dict[str, Any]:
    instant, known = now(), Process.known()
    schedules, whose = process_list.schedules(known, instant, settings)
    batches = {name: batch_facts(batch, schedules[name], instant, looks) for name, batch in BATCHES.items()}
    rates = find_rates()
    for name, one in batches.items():
        rate = rates.get(name, Rate())
        one |= {"records_per_hour": round(rate.records * HOUR_SECONDS), "bytes_freed_in_a_week": rate.bytes}
        one |= {"seconds_left": rate.seconds_for(one["backlog"])}
    shown = {name: part.look for one in all_declared() for name, part in one.statuses.items()}
    found: dict[str, Any] = {
        "at": instant,
        "batches": batches,
        "timetable_of": whose,
        "queues": queue_facts(known, instant, looks),
        **{name: looks.ask(look) for name, look in shown.items()},
        "leases": looks.ask(process_list.held),
        "processes": process_list.facts_of(known, instant),
        "redis": {"trouble": looks.trouble},
    }
    deleted, waiting = amounts.amounts(instant, least=settings.breaker_least), list(not_deleted.not_deleted(found))
    refused = writes.why_refused(prove=False)
    general = [f"PostgreSQL: {refused}"] if refused else []
    general += [*looks.refused, *process_list.timetable_conflicts(known, instant)]
    warnings = [
        *([looks.trouble] if looks.trouble else []),
        *general,
        *(said for name, one in batches.items() for said in ticks.of_children(name, one["children_failing"])),
        *process_list.missing_processes(known, instant),
        *holds.warnings(),
        *not_deleted.warnings(waiting),
        *amounts.warnings(deleted),
    ]
    found |= {"amounts": deleted, "not_deleted": [one._asdict() for one in waiting]}
    return found | {"general_warnings": general, "warnings": warnings}


def batch_facts(batch: BatchSpec, schedule: str, instant: datetime, looks: Looks) -> dict[str, Any]:
    """Return the facts of a batch: schedule, open run, last run, backlog and holds."""
    holds = Hold.standing(batch=batch.name)
    # This order keeps a run that ends in between from being shown as open and as ended.
    last, running = JobRun.last_ended(batch.name), JobRun.open(batch.name)
    due, lacks = looks.backlog(batch, instant)
    row = next(iter(BatchRow.blocked(batch.name)), None)
    blocked = row and {name: getattr(row, f"blocked_{name}") for name in ("since", "reason", "sentence")}
    if lacks and not blocked:
        blocked = {"since": None, "reason": "schema", "sentence": lacks}
    pause = max((one for one in holds if one.kind == "pause"), key=lambda one: one.until or LAST_INSTANT, default=None)
    stop = next((one for one in holds if one.kind == "stop"), None)
    brake = next((one for one in holds if one.kind in BRAKES), None)
    cron = process_list.cron(schedule)
    return {
        "schedule": schedule,
        "next": cron and cron.after(instant),
        "open": running and _run(running, "retry_at", "claimed_at", "enqueued_at", "alive_at"),
        "last": last and _run(last),
        "children_failing": Quarantined.oldest_first(batch=batch.name, kind="child").count(),
        "backlog": due and min(due.records, BOUND - 1),
        "backlog_is_more": bool(due and due.records >= BOUND),
        "backlog_oldest": due and due.oldest,
        "paused": pause and _fields(pause, "until", "reason", "by"),
        "stopped": stop and _fields(stop, "since", "reason", "by"),
        "held": brake and {"since": brake.since, "reason": brake.kind, "sentence": brake.reason},
        "holds": [_fields(hold, *HOLD) for hold in holds],
        "blocked": blocked,
    }


def _fields(row: Hold | JobRun, *names: str) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def _run(run: JobRun, *more: str) -> dict[str, Any]:
    return _fields(run, *RUN, *more) | {"result": ticks.result_of(run)}


def queue_facts(known: list[Process], instant: datetime, looks: Looks) -> dict[str, dict[str, Any]]:
    """Return each queue's message counts, its oldest due message and its number of workers."""
    letters = quarantine.dead_letters()
    return {
        queue: _queue(queue, known, instant, looks) | {"dead": letters.get(("message", queue), 0)} for queue in queues()
    }


def _queue(queue: str, known: list[Process], instant: datetime, looks: Looks) -> dict[str, Any]:
    counts = looks.ask(partial(depth, client, queue)) or dict.fromkeys(COUNTS)
    oldest = looks.ask(partial(due_since, client, queue))
    serving = [one for one in known if not one.draining and not one.is_silent(instant) and queue in (one.queues or ())]
    return counts | {"oldest": oldest, "workers": len(serving)}


def _show(found: Mapping[str, Any]) -> None:
    """Print the facts for people."""
    batches, instant = found["batches"], found["at"]
    for wrong in found["warnings"]:
        out.print(warning(wrong))
    rows = (_batch_row(name, one, instant) for name, one in batches.items())
    table(("batch", "schedule", "next", "now", "backlog", "oldest", "gone in"), rows)
    if found["timetable_of"] == "settings":
        out.print("Schedule and next are what this shell's settings say.", style="dim")
    out.print()
    rows = (_last_run_row(name, one, instant) for name, one in batches.items())
    table(("last run of", "ended", "state", "result"), rows)
    out.print()
    rows = (_queue_row(name, one, instant) for name, one in found["queues"].items())
    table(("queue", "ready", "in flight", "delayed", "dead", "oldest", "workers"), rows)
    out.print()
    kinds = ["silent" if one["silent"] else one["kind"] for one in found["processes"]]
    lives = f"Schedulers: {kinds.count('scheduler')}. Workers: {kinds.count('worker')}."
    silent = f" Silent: {kinds.count('silent')}, see `forgekeeper processes`." if "silent" in kinds else ""
    declared = {name: part.sentence for one in all_declared() for name, part in one.statuses.items()}
    parts = [write(found[name]) for name, write in declared.items() if found[name] is not None]
    leases = None if found["leases"] is None else len(found["leases"])
    freed = write_freed(batches)
    week = [f"Freed in the last 7 days: {freed}."] if freed else []
    say([lives + silent, " ".join([*parts, f"Leases held: {_figure(leases)}.", *week])])


def _batch_row(name: str, one: dict[str, Any], instant: datetime) -> tuple[object, ...]:
    backlog = "" if one["backlog"] is None else f"{one['backlog']:,}{'+' if one['backlog_is_more'] else ''}"
    following = relative(one["next"], instant) if one["next"] else ""
    oldest = _age(one["backlog_oldest"], instant)
    return name, one["schedule"], following, _now(one, instant), backlog, oldest, estimate_time_left(one)


def write_freed(batches: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the bytes that the batches of `gather` have freed in seven days; "" if none."""
    freed = sum(one["bytes_freed_in_a_week"] for one in batches.values())
    return filesize.decimal(freed) if freed else ""


def estimate_time_left(one: Mapping[str, Any]) -> str:
    """Format the time left for a backlog at the last hour's rate; "" if it is empty."""
    seconds = one["seconds_left"]
    if not one["backlog"]:
        return ""
    about = "more than" if one["backlog_is_more"] else "about"
    return "not known" if seconds is None else f"{about} {lasting(timedelta(seconds=seconds))}"


def _last_run_row(name: str, one: dict[str, Any], instant: datetime) -> tuple[object, ...]:
    last = one["last"]
    if last is None:
        return name, Text("never", "dim"), "", ""
    state, said = ended(one)
    short = said if len(said) <= RESULT_CHARACTERS else f"{said[: RESULT_CHARACTERS - 1]}…"
    return name, relative(last["finished_at"], instant), Text(state, STATES.get(state, "")), short


def ended(one: Mapping[str, Any]) -> tuple[str, str]:
    """Return the state and the result of a batch's last run. The batch must have had a run."""
    last = one["last"]
    result = last["result"] or {}
    blocked = result.get("blocked")
    state = "blocked" if blocked else last["state"]
    if one["children_failing"] and state == "succeeded":
        state = "failing"
    # Zero and false values are shown by `ticks` and `why`.
    done = facts({name: value for name, value in result.items() if value})
    return state, "; ".join(part for part in (last["error"], blocked or done) if part)


def _queue_row(name: str, one: dict[str, Any], instant: datetime) -> tuple[object, ...]:
    ready, in_flight, delayed, dead = (_figure(one[count]) for count in COUNTS)
    workers = Text(str(one["workers"]), "" if one["workers"] else "red")
    dead_shown = Text(dead, "red" if one["dead"] else "")
    return name, ready, in_flight, delayed, dead_shown, _age(one["oldest"], instant), workers


def _figure(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def _age(since: datetime | None, instant: datetime) -> str:
    return lasting(instant - since) if since else ""


def _now(one: dict[str, Any], instant: datetime) -> Text:
    """Return the activity of the open run, or the reason why no run starts.

    The open run is not the run in the second table.
    """
    run, last = one["open"], one["last"] or {}
    why = next((why for why in ("stopped", "held", "paused", "blocked") if one[why]), "")
    colour = "yellow" if why == "paused" else "red"
    if run is None:
        off = (last.get("result") or {}).get("skipped") == "flag_off"
        return Text(why, colour) if why else Text("off" if off else "", "dim")
    if run["state"] == "started":
        return Text(f"runs {_age(run['started_at'], instant)}", "cyan")
    if run["retry_at"]:
        return Text(f"retry {relative(run['retry_at'], instant)}", "yellow")
    waits = f"{run['state']} {_age(run['enqueued_at'] or run['claimed_at'], instant)}"
    return Text(waits, "yellow" if why in ("stopped", "held", "paused") else "")
