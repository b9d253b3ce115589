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
from forgekeeper.api.batches import BATCHES, BatchSpec, all_declared, list_queues
from forgekeeper.cli import amounts, not_deleted, process_list, ticks
from forgekeeper.cli.connection import connect_command, describe_with_remedy
from forgekeeper.cli.terminal import (
    Json,
    format_duration,
    format_facts,
    format_relative_time,
    format_warning,
    out,
    print_json,
    print_sentences,
    print_table,
)
from forgekeeper.delivery.queues import count_messages, due_since
from forgekeeper.guards import preconditions
from forgekeeper.ledger import holds, quarantine
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.holds import GUARD_HOLD_KINDS, Hold
from forgekeeper.ledger.holds import Batch as BatchRow
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.ledger.rates import Rate, find_rates
from forgekeeper.platform.connections import ServerTimeouts, client, may_send_to_redis
from forgekeeper.platform.database import now, writes
from forgekeeper.platform.database.queries import MAX_COUNTED_ROWS
from forgekeeper.platform.database.read_only import ReadOnlyViolation, read_only_snapshot
from forgekeeper.platform.database.sessions import LAST_INSTANT
from forgekeeper.platform.installation import Installation, claim_by_writing, find_redis_owner, mismatch_message
from forgekeeper.platform.settings import Settings

REDIS_TIMEOUT = timedelta(seconds=0.7)
"""Time limit of a question to Redis: the whole command has to answer within two seconds."""
HOUR_SECONDS = 3_600
MAX_RESULT_CHARACTERS = 100
"""Maximum characters of a result or error in a table; warnings and `why` show all of it."""
STATE_COLORS = {"succeeded": "green", "failed": "red", "failing": "red", "blocked": "red"}
MESSAGE_COUNTS = ("ready", "in_flight", "delayed", "dead")
RUN_FIELDS = ("id", "tick", "state", "reason", "attempt", "started_by", "started_at", "finished_at", "result", "error")
HOLD_FIELDS = ("id", "kind", "reason", "by", "since", "until")

ReadResult = TypeVar("ReadResult")


def status(json: Json = False) -> None:
    """Show every batch with its schedule, current run, backlog and last run; and every queue.

    Warnings come first.  The schedules are those of the running schedulers.  If Redis does not answer, is full or
    belongs to another installation, only PostgreSQL is read.
    """
    with connect_command("status", limits=_connection_limits) as settings, read_only_snapshot():
        found = gather_facts(settings)
    if json:
        print_json(found)
    else:
        _print_facts(found)


def _connection_limits(settings: Settings) -> ServerTimeouts:
    usual = ServerTimeouts.for_worker(settings)
    return replace(usual, redis=min(usual.redis, REDIS_TIMEOUT))


class TolerantReader:
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
        self._token = may_send_to_redis.set(True)
        self.read_or_none(self._check_owner)
        return self

    def __exit__(self, *_error: object) -> None:
        may_send_to_redis.reset(self._token)

    def _check_owner(self) -> None:
        ours, theirs = Installation.find_id(), find_redis_owner(client)
        if theirs not in (None, ours):
            self.trouble = mismatch_message(str(ours), str(theirs))
            may_send_to_redis.set(False)
        elif theirs is not None:
            claim_by_writing(client, theirs)

    def read_backlog(self, batch: BatchSpec, instant: datetime) -> tuple[Backlog | None, str | None]:
        """Return the backlog, or None and a sentence if the forge lacks tables or columns for it."""
        try:
            return self.read_or_none(partial(batch.sum_backlogs, instant)), None
        except pw.ProgrammingError as error:
            return None, " ".join(preconditions.find_missing_needs(batch)) or describe_with_remedy(error)

    def read_or_none(self, read: Callable[[], ReadResult]) -> ReadResult | None:
        """Call *read*; return None if Redis fails or if *read* tried to write."""
        try:
            return read()
        except ReadOnlyViolation as error:
            self.refused.append(str(error))
            return None
        except redis.RedisError as error:
            self.trouble = self.trouble or describe_with_remedy(error)
            if isinstance(error, redis.ConnectionError | redis.TimeoutError):
                may_send_to_redis.set(False)
            return None


def gather_facts(settings: Settings) -> dict[str, Any]:
    """Return everything that `status` shows. Facts of Redis are None if Redis does not answer."""
    with TolerantReader() as reader:
        return _gather_with_reader(settings, reader)


