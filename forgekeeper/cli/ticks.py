"""`ticks` lists a batch's runs; `why` tells who executed a run, and its result."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

import typer

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import lookup
from forgekeeper.audit.acts import Act
from forgekeeper.cli.connection import batch_named, connected
from forgekeeper.cli.process_list import cron, schedules
from forgekeeper.cli.running import Name, numbered
from forgekeeper.cli.terminal import Json, emit, facts, lasting, moment, read_time, say, table, wrong_use
from forgekeeper.ledger import holds
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.processes import Process
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.ledger.totals import NONE, RunTotal
from forgekeeper.platform.database import exclusions, now
from forgekeeper.platform.settings import Settings

WHY = {
    "overlap": "an earlier run was still open",
    "paused": "the batch was paused",
    "stopped": "the batch was stopped",
    "held": "the batch was held",
    "cancelled": "the run was cancelled",
    "flag_off": "the batch is switched off by its flag",
    "max_per_run": "it had deleted as much as one run may (MAX_PER_RUN)",
    "release_used_up": "it had deleted as much as was released (`forgekeeper release` lets more go)",
    "max_per_day": "the runs of the day had deleted as much as they may (MAX_PER_DAY)",
}
"""Reason why a tick was skipped, or why a run did nothing or ended early."""
UNRUN = {
    ("skipped", "cancelled"): "It was cancelled while it waited, and did not run.",
    ("coalesced", None): "Nobody claimed it in time; the newest tick after the outage did its work.",
    ("missed", "skip"): "It was missed: no scheduler was running, and the settings say not to catch this batch up.",
    ("missed", None): "It was missed: no scheduler was running, and when one came back it was too old to be caught up.",
}
HELD_BY = {"paused": ("pause",), "stopped": ("stop",), "flag_off": ("flags off",)}
"""Acts of people that make a tick do nothing, by reason."""
ACTS = 20
"""Maximum acts that are read from the audit."""
ENDED = ("succeeded", "blocked", "skipped")
"""States of runs whose last attempt ended by itself."""


class Told(NamedTuple):
    """Sentence about an event of a run, its time if known, and the state it led to."""

    sentence: str
    at: datetime | None = None
    state: str = ""


def ticks(
    batch: Name, limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20, json: Json = False
) -> None:
    """List a batch's ticks and runs by hand, newest first."""
    name = batch_named(batch).name
    with connected("ticks"):
        runs = listed(name, limit=limit)
        found, rows = (list(map(_facts, runs)), []) if json else ([], list(map(row_of, runs)))
    if json:
        emit({"batch": name, "ticks": found})
        return
    columns = ("run", "tick", "state", "reason", "attempt", "started by", "ended", "error or result")
    table(columns, rows)


def listed(batch: str, *, limit: int, state: str | None = None, before: int | None = None) -> list[JobRun]:
    """Return the batch's runs, newest first, optionally in one *state* or *before* a number."""
    query = JobRun.of(batch).limit(limit)
    query = query if state is None else query.where(JobRun.state == state)
    return list(query if before is None else query.where(JobRun.id < before))


