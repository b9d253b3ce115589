"""What became of one tick, in sentences: which scheduler claimed it, which worker ran it, with what result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from forgekeeper.cli.console import facts, lasting, moment
from forgekeeper.runs.clock_ahead import Ahead
from forgekeeper.runs.holds import BRAKES, Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings.cron import Cron

UNRUN = {
    ("skipped", "overlap"): "It was skipped, because an earlier run was still open.",
    ("skipped", "paused"): "It was skipped, because the batch was paused.",
    ("skipped", "stopped"): "It was skipped, because the batch was stopped.",
    ("skipped", "held"): "It was skipped, because the batch was held.",
    ("skipped", "cancelled"): "It was cancelled while it waited, and did not run.",
    ("skipped", "lease_held"): "It was skipped, because another process held the lease.",
    ("coalesced", None): "Nobody claimed it in time; the newest tick after the outage did its work.",
    ("missed", "skip"): "It was missed: no scheduler was running, and the settings say not to catch this batch up.",
    ("missed", None): "It was missed: no scheduler was running, and when one came back it was too old to be caught up.",
}
ENDED = ("succeeded", "blocked", "skipped")
"""States of runs whose last attempt came to its end."""
SKIPPED = {
    "flag_off": "It did nothing, because the batch is switched off by its flag.",
    "stopped": "It did nothing, because the batch was stopped meanwhile.",
    "held": "It did nothing, because the batch was held meanwhile.",
    "cancelled": "It did nothing, because the run was cancelled.",
}
BRAKED = {
    "stopped": "because the batch was stopped",
    "held": "because the batch was held",
    "cancelled": "because the run was cancelled",
    "max_per_run": "because it had deleted as much as one run may (MAX_PER_RUN)",
    "max_per_day": "because the runs of the day had deleted as much as they may (MAX_PER_DAY)",
}


def tell(run: JobRun, holds: Sequence[Hold] = ()) -> list[str]:
    """Say what became of the row; *holds* are what holds its batch back at this moment."""
    return [sentence for sentence in (*_sentences(run), _cancelled(run), *_holds(run, holds)) if sentence]


def result_of(run: JobRun) -> dict[str, Any] | None:
    """Return the row's result, without the reason why it ended where no attempt came to its end.

    Until then `stopped` has the value with which every outcome begins, such as ``drained``.
    """
    if run.result is None:
        return None
    result = dict(run.result) if run.state in ENDED else _unended(run.result)
    earlier = result.get("earlier")
    return result | {"earlier": list(map(_unended, earlier))} if isinstance(earlier, list) else result


def _unended(result: Any) -> Any:
    if not isinstance(result, dict):
        return result
    return {name: value for name, value in result.items() if name != "stopped" or "braked" in result}


def outcome(run: JobRun) -> str:
    """Say in a line how the run ended, its error, and its result."""
    ended = (result_of(run) or {}).get("braked")
    if run.reason in ("worker_lost", "poison"):
        ended = "killed"
    elif run.cancelled_at is not None:
        ended = "cancelled"
    return "; ".join(str(part) for part in (ended, run.error, facts(result_of(run))) if part)


def set_aside(run: JobRun) -> datetime | None:
    """Return the tick that was taken from the row, because its time had not come."""
    tick = (run.result or {}).get("set_aside")
    try:
        return datetime.fromisoformat(tick) if isinstance(tick, str) else None
    except ValueError:
        return None


def untimely(run: JobRun, ahead: Ahead) -> list[str]:
    """Mention the ticks of the batch whose time has not come, unless the row's own is the only one."""
    if not ahead.ticks or (ahead.ticks == 1 and ahead.newest == set_aside(run)):
        return []
    ticks = f"{ahead.ticks} tick(s) of this batch whose time has not come, up to that of {moment(ahead.newest)}"
    return [
        f"The ledger has {ticks}: PostgreSQL's clock was ahead. They hold nothing back, and run again in their time."
    ]


def tell_absent(tick: datetime, schedule: Cron | None, first: datetime | None) -> list[str]:
    """Say why there is no row for *tick*: the batch's oldest row is of *first*."""
    if schedule is None:
        return ["The batch has no schedule (its cron is off); it runs only when somebody sends it."]
    near = schedule.newest(tick)
    if near != tick:
        return [
            f"The batch was not due at {moment(tick)}.",
            f"Its schedule is {schedule}: it was due at {moment(near)} and again at {moment(schedule.after(tick))}.",
        ]
    if first is None:
        return [f"The ledger has nothing of {moment(tick)}: it is empty."]
    if tick < first:
        return [f"The ledger has nothing of {moment(tick)}: it begins at {moment(first)}."]
    return [f"No scheduler has looked at {moment(tick)}: either none was running, or the time has not come."]


def _sentences(run: JobRun) -> Iterator[str]:
    yield _claim(run)
    yield UNRUN.get((run.state, run.reason), "")
    yield _sending(run)
    # While it waits again, the attempt that was lost is the last one there was.
    lost_last = run.state in ("enqueued", "failed") and run.reason in ("worker_lost", "poison")
    yield from (_attempt(run), _losses(run)) if lost_last else (_losses(run), _attempt(run))
    yield _ending(run)