def _gather_with_reader(settings: Settings, reader: TolerantReader) -> dict[str, Any]:
    instant, known = now(), Process.list_all()
    schedules, whose = process_list.read_schedules(known, instant, settings)
    rates = find_rates()
    batches = {
        name: rated_facts(batch, schedules[name], instant, reader, rates.get(name, Rate()))
        for name, batch in BATCHES.items()
    }
    shown = {name: part.read for one in all_declared() for name, part in one.statuses.items()}
    found: dict[str, Any] = {
        "at": instant,
        "batches": batches,
        "timetable_of": whose,
        "queues": queue_facts(known, instant, reader),
        **{name: reader.read_or_none(look) for name, look in shown.items()},
        "leases": reader.read_or_none(process_list.list_held_leases),
        "processes": process_list.process_facts(known, instant),
        "redis": {"trouble": reader.trouble},
    }
    deleted, waiting = (
        amounts.compare_daily_amounts(instant, least=settings.breaker_least),
        list(not_deleted.find_not_deleted(found)),
    )
    refused = writes.why_refused(prove=False)
    general = [f"PostgreSQL: {refused}"] if refused else []
    general += [*reader.refused, *process_list.timetable_conflicts(known, instant)]
    warnings = [
        *([reader.trouble] if reader.trouble else []),
        *general,
        *(
            said
            for name, one in batches.items()
            for said in ticks.describe_failing_children(name, one["children_failing"])
        ),
        *process_list.missing_processes(known, instant),
        *holds.list_warnings(),
        *not_deleted.describe_warnings(waiting),
        *amounts.warn_of_unusual(deleted),
    ]
    found |= {"amounts": deleted, "not_deleted": [one._asdict() for one in waiting]}
    return found | {"general_warnings": general, "warnings": warnings}


def rated_facts(
    batch: BatchSpec, schedule: str, instant: datetime, reader: TolerantReader, rate: Rate
) -> dict[str, Any]:
    """Return the facts of a batch, with the *rate* of its deletions and the seconds left at that rate."""
    one = batch_facts(batch, schedule, instant, reader)
    return one | {
        "records_per_hour": round(rate.records * HOUR_SECONDS),
        "bytes_freed_in_a_week": rate.bytes,
        "seconds_left": rate.seconds_for(one["backlog"]),
    }


def batch_facts(batch: BatchSpec, schedule: str, instant: datetime, reader: TolerantReader) -> dict[str, Any]:
    """Return the facts of a batch: schedule, open run, last run, backlog and holds."""
    holds = Hold.list_active(batch=batch.name)
    # This order keeps a run that ends in between from being shown as open and as ended.
    last, running = JobRun.last_ended(batch.name), JobRun.find_open(batch.name)
    due, lacks = reader.read_backlog(batch, instant)
    row = next(iter(BatchRow.list_blocked(batch.name)), None)
    blocked = row and {name: getattr(row, f"blocked_{name}") for name in ("since", "reason", "sentence")}
    if lacks and not blocked:
        blocked = {"since": None, "reason": "schema", "sentence": lacks}
    pause = max((one for one in holds if one.kind == "pause"), key=lambda one: one.until or LAST_INSTANT, default=None)
    stop = next((one for one in holds if one.kind == "stop"), None)
    guarded = next((one for one in holds if one.kind in GUARD_HOLD_KINDS), None)
    cron = process_list.parse_known_schedule(schedule)
    return {
        "schedule": schedule,
        "next": cron and cron.next_after(instant),
        "open": running and _run_facts(running, "retry_at", "claimed_at", "enqueued_at", "alive_at"),
        "last": last and _run_facts(last),
        "children_failing": Quarantined.oldest_first(batch=batch.name, kind="child").count(),
        "backlog": due and min(due.records, MAX_COUNTED_ROWS - 1),
        "backlog_is_more": bool(due and due.records >= MAX_COUNTED_ROWS),
        "backlog_oldest": due and due.oldest,
        "paused": pause and _pick_fields(pause, "until", "reason", "by"),
        "stopped": stop and _pick_fields(stop, "since", "reason", "by"),
        "held": guarded and {"since": guarded.since, "reason": guarded.kind, "sentence": guarded.reason},
        "holds": [hold_facts(hold) for hold in holds],
        "blocked": blocked,
    }


def hold_facts(hold: Hold) -> dict[str, Any]:
    """Return the facts of a hold: its kind, reason, author and times."""
    return _pick_fields(hold, *HOLD_FIELDS)


def _pick_fields(row: Hold | JobRun, *names: str) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def _run_facts(run: JobRun, *more: str) -> dict[str, Any]:
    return _pick_fields(run, *RUN_FIELDS, *more) | {"result": ticks.read_result(run)}


def queue_facts(known: list[Process], instant: datetime, reader: TolerantReader) -> dict[str, dict[str, Any]]:
    """Return each queue's message counts, its oldest due message and its number of workers."""
    letters = quarantine.count_dead_letters()
    return {
        queue: _count_messages(queue, known, instant, reader) | {"dead": letters.get(("message", queue), 0)}
        for queue in list_queues()
    }


def _count_messages(queue: str, known: list[Process], instant: datetime, reader: TolerantReader) -> dict[str, Any]:
    counts = reader.read_or_none(partial(count_messages, client, queue)) or dict.fromkeys(MESSAGE_COUNTS)
    oldest = reader.read_or_none(partial(due_since, client, queue))
    serving = [one for one in known if not one.draining and not one.is_silent(instant) and queue in (one.queues or ())]
    return counts | {"oldest": oldest, "workers": len(serving)}


