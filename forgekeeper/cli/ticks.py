"""`ticks` lists a batch's runs; `why` tells who executed a run, and its result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

import typer

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import lookup
from forgekeeper.audit.acts import Act
from forgekeeper.cli.connection import batch_named, connect_command
from forgekeeper.cli.process_list import parse_known_schedule, process_facts, read_schedules
from forgekeeper.cli.running import BatchName, require_run
from forgekeeper.cli.terminal import (
    Json,
    format_duration,
    format_facts,
    format_time,
    print_json,
    print_sentences,
    print_table,
    read_time,
    wrong_use,
)
from forgekeeper.ledger import holds
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.limits import NO_AMOUNT, RunTotal
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform.database import exclusions, now
from forgekeeper.platform.settings import Settings

REASON_TEXTS = {
    "overlap": "an earlier run was still open",
    "paused": "the batch was paused",
    "stopped": "the batch was stopped",
    "held": "the batch was held",
    "cancelled": "the run was cancelled",
    "flag_off": "the batch is switched off by its flag",
    "max_per_run": "it had reached the limit of a run (MAX_PER_RUN)",
    "release_used_up": "it had deleted all released records (`forgekeeper release` releases more)",
    "max_per_day": "the runs of the day had reached their limit (MAX_PER_DAY)",
}
"""Reason why a tick was skipped, or why a run did nothing or ended early."""
NOT_RUN_SENTENCES = {
    ("skipped", "cancelled"): "It was cancelled while it waited, and did not run.",
    ("coalesced", None): "It was skipped: no scheduler claimed it in time, and a newer tick did its work.",
    ("missed", "skip"): "It was skipped: no scheduler was running, and the settings let this batch not catch up.",
    ("missed", None): "It was skipped: no scheduler was running, and it was too old when a scheduler ran again.",
}
HOLDING_ACTS = {"paused": ("pause",), "stopped": ("stop",), "flag_off": ("flags off",)}
"""Acts of people that make a tick do nothing, by reason."""
INTERNAL_FIELDS = ("token", "attempt_token")
"""Fields of a run that only its message and its worker need to know."""
MAX_READ_ACTS = 20
"""Maximum acts that are read from the audit."""
ENDED_STATES = ("succeeded", "blocked", "skipped")
"""States of runs whose last attempt ended by itself."""


class RunEvent(NamedTuple):
    """Sentence about an event of a run, its time if known, and the state it led to."""

    sentence: str
    at: datetime | None = None
    state: str = ""


def ticks(
    batch: BatchName,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of ticks, newest first.")] = 20,
    json: Json = False,
) -> None:
    """List a batch's ticks and manual runs, newest first."""
    name = batch_named(batch).name
    with connect_command("ticks"):
        runs = list_runs(name, limit=limit)
        found, rows = (tick_facts(name, runs), []) if json else ({}, list(map(run_row, runs)))
    if json:
        print_json(found)
        return
    columns = ("run", "tick", "state", "reason", "attempt", "started by", "ended", "error or result")
    print_table(columns, rows)


def tick_facts(batch: str | None, runs: Sequence[JobRun]) -> dict[str, Any]:
    """Return the JSON of `ticks`: the *runs* of a batch, or of every batch if None. Needs a connection."""
    return {"batch": batch, "ticks": list(map(_run_facts, runs))}


def list_runs(batch: str | None, *, limit: int, state: str | None = None, before: int | None = None) -> list[JobRun]:
    """Return the runs of a batch or of all, newest first, optionally in one *state* or *before* a number."""
    query = JobRun.select().order_by(JobRun.id.desc()) if batch is None else JobRun.select_newest_first(batch)
    query = query.limit(limit)
    query = query if state is None else query.where(JobRun.state == state)
    return list(query if before is None else query.where(JobRun.id < before))


