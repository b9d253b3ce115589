"""Hold batches back, and let them go again: `pause`, `stop`, `cancel` a run, `resume`.

What holds a batch back is in PostgreSQL, where each run and child asks for it: Redis is not needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Annotated, Any

import peewee as pw
import typer

from forgekeeper import migrations
from forgekeeper.audit import acts
from forgekeeper.batches import BATCHES
from forgekeeper.cli import still_at_work, times
from forgekeeper.cli.connection import batch_named, connected
from forgekeeper.cli.console import Json, Problem, emit, err, moment, out, wrong_use
from forgekeeper.cli.running import Names
from forgekeeper.database import database, now
from forgekeeper.runs.batch import Batch as BatchRow
from forgekeeper.runs.holds import BRAKES, BY_PEOPLE, Hold
from forgekeeper.runs.ledger import JobRun
from metrics.redaction import clean

A_DAY = timedelta(days=1)
"""A pause that nobody gave an end has this one: it may be forgotten."""

All = Annotated[bool, typer.Option("--all", help="Every batch.")]
Reason = Annotated[str | None, typer.Option(help="Why, for whoever looks at it.")]


def pause(
    batches: Names = None,
    everything: All = False,
    *,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help=f"When it ends by itself, in UTC: {times.FORMS_TO_COME}; a day from now if absent."
        ),
    ] = None,
    forever: Annotated[bool, typer.Option("--forever", help="It does not end by itself.")] = False,
    reason: Reason = None,
    json: Json = False,
) -> None:
    """Start no run of these batches for a day, until that TIME, or until resumed.  A run that has started goes on.

    `forgekeeper stop` ends runs, too.
    """
    if forever and until is not None:
        wrong_use("a pause ends at a time (--until), or never (--forever)")
    names, when = _named(batches, everything), _to_come(until)
    with connected("pause"):
        instant = now()
        end = None if forever else when(instant) if when else instant + A_DAY
        if end is not None and end <= instant:
            wrong_use(f"{moment(end)} has passed; give a time to come, in UTC")
        why = _reason(reason, "the pause")
        with database.atomic():
            for name in _known(names):
                before = _state(name)
                Hold.add(name, "pause", until=end, reason=why, by=acts.who().name)
                acts.record("pause", name, batch=name, reason=why, before=before, after=_state(name))
        known = _known(names)
    answers = [{"batch": name, "paused": True, "until": end, "reason": why} for name in known]
    sentences = [f"{name} is paused until {moment(end) if end else f'`forgekeeper resume {name}`'}" for name in known]
    _answer(answers, sentences, single=bool(batches), json=json)


def stop(
    batches: Names = None,
    everything: All = False,
    reason: Annotated[str | None, typer.Option(help="Why, for whoever looks at it; it must be given.")] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until the last chunk has ended.")] = False,
    json: Json = False,
) -> None:
    """End every run and child of these batches before its next chunk, everywhere, and start none until resumed.

    It works within five seconds, also while Redis is away.  Then it waits a little, to say when the last has ended.
    """
    names, why = _named(batches, everything), _reason(reason, "the stop", required=True)
    # An emergency brake does not ask for more than it needs: another version's migration may be pending.
    with connected("stop", migrated=False, redis_needed=False):
        with _migrated_enough(), database.atomic():
            known = _known(names)
            for name in known:
                before = _state(name)
                Hold.add(name, "stop", reason=why, by=acts.who().name)
                acts.record("stop", name, batch=name, reason=why, before=before, after=_state(name))
        since = now()
        if not json:
            _say(f"{name} is stopped: nothing of it starts until `forgekeeper resume {name}`" for name in known)
        ended = None if no_wait else still_at_work.watch(known, since)
    facts = {"stopped": True, "reason": why} | ({"at_work": ended.left, "seconds": ended.seconds} if ended else {})
    if json:
        _answer([{"batch": name} | facts for name in known], [], single=bool(batches), json=True)
    elif ended is not None:
        _say([_ending(ended)])


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


def resume(batches: Names = None, everything: All = False, reason: Reason = None, json: Json = False) -> None:
    """Let paused and stopped batches run again.  One that is held is let go with `forgekeeper release`."""
    names = _named(batches, everything)
    with connected("resume"), database.atomic():
        befores = {name: _state(name) for name in _known(names)}
        for name, before in befores.items():
            Hold.lift(name, BY_PEOPLE)
            acts.record("resume", name, batch=name, reason=reason, before=before, after=_state(name))
    answers = [
        {
            "batch": name,
            "paused": False,
            "was_paused": "pause" in _kinds(before),
            "was_stopped": "stop" in _kinds(before),
            "held": not _kinds(before).isdisjoint(BRAKES),
        }
        for name, before in befores.items()
    ]
    _answer(answers, list(map(_resumed, answers)), single=bool(batches), json=json)


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
    try:
        when = None if until is None else times.to_come(until)
    except times.NoTime as error:
        wrong_use(str(error))

    def checked(instant: datetime) -> datetime:
        assert when is not None
        try:
            return when(instant)
        except times.NoTime as error:
            wrong_use(str(error))

    return checked if when else None


def _reason(given: str | None, what: str, *, required: bool = False) -> str | None:
    """Return why: what was given, or what a person at a terminal says when asked."""
    said = given if given is not None else _asked(f"Why {what}? ") if sys.stdin.isatty() else ""
    if said.strip():
        return said
    if required:
        wrong_use(f"say why: {what} needs a --reason, for whoever finds it")
    err.print(f"no reason was given for {what}; give one with --reason, for whoever finds it")
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
    fields = ("id", "kind", "reason", "by", "since", "until")
    return {"holds": [{field: getattr(hold, field) for field in fields} for hold in Hold.standing(batch=name)]}


def _kinds(state: dict[str, Any]) -> set[str]:
    return {hold["kind"] for hold in state["holds"]}


def _resumed(answer: dict[str, Any]) -> str:
    name = answer["batch"]
    if answer["held"]:
        return f"{name} is held: `forgekeeper release {name} --reason ...` lets it go"
    if answer["was_paused"] or answer["was_stopped"]:
        return f"{name} runs again from its next tick"
    return f"{name} was not paused"


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
    for sentence in sentences:
        out.print(clean(sentence))


def _answer(answers: list[dict[str, Any]], sentences: list[str], *, single: bool, json: bool) -> None:
    """Print what was done: as JSON the one object that a command for one batch has always printed, or a list."""
    if not json:
        _say(sentences)
    elif single and len(answers) == 1:
        emit(answers[0])
    else:
        emit({"batches": answers})