def _print_facts(found: Mapping[str, Any]) -> None:
    """Print the facts for people."""
    batches, instant = found["batches"], found["at"]
    for wrong in found["warnings"]:
        out.print(format_warning(wrong))
    rows = (_batch_row(name, one, instant) for name, one in batches.items())
    print_table(("batch", "schedule", "next", "now", "backlog", "oldest", "done in"), rows)
    if found["timetable_of"] == "settings":
        out.print("No scheduler is running: the schedules are those of this shell's settings.", style="dim")
    out.print()
    rows = (_last_run_row(name, one, instant) for name, one in batches.items())
    print_table(("last run of", "ended", "state", "result"), rows)
    out.print()
    rows = (_queue_row(name, one, instant) for name, one in found["queues"].items())
    print_table(("queue", "ready", "in flight", "delayed", "dead", "oldest", "workers"), rows)
    out.print()
    kinds = ["silent" if one["silent"] else one["kind"] for one in found["processes"]]
    lives = f"Schedulers: {kinds.count('scheduler')}. Workers: {kinds.count('worker')}."
    silent = f" Silent: {kinds.count('silent')}, see `forgekeeper processes`." if "silent" in kinds else ""
    declared = {name: part.sentence for one in all_declared() for name, part in one.statuses.items()}
    parts = [write(found[name]) for name, write in declared.items() if found[name] is not None]
    leases = None if found["leases"] is None else len(found["leases"])
    freed = format_freed_bytes(batches)
    week = [f"Freed in the last 7 days: {freed}."] if freed else []
    print_sentences([lives + silent, " ".join([*parts, f"Leases held: {_format_count(leases)}.", *week])])


def _batch_row(name: str, one: dict[str, Any], instant: datetime) -> tuple[object, ...]:
    backlog = "" if one["backlog"] is None else f"{one['backlog']:,}{'+' if one['backlog_is_more'] else ''}"
    following = format_relative_time(one["next"], instant) if one["next"] else ""
    oldest = _format_age(one["backlog_oldest"], instant)
    return name, one["schedule"], following, _describe_activity(one, instant), backlog, oldest, estimate_time_left(one)


def format_freed_bytes(batches: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the bytes that the batches of `gather` have freed in seven days; "" if none."""
    freed = sum(one["bytes_freed_in_a_week"] for one in batches.values())
    return filesize.decimal(freed) if freed else ""


def estimate_time_left(one: Mapping[str, Any]) -> str:
    """Format the time left for a backlog at the last hour's rate; "" if it is empty."""
    seconds = one["seconds_left"]
    if not one["backlog"]:
        return ""
    about = "more than" if one["backlog_is_more"] else "about"
    return "not known" if seconds is None else f"{about} {format_duration(timedelta(seconds=seconds))}"


def _last_run_row(name: str, one: dict[str, Any], instant: datetime) -> tuple[object, ...]:
    last = one["last"]
    if last is None:
        return name, Text("never", "dim"), "", ""
    state, said = describe_last_run(one)
    short = said if len(said) <= MAX_RESULT_CHARACTERS else f"{said[: MAX_RESULT_CHARACTERS - 1]}…"
    return name, format_relative_time(last["finished_at"], instant), Text(state, STATE_COLORS.get(state, "")), short


def describe_last_run(one: Mapping[str, Any]) -> tuple[str, str]:
    """Return the state and the result of a batch's last run. The batch must have had a run."""
    last = one["last"]
    result = last["result"] or {}
    blocked = result.get("blocked")
    state = "blocked" if blocked else last["state"]
    if one["children_failing"] and state == "succeeded":
        state = "failing"
    # Zero and false values are shown by `ticks` and `why`.
    done = format_facts({name: value for name, value in result.items() if value})
    return state, "; ".join(part for part in (last["error"], blocked or done) if part)


def _queue_row(name: str, one: dict[str, Any], instant: datetime) -> tuple[object, ...]:
    ready, in_flight, delayed, dead = (_format_count(one[count]) for count in MESSAGE_COUNTS)
    workers = Text(str(one["workers"]), "" if one["workers"] else "red")
    dead_shown = Text(dead, "red" if one["dead"] else "")
    return name, ready, in_flight, delayed, dead_shown, _format_age(one["oldest"], instant), workers


def _format_count(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def _format_age(since: datetime | None, instant: datetime) -> str:
    return format_duration(instant - since) if since else ""


def _describe_activity(one: dict[str, Any], instant: datetime) -> Text:
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
        return Text(f"runs {_format_age(run['started_at'], instant)}", "cyan")
    if run["retry_at"]:
        return Text(f"retry {format_relative_time(run['retry_at'], instant)}", "yellow")
    waits = f"{run['state']} {_format_age(run['enqueued_at'] or run['claimed_at'], instant)}"
    return Text(waits, "yellow" if why in ("stopped", "held", "paused") else "")