def why(
    batch: Annotated[str, typer.Argument(metavar="BATCH|RUN", help="A batch's name, or a run's number.")],
    time: Annotated[
        str | None,
        typer.Argument(
            metavar="[TIME]", help="Time of a tick, in UTC, such as 18:29 or 2026-11-20T18:29; by default the newest."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Explain a tick: which worker ran it, with which result, or why it did not run.

    Also show the batch's current holds and exclusions, and its number of failing children.  A time of day means the
    last time that has passed.
    """
    number = int(batch) if batch.isascii() and batch.isdigit() and len(batch) < 19 else None
    if number is not None and time is not None:
        wrong_use(f"run {number} has one tick only: leave the time out, or name a batch")
    name = "" if number is not None else batch_named(batch).name
    with connect_command("why", redis_needed=False) as settings:
        tick = None if time is None else read_time(time, now(), ahead=False)
        run = require_run(number) if number is not None else find_run(name, tick)
        name = name or (run.batch if run else "")
        told = explain_run(run) if run else why_facts(name, None, explain_absence(name, tick, settings))
    if json:
        print_json(told)
    else:
        print_sentences(told["story"])


def explain_run(run: JobRun) -> dict[str, Any]:
    """Return the JSON of `why` about a run. Needs a connection."""
    return why_facts(run.batch, run, [told.sentence for told in build_timeline(run)])


def why_facts(batch: str, run: JobRun | None, story: Sequence[str]) -> dict[str, Any]:
    """Return the JSON of `why`: the run if there is one, and its *story* with the batch's obstacles.

    *children* counts the run's children: sent, at work, in quarantine. Needs a connection.
    """
    failing = Quarantined.oldest_first(batch=batch, kind="child").count()
    return {
        "batch": batch,
        "run": run and _run_facts(run),
        "children": run and _count_children(run),
        "children_failing": failing,
        "story": [*story, *describe_obstacles(batch), *describe_failing_children(batch, failing)],
    }


def count_sent_children(run: JobRun) -> int:
    """Return the number of children that the run has sent."""
    sent = [one.enqueued_as for one in BATCHES[run.batch].children] if run.batch in BATCHES else []
    return sum((run.result or {}).get(counter) or 0 for counter in sent)


def _count_children(run: JobRun) -> dict[str, int]:
    works = [work for one in process_facts(Process.list_all(), now()) for work in one["at_work"]]
    at_work = {work["message_id"] for work in works if work["run"] == run.id and work["what"] != run.batch}
    failing = Quarantined.oldest_first(batch=run.batch, kind="child").where(Quarantined.run == run.id).count()
    return {"sent": count_sent_children(run), "at_work": len(at_work), "failing": failing}


def describe_obstacles(name: str) -> list[str]:
    """Return sentences about the current holds and exclusions of the batch."""
    return [*holds.describe_obstacles(name), *exclusions.describe_exclusions(name)]


def find_run(batch: str, tick: datetime | None) -> JobRun | None:
    """Return the run of the tick, or the newest run if *tick* is None; None if not found."""
    run: JobRun | None = JobRun.select_newest_first(batch).first() if tick is None else JobRun.find_by_tick(batch, tick)
    return run


def explain_absence(name: str, tick: datetime | None, settings: Settings) -> list[str]:
    """Explain why *tick* is missing in the ledger."""
    if tick is None:
        return ["The batch has not been due yet since it was registered, and nobody has sent it."]
    written, _whose = read_schedules(Process.list_all(), now(), settings)
    schedule = parse_known_schedule(written[name])
    if schedule is None:
        return ["The batch has no schedule (its cron is off); it runs only when somebody sends it."]
    near = schedule.latest_until(tick)
    if near != tick:
        return [
            f"The batch was not due at {format_time(tick)}.",
            (
                f"Its schedule is {schedule}: it was due at {format_time(near)} and again at"
                f" {format_time(schedule.next_after(tick))}."
            ),
        ]
    because = "no scheduler has claimed it yet, or its row was old and has been removed"
    return [f"The ledger has no row for {format_time(tick)}: {because}."]


def _run_facts(run: JobRun) -> dict[str, Any]:
    facts = {name: value for name, value in run.__data__.items() if name not in INTERNAL_FIELDS}
    return {**facts, "result": read_result(run), "failed_attempts": failed_attempts(run)}


def run_row(run: JobRun) -> tuple[Any, ...]:
    """Return a row: run, tick, state, reason, attempt, started by, ended, error or result."""
    aside = _set_aside_tick(run)
    tick = format_time(run.tick) if run.tick else "by hand" if aside is None else f"{aside} (set aside)"
    return run.id, tick, run.state, run.reason, run.attempt, run.started_by, run.finished_at, _describe_outcome(run)


def list_events(run: JobRun) -> Iterator[RunEvent]:
    """Yield the events of the run. Events without a time follow the event that led to them."""
    yield RunEvent(_describe_claim(run), run.claimed_at)
    if unrun := NOT_RUN_SENTENCES.get((run.state, run.reason)):
        yield RunEvent(unrun, run.finished_at)
    elif run.state == "skipped" and run.reason in REASON_TEXTS:
        by = _find_overlapping_run(run) if run.reason == "overlap" else None
        which = f": run {by.id}, which {by.started_by or 'no worker'} had started" if by else ""
        yield RunEvent(f"It was skipped, because {REASON_TEXTS[run.reason]}{which}.", run.finished_at)
    if run.enqueued_at:
        yield RunEvent(f"It was sent to the workers at {format_time(run.enqueued_at)}.", run.enqueued_at)
    if run.losses:
        times = "once" if run.losses == 1 else f"{run.losses} times"
        taken = f"Its worker stopped sending heartbeats ({times}), and the run was reopened for another worker."
        yield RunEvent(taken)
    yield from _list_failed_attempts(run)
    if run.started_at:
        who = f"Attempt {run.attempt}" if run.attempt > 1 else "It"
        since = f", {format_duration(run.started_at - run.tick)} after it was due" if run.tick else ""
        yield RunEvent(
            f"{who} was started by worker {run.started_by} at {format_time(run.started_at)}{since}.", run.started_at
        )
    if ending := _describe_ending(run):
        yield RunEvent(ending, run.finished_at)
    if run.cancelled_at is not None:
        because = f" ({run.cancelled_reason})" if run.cancelled_reason else ""
        yield RunEvent(
            f"It was cancelled by {run.cancelled_by} at {format_time(run.cancelled_at)}{because}.", run.cancelled_at
        )
    if held := (run.result or {}).get("held"):
        yield RunEvent(f"The circuit breaker held it: {str(held).rstrip('. ')}.", run.finished_at)


def _find_overlapping_run(run: JobRun) -> JobRun | None:
    """Return the run that was open when this run was claimed."""
    open_then = JobRun.finished_at.is_null() | (JobRun.finished_at >= run.claimed_at)
    earlier = JobRun.select_newest_first(run.batch).where(
        JobRun.id < run.id, JobRun.claimed_at <= run.claimed_at, open_then
    )
    found: JobRun | None = earlier.where(JobRun.reason.is_null() | (JobRun.reason != "overlap")).first()
    return found


def failed_attempts(run: JobRun) -> list[dict[str, Any]]:
    """Return *attempt*, *worker*, *started_at*, *error* of each failed attempt but the last."""
    found = (run.result or {}).get("failures")
    fields = {"attempt", "worker", "started_at", "error"}
    return [one for one in found if isinstance(one, dict) and fields <= set(one)] if isinstance(found, list) else []


def _list_failed_attempts(run: JobRun) -> Iterator[RunEvent]:
    for one in failed_attempts(run):
        at = datetime.fromisoformat(one["started_at"])
        error = str(one["error"]).rstrip(". ")
        yield RunEvent(
            f"Attempt {one['attempt']} was started by worker {one['worker']} at {format_time(at)}: {error}.", at
        )


def build_timeline(run: JobRun) -> list[RunEvent]:
    """Return the events of the run and the acts of people during it, ordered by time.

    An event without a time stays behind the event before it.
    """
    at, placed = run.tick or run.claimed_at, list[RunEvent]()
    told = list(list_events(run))
    for one in told:
        at = one.at or at
        placed.append(RunEvent(one.sentence, at, run.state if at == run.finished_at or one is told[-1] else ""))
    for act in _list_acts(run):
        because = f" ({act.reason})" if act.reason else ""
        by = act.actor or f"{act.by_user}@{act.by_host}"
        said = f"{by} did this at {format_time(act.at)}: {act.act} {act.what}{because}."
        placed.append(RunEvent(said, act.at, "paused"))
    return sorted(placed, key=attrgetter("at"))


def _list_acts(run: JobRun) -> Iterator[Act]:
    """Yield acts on the batch during the run, and the earlier act that kept the run idle."""
    begun, ended = run.claimed_at or run.tick, run.finished_at or now()
    found = lookup.list_acts(None, limit=MAX_READ_ACTS, batch=run.batch, until=ended)
    yield from (act for act in found if act.at >= begun)
    because = run.reason if run.state == "skipped" else (run.result or {}).get("skipped")
    if (kinds := HOLDING_ACTS.get(str(because))) is None:
        return
    batch = BATCHES.get(run.batch)
    turned = (
        lookup.find_latest_acts("flags on", *kinds).get(batch.flag or "") if batch and because == "flag_off" else None
    )
    earlier = [turned] if turned else found
    yield from [act for act in earlier if act.act in kinds and act.at < begun][:1]


def read_result(run: JobRun) -> dict[str, Any] | None:
    """Return the run's result without earlier errors, and with its children's deletions.

    `stopped` is left out until an attempt has ended: before that it has its initial value, such as ``drained``. Needs a
    connection.
    """
    if run.result is None:
        return None
    result = dict(run.result) if run.state in ENDED_STATES else _without_initial_stop(run.result)
    result.pop("failures", None)
    if (batch := BATCHES.get(run.batch)) is not None and batch.children:
        result["children_deleted"] = RunTotal.sum_of_runs(run.batch, [run.id]).get(run.id, NO_AMOUNT).records
    earlier = result.get("earlier")
    return result | {"earlier": list(map(_without_initial_stop, earlier))} if isinstance(earlier, list) else result


def _without_initial_stop(result: Any) -> Any:
    if not isinstance(result, dict):
        return result
    return {name: value for name, value in result.items() if name != "stopped" or "braked" in result}


def _describe_outcome(run: JobRun) -> str:
    """Return the end of the run, its error and its result in one line."""
    result = read_result(run) or {}
    ended = result.get("braked")
    if run.reason in ("worker_lost", "poison"):
        ended = "killed"
    elif run.cancelled_at is not None:
        ended = "cancelled"
    return "; ".join(str(part) for part in (ended, run.error, format_facts(result)) if part)


def _set_aside_tick(run: JobRun) -> str | None:
    """Return the future tick that was removed from the run, if any."""
    return (run.result or {}).get("set_aside")


def _describe_claim(run: JobRun) -> str:
    aside = _set_aside_tick(run)
    if aside is not None:
        return (
            f"The tick of {aside} was claimed by scheduler {run.claimed_by} before its time, because "
            "PostgreSQL's clock was ahead. It was set aside, and runs again at its time."
        )
    if run.tick is None:
        return f"Run {run.id} was requested by hand, by {run.claimed_by} at {format_time(run.claimed_at)}."
    late = (run.claimed_at or run.tick) - run.tick
    claimed = run.state not in ("skipped", "coalesced", "missed")
    by = f"{'claimed' if claimed else 'found'} by scheduler {run.claimed_by}, {format_duration(late)} after it was due"
    return f"The tick of {format_time(run.tick)} was {by}."


def _describe_ending(run: JobRun) -> str:  # noqa: PLR0911, a table of endings
    error = f" The last error was: {run.error.rstrip('. ')}." if run.error else ""
    if run.state in ("succeeded", "blocked"):
        return _describe_normal_end(run)
    if run.reason == "superseded":
        return f"It waited for a retry when a newer tick took over its work.{error}"
    if run.reason == "poison":
        return f"It was given up as poison, because it has killed {run.losses} workers.{error}"
    if run.state == "failed":
        return f"It failed for good after {run.failures} failure(s).{error}"
    if run.state == "enqueued" and run.retry_at:
        return f"It has failed {run.failures} time(s), and waits for its retry at {format_time(run.retry_at)}.{error}"
    if run.state in ("claimed", "enqueued"):
        return "It waits for a worker."
    return f"It is running; its last heartbeat was at {format_time(run.alive_at)}." if run.state == "started" else ""


def _describe_normal_end(run: JobRun) -> str:
    result = run.result or {}
    if run.state == "blocked":
        return f"It was blocked ({run.reason}): {result.get('blocked')}."
    if result.get("skipped") in REASON_TEXTS:
        return f"It did nothing, because {REASON_TEXTS[result['skipped']]}."
    after = f" after {format_duration(run.finished_at - run.started_at)}" if run.finished_at and run.started_at else ""
    if result.get("braked") in REASON_TEXTS:
        return (
            f"It ended before its work was done{after}, because {REASON_TEXTS[result['braked']]}:"
            f" {format_facts(read_result(run))}."
        )
    return f"It succeeded{after}: {format_facts(read_result(run))}."


def describe_failing_children(batch: str, failing: int) -> list[str]:
    """Return a sentence with the number of failing children, if any."""
    which = "child is" if failing == 1 else "children are"
    hint = f"`forgekeeper quarantine list --kind child --batch {batch}` lists them"
    return [f"{batch}: {failing:,} {which} failing; {hint}"] if failing else []