def _claim(run: JobRun) -> str:
    aside = set_aside(run)
    if aside is not None:
        return (
            f"The tick of {moment(aside)} was claimed by scheduler {run.claimed_by} before its time had come, because "
            "PostgreSQL's clock was ahead. It was set aside, and runs again in its time."
        )
    if run.tick is None:
        return f"Run {run.id} was asked for by hand, by {run.claimed_by} at {moment(run.claimed_at)}."
    late = (run.claimed_at or run.tick) - run.tick
    claimed = run.state not in ("skipped", "coalesced", "missed")
    caught_up = " It was caught up after an outage." if claimed and late > timedelta(minutes=1) else ""
    verb = "claimed" if claimed else "found"
    by = f"{verb} by scheduler {run.claimed_by}, {lasting(late)} after it was due"
    return f"The tick of {moment(run.tick)} was {by}.{caught_up}"


def _sending(run: JobRun) -> str:
    if run.enqueued_at:
        return f"It was sent to the workers at {moment(run.enqueued_at)}."
    return "It has not been sent to the workers yet." if run.state == "claimed" else ""


def _losses(run: JobRun) -> str:
    if not run.losses:
        return ""
    times = "once" if run.losses == 1 else f"{run.losses} times"
    return f"Its worker fell silent in the middle of it ({times}), and the run was taken from it and opened again."


def _attempt(run: JobRun) -> str:
    if not run.started_at:
        return ""
    who = f"Attempt {run.attempt}" if run.attempt > 1 else "It"
    if run.tick is None and run.enqueued_at is None:
        return f"{who} was started there and then, at {moment(run.started_at)}."
    asked = "due" if run.tick else "claimed" if set_aside(run) else "asked for"
    since = f"{lasting(run.started_at - (run.tick or run.claimed_at or run.started_at))} after it was {asked}"
    return f"{who} was started by worker {run.started_by} at {moment(run.started_at)}, {since}."


def _ending(run: JobRun) -> str:  # noqa: PLR0911, a table of endings
    error = f" The last error was: {run.error.rstrip('. ')}." if run.error else ""
    match run.state, run.reason:
        case "succeeded" | "blocked", _:
            return _ended(run)
        case "failed", "superseded":
            return f"It waited for a retry when a newer tick came and took over its work.{error}"
        case "failed", "poison":
            return f"It was given up as poison: it has taken {run.losses} workers down with it.{error}"
        case "failed", "dead_lettered":
            return f"It was given up, because its message lies in the dead letters of its queue.{error}"
        case "failed", _:
            return f"It failed for good after {run.failures} failure(s).{error}"
        case "enqueued", _ if run.retry_at:
            return f"It has failed {run.failures} time(s), and waits for its retry at {moment(run.retry_at)}.{error}"
        case "enqueued", _:
            return "It waits for a worker."
        case "started", _:
            return f"It is running; its last heartbeat was at {moment(run.alive_at)}."
    return ""


def _ended(run: JobRun) -> str:
    result = run.result or {}
    if run.state == "blocked":
        return f"It was blocked ({run.reason}): {result.get('blocked')}."
    if result.get("skipped") in SKIPPED:
        return SKIPPED[result["skipped"]]
    after = f" after {lasting(run.finished_at - run.started_at)}" if run.finished_at and run.started_at else ""
    if result.get("braked") in BRAKED:
        return f"It ended before its work was done{after}, {BRAKED[result['braked']]}: {facts(result_of(run))}."
    return f"It ended well{after}: {facts(result_of(run))}."


def _cancelled(run: JobRun) -> str:
    if run.cancelled_at is None:
        return ""
    because = f" ({run.cancelled_reason})" if run.cancelled_reason else ""
    return f"It was cancelled by {run.cancelled_by} at {moment(run.cancelled_at)}{because}."


def _holds(run: JobRun, holds: Sequence[Hold]) -> Iterator[str]:
    """Say what keeps a run that waits from starting, or still stands where one was in the way of it."""
    result = run.result or {}
    waits = run.state in ("claimed", "enqueued")
    ways = (run.reason, result.get("skipped"), result.get("braked"))
    if result.get("held"):
        yield f"A brake has held it back: {str(result['held']).rstrip('. ')}."
    for hold in sorted(holds, key=lambda hold: (hold.kind != "stop", hold.kind == "pause")):
        since = f"since {moment(hold.since)} ({hold.kind if hold.kind in BRAKES else hold.reason})"
        if hold.kind == "stop" and (waits or "stopped" in ways):
            yield f"The batch is stopped by {hold.by} {since}: nothing starts until `forgekeeper resume {hold.batch}`."
        if hold.kind in BRAKES and (waits or "held" in ways):
            release = f"`forgekeeper release {hold.batch} --reason ...`"
            yield f"The batch is held {since}: nothing starts until {release}."
        if hold.kind == "pause" and waits:
            until = moment(hold.until) if hold.until else "somebody resumes it"
            yield f"The batch is paused by {hold.by}: nothing starts until {until}."