def why(
    batch: Annotated[str, typer.Argument(metavar="BATCH|RUN", help="A batch's name, or a run's number.")],
    time: Annotated[
        str | None,
        typer.Argument(
            metavar="[TIME]", help="A tick, in UTC, such as 18:29 or 2026-11-20T18:29; the newest if absent."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Say what became of one tick: which worker ran it and with what result, or why it never ran.

    It also says what holds the batch back at this moment, what is excluded of it, and how many of its children fail.
    A time of day is the last one that has passed.
    """
    number = int(batch) if batch.isascii() and batch.isdigit() and len(batch) < 19 else None
    if number is not None and time is not None:
        wrong_use(f"run {number} has one tick only: leave the time out, or name a batch")
    name = "" if number is not None else batch_named(batch).name
    with connected("why", redis_needed=False) as settings:
        tick = None if time is None else read_time(time, now(), ahead=False)
        run = numbered(number) if number is not None else at(name, tick)
        name = name or (run.batch if run else "")
        sentences = absent(name, tick, settings) if run is None else [told.sentence for told in timeline(run)]
        failing = Quarantined.oldest_first(batch=name, kind="child").count()
        sentences += [*holding(name), *of_children(name, failing)]
        found = run and _facts(run)
    if json:
        emit({"batch": name, "run": found, "children_failing": failing, "story": sentences})
    else:
        say(sentences)


def holding(name: str) -> list[str]:
    """Return sentences about the current holds and exclusions of the batch."""
    return [*holds.sentences(name), *exclusions.sentences(name)]


def at(batch: str, tick: datetime | None) -> JobRun | None:
    """Return the run of the tick, or the newest run if *tick* is None; None if not found."""
    run: JobRun | None = JobRun.of(batch).first() if tick is None else JobRun.at(batch, tick)
    return run


def absent(name: str, tick: datetime | None, settings: Settings) -> list[str]:
    """Explain why *tick* is missing in the ledger."""
    if tick is None:
        return ["The batch has not been due yet since it was registered, and nobody has sent it."]
    written, _whose = schedules(Process.known(), now(), settings)
    schedule = cron(written[name])
    if schedule is None:
        return ["The batch has no schedule (its cron is off); it runs only when somebody sends it."]
    near = schedule.newest(tick)
    if near != tick:
        return [
            f"The batch was not due at {moment(tick)}.",
            f"Its schedule is {schedule}: it was due at {moment(near)} and again at {moment(schedule.after(tick))}.",
        ]
    because = "no scheduler has looked at it yet, or its row was so old that it has been removed"
    return [f"The ledger has nothing of {moment(tick)}: {because}."]


def _facts(run: JobRun) -> dict[str, Any]:
    return {**run.__data__, "result": result_of(run), "failed_attempts": failed_attempts(run)}


def row_of(run: JobRun) -> tuple[Any, ...]:
    """Return a row: run, tick, state, reason, attempt, started by, ended, error or result."""
    aside = _set_aside(run)
    tick = moment(run.tick) if run.tick else "by hand" if aside is None else f"{aside} (set aside)"
    return run.id, tick, run.state, run.reason, run.attempt, run.started_by, run.finished_at, _outcome(run)


def story(run: JobRun) -> Iterator[Told]:
    """Yield the events of the run. Events without a time follow the event that led to them."""
    yield Told(_claim(run), run.claimed_at)
    if unrun := UNRUN.get((run.state, run.reason)):
        yield Told(unrun, run.finished_at)
    elif run.state == "skipped" and run.reason in WHY:
        by = _overlapping(run) if run.reason == "overlap" else None
        which = f": run {by.id}, which {by.started_by or 'no worker'} had started" if by else ""
        yield Told(f"It was skipped, because {WHY[run.reason]}{which}.", run.finished_at)
    if run.enqueued_at:
        yield Told(f"It was sent to the workers at {moment(run.enqueued_at)}.", run.enqueued_at)
    if run.losses:
        times = "once" if run.losses == 1 else f"{run.losses} times"
        taken = f"Its worker fell silent in the middle of it ({times}), and the run was taken from it and opened again."
        yield Told(taken)
    yield from _failures(run)
    if run.started_at:
        who = f"Attempt {run.attempt}" if run.attempt > 1 else "It"
        since = f", {lasting(run.started_at - run.tick)} after it was due" if run.tick else ""
        yield Told(f"{who} was started by worker {run.started_by} at {moment(run.started_at)}{since}.", run.started_at)
    if ending := _ending(run):
        yield Told(ending, run.finished_at)
    if run.cancelled_at is not None:
        because = f" ({run.cancelled_reason})" if run.cancelled_reason else ""
        yield Told(f"It was cancelled by {run.cancelled_by} at {moment(run.cancelled_at)}{because}.", run.cancelled_at)
    if held := (run.result or {}).get("held"):
        yield Told(f"A brake has held it back: {str(held).rstrip('. ')}.", run.finished_at)


def _overlapping(run: JobRun) -> JobRun | None:
    """Return the run that was open when this run was claimed."""
    open_then = JobRun.finished_at.is_null() | (JobRun.finished_at >= run.claimed_at)
    earlier = JobRun.of(run.batch).where(JobRun.id < run.id, JobRun.claimed_at <= run.claimed_at, open_then)
    found: JobRun | None = earlier.where(JobRun.reason.is_null() | (JobRun.reason != "overlap")).first()
    return found


def failed_attempts(run: JobRun) -> list[dict[str, Any]]:
    """Return *attempt*, *worker*, *started_at*, *error* of each failed attempt but the last."""
    found = (run.result or {}).get("failures")
    fields = {"attempt", "worker", "started_at", "error"}
    return [one for one in found if isinstance(one, dict) and fields <= set(one)] if isinstance(found, list) else []


def _failures(run: JobRun) -> Iterator[Told]:
    for one in failed_attempts(run):
        at = datetime.fromisoformat(one["started_at"])
        error = str(one["error"]).rstrip(". ")
        yield Told(f"Attempt {one['attempt']} was started by worker {one['worker']} at {moment(at)}: {error}.", at)


def timeline(run: JobRun) -> list[Told]:
    """Return the events of the run and the acts of people during it, ordered by time.

    An event without a time stays behind the event before it.
    """
    at, placed = run.tick or run.claimed_at, list[Told]()
    told = list(story(run))
    for one in told:
        at = one.at or at
        placed.append(Told(one.sentence, at, run.state if at == run.finished_at or one is told[-1] else ""))
    for act in _acts(run):
        because = f" ({act.reason})" if act.reason else ""
        by = act.actor or f"{act.by_user}@{act.by_host}"
        said = f"{by} did this at {moment(act.at)}: {act.act} {act.what}{because}."
        placed.append(Told(said, act.at, "paused"))
    return sorted(placed, key=attrgetter("at"))


def _acts(run: JobRun) -> Iterator[Act]:
    """Yield acts on the batch during the run, and the earlier act that kept the run idle."""
    begun, ended = run.claimed_at or run.tick, run.finished_at or now()
    found = lookup.acts(None, limit=ACTS, batch=run.batch, until=ended)
    yield from (act for act in found if act.at >= begun)
    because = run.reason if run.state == "skipped" else (run.result or {}).get("skipped")
    if (kinds := HELD_BY.get(str(because))) is None:
        return
    batch = BATCHES.get(run.batch)
    turned = lookup.latest("flags on", *kinds).get(batch.flag or "") if batch and because == "flag_off" else None
    earlier = [turned] if turned else found
    yield from [act for act in earlier if act.act in kinds and act.at < begun][:1]


def result_of(run: JobRun) -> dict[str, Any] | None:
    """Return the run's result without earlier errors, and with its children's deletions.

    `stopped` is left out until an attempt has ended: before that it has its initial value, such as ``drained``. Needs a
    connection.
    """
    if run.result is None:
        return None
    result = dict(run.result) if run.state in ENDED else _unended(run.result)
    result.pop("failures", None)
    if (batch := BATCHES.get(run.batch)) is not None and batch.children:
        result["children_deleted"] = RunTotal.of_runs(run.batch, [run.id]).get(run.id, NONE).records
    earlier = result.get("earlier")
    return result | {"earlier": list(map(_unended, earlier))} if isinstance(earlier, list) else result


def _unended(result: Any) -> Any:
    if not isinstance(result, dict):
        return result
    return {name: value for name, value in result.items() if name != "stopped" or "braked" in result}


def _outcome(run: JobRun) -> str:
    """Return the end of the run, its error and its result in one line."""
    result = result_of(run) or {}
    ended = result.get("braked")
    if run.reason in ("worker_lost", "poison"):
        ended = "killed"
    elif run.cancelled_at is not None:
        ended = "cancelled"
    return "; ".join(str(part) for part in (ended, run.error, facts(result)) if part)


def _set_aside(run: JobRun) -> str | None:
    """Return the future tick that was removed from the run, if any."""
    return (run.result or {}).get("set_aside")


def _claim(run: JobRun) -> str:
    aside = _set_aside(run)
    if aside is not None:
        return (
            f"The tick of {aside} was claimed by scheduler {run.claimed_by} before its time had come, because "
            "PostgreSQL's clock was ahead. It was set aside, and runs again in its time."
        )
    if run.tick is None:
        return f"Run {run.id} was asked for by hand, by {run.claimed_by} at {moment(run.claimed_at)}."
    late = (run.claimed_at or run.tick) - run.tick
    claimed = run.state not in ("skipped", "coalesced", "missed")
    by = f"{'claimed' if claimed else 'found'} by scheduler {run.claimed_by}, {lasting(late)} after it was due"
    return f"The tick of {moment(run.tick)} was {by}."


def _ending(run: JobRun) -> str:  # noqa: PLR0911, a table of endings
    error = f" The last error was: {run.error.rstrip('. ')}." if run.error else ""
    if run.state in ("succeeded", "blocked"):
        return _ended(run)
    if run.reason == "superseded":
        return f"It waited for a retry when a newer tick came and took over its work.{error}"
    if run.reason == "poison":
        return f"It was given up as poison: it has taken {run.losses} workers down with it.{error}"
    if run.state == "failed":
        return f"It failed for good after {run.failures} failure(s).{error}"
    if run.state == "enqueued" and run.retry_at:
        return f"It has failed {run.failures} time(s), and waits for its retry at {moment(run.retry_at)}.{error}"
    if run.state in ("claimed", "enqueued"):
        return "It waits for a worker."
    return f"It is running; its last heartbeat was at {moment(run.alive_at)}." if run.state == "started" else ""


def _ended(run: JobRun) -> str:
    result = run.result or {}
    if run.state == "blocked":
        return f"It was blocked ({run.reason}): {result.get('blocked')}."
    if result.get("skipped") in WHY:
        return f"It did nothing, because {WHY[result['skipped']]}."
    after = f" after {lasting(run.finished_at - run.started_at)}" if run.finished_at and run.started_at else ""
    if result.get("braked") in WHY:
        return f"It ended before its work was done{after}, because {WHY[result['braked']]}: {facts(result_of(run))}."
    return f"It ended well{after}: {facts(result_of(run))}."


def of_children(batch: str, failing: int) -> list[str]:
    """Return a sentence with the number of failing children, if any."""
    which = "child is" if failing == 1 else "children are"
    hint = f"`forgekeeper quarantine list --kind child --batch {batch}` lists them"
    return [f"{batch}: {failing:,} {which} failing; {hint}"] if failing else []
