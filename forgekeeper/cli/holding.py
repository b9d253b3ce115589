"""Hold batches back, and let them go again: `pause`, `stop`, `cancel` a run, `resume`.

What holds a batch back is in PostgreSQL, where each run and child asks for it: Redis is not needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any

import peewee as pw
import typer

from forgekeeper import migrations
from forgekeeper.audit import acts
from forgekeeper.batches import BATCHES
from forgekeeper.cli import still_at_work, times
from forgekeeper.cli.connection import batch_named, connected
from forgekeeper.cli.console import FAILED, HELD, Json, Problem, emit, err, moment, out, wrong_use
from forgekeeper.cli.failures import sentence
from forgekeeper.cli.running import Names
from forgekeeper.database import database, now, sqlstate
from forgekeeper.runs.batch import Batch as BatchRow
from forgekeeper.runs.holds import BRAKES, BY_PEOPLE, Hold, Kind
from forgekeeper.runs.ledger import JobRun
from metrics.redaction import clean, one_line

UNDEFINED_TABLE = "42P01"

All = Annotated[bool, typer.Option("--all", help="Every batch.")]
Reason = Annotated[str | None, typer.Option(help="Why, for anyone who looks at it.")]
Until = Annotated[
    str | None,
    typer.Option(metavar="TIME", help=f"When it ends by itself, in UTC: {times.FORMS}; never if absent."),
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Do not wait until the last chunk has ended.")]


def pause(
    batches: Names = None,
    everything: All = False,
    *,
    until: Until = None,
    forever: Annotated[bool, typer.Option("--forever", help="It does not end by itself, as without --until.")] = False,
    at_once: Annotated[bool, typer.Option("--now", help="End what runs, too, before its next chunk: `stop`.")] = False,
    reason: Reason = None,
    json: Json = False,
) -> None:
    """Start no run of these batches until that TIME, or until resumed.  A run that has started goes on.

    With --now it ends before its next chunk: that is `forgekeeper stop`.
    """
    if forever and until is not None:
        wrong_use("a pause ends at a time (--until), or never (--forever)")
    if at_once:
        stop(batches, everything, reason=reason, until=until, json=json)
        return
    names, when = _named(batches, everything), _to_come(until)
    with connected("pause", redis_needed=False):
        end = _end(when)
        why = _reason(reason, "the pause")
        known, since = _known(names), now()
        failed = _each_unless_refused(known, lambda name: _held(name, "pause", reason=why, since=since, until=end))
    done = [name for name in known if name not in failed]
    answers = [{"batch": name, "paused": True, "until": end, "reason": why} for name in done]
    sentences = [f"{name} is paused until {moment(end) if end else f'`forgekeeper resume {name}`'}" for name in done]
    _answer(answers, sentences, single=bool(batches), json=json)
    _complain(failed, "paused")


def stop(
    batches: Names = None,
    everything: All = False,
    *,
    reason: Annotated[str | None, typer.Option(help="Why, for anyone who looks at it; it must be given.")] = None,
    until: Until = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """End every run and child of these batches before its next chunk, everywhere, and start none until resumed.

    It works within five seconds, also while Redis is away.  Then it waits a little, to say when the last has ended.
    """
    names, when = _named(batches, everything), _to_come(until)
    why = _reason(reason, "the stop", required=True)
    # An emergency brake does not ask for more than it needs: another version's migration may be pending.
    with connected("stop", migrated=False, redis_needed=False):
        end = _end(when)
        with _migrated_enough():
            known, begun = _known(names), now()
            failed = _each_unless_refused(known, lambda name: _held(name, "stop", reason=why, since=begun, until=end))
        since, done = now(), [name for name in known if name not in failed]
        if not json:
            lasts = "nothing of it starts until " + (f"{moment(end)} or " if end else "")
            _say(f"{name} is stopped: {lasts}`forgekeeper resume {name}`" for name in done)
        ended = None if no_wait else still_at_work.watch(done, since)
    facts: dict[str, Any] = {"stopped": True, "reason": why} | ({"until": end} if end else {})
    facts |= {"at_work": ended.left, "seconds": ended.seconds} if ended else {}
    if json:
        _answer([{"batch": name} | facts for name in done], [], single=bool(batches), json=True)
    elif ended is not None:
        _say([_ending(ended)])
    _complain(failed, "stopped")


def cancel(
    number: Annotated[int, typer.Argument(metavar="RUN", min=1, help="The run's number; `forgekeeper ticks` has it.")],
    reason: Reason = None,
    json: Json = False,
) -> None:
    """End one run before its next chunk, and its children; one that waits will not run.

    What it has left is for the next run of its batch.
    """
    with connected("cancel", redis_needed=False):
        run = JobRun.get_or_none(id=number)
        if run is None:
            raise Problem(f"the ledger has no run {number}; `forgekeeper ticks BATCH` lists those that it has")
        why = _reason(reason, "cancelling it")
        with database.atomic():
            state = JobRun.cancel(number, reason=why, by=acts.who().name)
            before = {"state": run.state, "cancelled_at": run.cancelled_at}
            acts.record("cancel", f"run:{number}", batch=run.batch, reason=why, before=before, after={"state": state})
    sentence = f"run {number} of {run.batch} {_cancelled(run, state)}"
    answer = {"run": number, "batch": run.batch, "was": run.state, "state": state or run.state, "reason": why}
    _answer([answer], [sentence], single=True, json=json)


def resume(
    batches: Names = None,
    everything: All = False,
    *,
    by: Annotated[
        str | None, typer.Option("--by", metavar="NAME", help="End what this person has paused or stopped.")
    ] = None,
    number: Annotated[
        int | None, typer.Option("--id", metavar="N", help="End this one; `status --json` has the numbers.")
    ] = None,
    reason: Reason = None,
    json: Json = False,
) -> None:
    """End your own pauses and stops of these batches; another person's with --by or --id.

    What others hold stays, and is named: then the exit status is 3.  A batch that a brake holds is let go with
    `forgekeeper release`.
    """
    if by is not None and number is not None:
        wrong_use("name whose it is (--by), or which it is (--id)")
    names = _named(batches, everything)
    ended: dict[str, list[Hold]] = {}
    with connected("resume", redis_needed=False):
        mine = one_line(acts.who().name)
        whose = None if number is not None else by if by is not None else mine
        if number is not None and Hold.get_or_none(Hold.id == number) is None:
            raise Problem(f"nothing holds a batch back that has number {number}; `forgekeeper status --json` has them")
        known = _known(names)
        failed = _each_unless_refused(
            known, lambda name: _lifted(name, ended, whose=whose, number=number, reason=reason)
        )
        left = {name: Hold.standing(batch=name) for name in known}
    done = [name for name in known if name not in failed]
    _answer(
        [_resumption(name, ended[name], left[name]) for name in done],
        [said for name in done for said in _resumed(name, ended[name], left[name], mine=mine)],
        single=bool(batches),
        json=json,
    )
    _complain(failed, "resumed")
    if any(hold.kind in BY_PEOPLE for name in done for hold in left[name]):
        raise typer.Exit(HELD)


def _held(name: str, kind: Kind, *, reason: str | None, since: datetime, until: datetime | None) -> None:
    """Hold the batch back, and record it."""
    before = _state(name)
    Hold.add(name, kind, reason=reason, by=acts.who().name, since=since, until=until)
    acts.record(kind, name, batch=name, reason=reason, before=before, after=_state(name))


def _lifted(
    name: str, ended: dict[str, list[Hold]], *, whose: str | None, number: int | None, reason: str | None
) -> None:
    """End what holds the batch back, and record it."""
    before = _state(name)
    ended[name] = Hold.lift(name, BY_PEOPLE, by=whose, number=number)
    acts.record("resume", name, batch=name, reason=reason, before=before, after=_state(name))


def _each(names: Iterable[str], do: Callable[[str], None]) -> dict[str, str]:
    """Do it to each batch in a transaction of its own; return why it could not be done, by the batch."""
    failed = {}
    for name in names:
        try:
            with database.atomic():
                do(name)
        except pw.PeeweeException as error:
            if sqlstate(error) == UNDEFINED_TABLE or (said := sentence(error)) is None:
                raise
            failed[name] = said
    return failed


def _each_unless_refused(names: Sequence[str], do: Callable[[str], None]) -> dict[str, str]:
    """Do it as `_each` does; raise `Problem` where it could be done to none of them, for one and the same reason."""
    failed = _each(names, do)
    causes = set(failed.values())
    if len(causes) == 1 and len(failed) == len(names):
        raise Problem(causes.pop())
    return failed


def _complain(failed: dict[str, str], done: str) -> None:
    """Name what could not be done; then the command has failed."""
    for name, why in failed.items():
        err.print(clean(f"{name} is not {done}: {why}"))
    if failed:
        raise typer.Exit(FAILED)


def _named(batches: Sequence[str] | None, everything: bool) -> list[str] | None:
    """Return the batches that are named, each once; None where all are meant."""
    if bool(batches) == everything:
        wrong_use("name the batches, or say --all")
    return None if everything else list(dict.fromkeys(batch_named(name).name for name in batches or ()))


def _known(names: list[str] | None) -> list[str]:
    """Return *names*, or those of all batches: also of those that only other processes have declared."""
    if names is not None:
        return names
    others = {row.name for row in BatchRow.select()} | {hold.batch for hold in Hold.standing()}
    return list(dict.fromkeys([*BATCHES, *sorted(others)]))


def _to_come(until: str | None) -> times.FromNow | None:
    return None if until is None else times.to_come(until)


def _end(when: times.FromNow | None) -> datetime | None:
    """Return when it ends, None where it does not by itself."""
    instant = now()
    end = when(instant) if when else None
    if end is not None and end <= instant:
        wrong_use(f"{moment(end)} has passed; give a time to come, in UTC")
    return end


def _reason(given: str | None, what: str, *, required: bool = False) -> str | None:
    """Return why: what was given, or what a person at a terminal says when asked."""
    said = given if given is not None else _asked(f"Why {what}? ") if sys.stdin.isatty() else ""
    if said.strip():
        return said
    if required:
        wrong_use(f"say why: {what} needs a --reason, for anyone who finds it")
    err.print(f"no reason was given for {what}; give one with --reason, for anyone who finds it")
    return None


def _asked(question: str) -> str:
    try:
        return err.input(question, markup=False)
    except EOFError:
        return ""


@contextmanager
def _migrated_enough() -> Iterator[None]:
    """Say what to do where the tables cannot hold a stop yet."""
    try:
        yield
    except pw.ProgrammingError as error:
        if pending := migrations.pending(database.obj):
            raise Problem(f"the database lacks {len(pending)} migration(s): run `forgekeeper migrate`") from error
        raise


def _state(name: str) -> dict[str, Any]:
    """Return what holds the batch back, as the audit writes it down."""
    return {"holds": list(map(_facts, Hold.standing(batch=name)))}


def _facts(hold: Hold) -> dict[str, Any]:
    return {field: getattr(hold, field) for field in ("id", "kind", "reason", "by", "since", "until")}


def _resumption(name: str, ended: list[Hold], left: list[Hold]) -> dict[str, Any]:
    """Return what became of the batch, for `--json`."""
    kinds, stay = {hold.kind for hold in ended}, {hold.kind for hold in left}
    return {
        "batch": name,
        "paused": "pause" in stay,
        "stopped": "stop" in stay,
        "was_paused": "pause" in kinds | stay,
        "was_stopped": "stop" in kinds | stay,
        "held": not stay.isdisjoint(BRAKES),
        "ended": [_facts(hold) for hold in ended],
        "left": [_facts(hold) for hold in left],
    }


def _resumed(name: str, ended: list[Hold], left: list[Hold], *, mine: str) -> Iterator[str]:
    for hold in ended:
        if hold.by != mine:
            yield f"{name}: ended {_whose(hold)}"
    for hold in left:
        if hold.kind in BY_PEOPLE:
            how = f"`forgekeeper resume {name} --id {hold.id}`"
            yield f"{name} is still {'stopped' if hold.kind == 'stop' else 'paused'}: {_whose(hold)}; {how} ends it"
    if not {hold.kind for hold in left}.isdisjoint(BRAKES):
        yield f"{name} is held: `forgekeeper release {name} --reason ...` lets it go"
    elif not left:
        yield f"{name} runs again from its next tick" if ended else f"{name} was not paused"


def _whose(hold: Hold) -> str:
    until = f", until {moment(hold.until)}" if hold.until else ""
    because = f" ({hold.reason})" if hold.reason else ""
    return f"the {hold.kind} of {hold.by} since {moment(hold.since)}{until}{because}"


def _cancelled(run: JobRun, state: str | None) -> str:
    """Say what becomes of the run, which is in that *state* then; None: it had ended."""
    if state == "skipped":
        return "waited, and will not run"
    if state == "started":
        return "ends before its next chunk, and so do its children"
    if run.cancelled_at is not None:
        return f"was cancelled already, at {moment(run.cancelled_at)}"
    children = bool(BATCHES[run.batch].children) if run.batch in BATCHES else True
    ended = f"had ended already ({run.state})"
    return f"{ended}; those of its children that have not end before their next chunk" if children else ended


def _ending(ended: still_at_work.Ended) -> str:
    if ended.left:
        left = ", ".join(ended.left[:3]) + (f" and {len(ended.left) - 3} more" if len(ended.left) > 3 else "")
        return (
            f"still at work after {ended.seconds:.0f} s: {left}; each ends with its present chunk, "
            "`forgekeeper processes` shows them"
        )
    if not ended.seen:
        return f"nothing of it is at work ({ended.seconds:.1f} s later)"
    what = "the only run or child" if ended.seen == 1 else f"the last of {ended.seen} runs and children"
    return f"{what} that was at work had ended {ended.seconds:.1f} s later"


def _say(sentences: Iterable[str]) -> None:
    for said in sentences:
        out.print(clean(said))


def _answer(answers: list[dict[str, Any]], sentences: list[str], *, single: bool, json: bool) -> None:
    """Print what was done: as JSON the one object that a command for one batch has always printed, or a list."""
    if not json:
        _say(sentences)
    elif single and len(answers) == 1:
        emit(answers[0])
    else:
        emit({"batches": answers})
