"""`audit`: what people did, and which run deleted what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from forgekeeper.audit import lookup, subjects
from forgekeeper.audit.lookup import Found, Line, Period
from forgekeeper.audit.subjects import PATH, Subject
from forgekeeper.batches import BATCHES
from forgekeeper.cli import evidence, times
from forgekeeper.cli.connection import batch_named, connected
from forgekeeper.cli.console import Json, emit, moment, say, table, wrong_use
from forgekeeper.database import now
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import Settings

Time = typer.Option(metavar="TIME|AGE", help="A time in UTC, or an age: 2026-11-20T08:30, 90m, 2h, 3d, 1w.")


def audit(  # noqa: PLR0917, options
    what: Annotated[
        str | None,
        typer.Option(
            metavar="KIND:…",
            help="What has become of one: artifact:ID, status:USER, import:ID, entity:ID, ref:PROJECT:REF,"
            " path:[LOCATION:]PATH.",
        ),
    ] = None,
    run: Annotated[int | None, typer.Option(min=0, help="What that run and its children have deleted.")] = None,
    batch: Annotated[str | None, typer.Option(metavar="BATCH", help="Only of this batch.")] = None,
    who: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only acts of this user, host, or FORGEKEEPER_ACTOR.")
    ] = None,
    since: Annotated[str | None, Time] = None,
    until: Annotated[str | None, Time] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many, newest first.")] = 20,
    json: Json = False,
) -> None:
    """Show what people did and what was deleted, newest first; or answer who deleted one thing, when and why."""
    if batch is not None:
        batch_named(batch)
    if what is not None and (run is not None or batch is not None or who is not None):
        wrong_use("--what asks for one thing: leave --run, --batch and --who out")
    if run is not None and (batch is not None or who is not None):
        wrong_use("--run asks for one run: leave --batch and --who out")
    asked = None if what is None else _subject(what)
    with connected("audit", redis_needed=False) as settings:
        period = _period(since, until)
        if asked is not None:
            answer = _about(*asked, period, settings, limit)
        elif run is not None:
            answer = _of_run(run, period, limit)
        else:
            answer = _newest(period, batch, who, limit)
    if json:
        emit({name: value for name, value in answer.items() if name != "rows"})
        return
    say(answer["sentences"])
    if answer.get("rows"):
        table("", ("at", "by", "what was done", "to what", "why"), answer["rows"])


def _subject(text: str) -> tuple[Subject, str]:
    """Read what is asked for; one without a name of its own is asked for by a number."""
    try:
        subject, rest = subjects.read(text, _subjects())
    except subjects.NoSuchSubject as error:
        wrong_use(str(error))
    if subject.name is None and not (rest.isascii() and rest.isdigit() and len(rest) < 19):
        wrong_use(f"{rest!r} is no number: ask for {subject.usage}")
    if subject.within and not subject.argument.startswith("[") and ":" not in rest:
        wrong_use(f"{text!r} lacks a part: ask for {subject.usage}")
    return subject, rest


def _subjects() -> list[Subject]:
    return [Subject(**{**one._asdict(), "batch": batch.name}) for batch in BATCHES.values() for one in batch.subjects]


def _about(subject: Subject, rest: str, period: Period, settings: Settings, limit: int) -> dict[str, Any]:
    """Answer who deleted one thing; of what had an object, what has become of that."""
    found = lookup.find(subject, rest, period, limit=limit)
    known = _subjects()
    sentences = [sentence for one in found for sentence in evidence.tell(one, subject, rest, known)]
    objects: list[Found] = []
    if subject is not PATH and found and (path := found[0].facts.get("path")):
        objects = [one for one in lookup.find(PATH, path, period, limit=limit) if one.line.record != subject.record]
        sentences += evidence.of_object(path, objects)
    if not found:
        sentences = list(_nothing(subject, rest, settings))
    return {
        "what": f"{subject.called}:{rest}",
        "found": [_fact(one) for one in found],
        "object": [_fact(one) for one in objects],
        "sentences": sentences,
        **_reach(),
    }


def _nothing(subject: Subject, rest: str, settings: Settings) -> Iterator[str]:
    """Say that there is nothing, and how much that says."""
    yield f"The audit has nothing of {subject.called} {rest}."
    back = lookup.reaches_back()
    yield f"It reaches back to {moment(back)}." if back else "It has no deletions at all yet."
    for name in [subject.batch] if subject.batch else list(BATCHES):
        if not settings.audits(name):
            yield f"What {name} deletes is not in it: FORGEKEEPER_AUDIT or FORGEKEEPER_AUDIT_{name.upper()} says so."
        yield from _written_by(name)


def _written_by(name: str) -> Iterator[str]:
    """Say of a batch that writes by itself that the audit knows nothing of that."""
    if (batch := BATCHES.get(name)) is not None and batch.writes is not None:
        yield f"What {name} writes by itself is not in it: its declaration says {batch.writes!r}."


def _of_run(run: int, period: Period, limit: int) -> dict[str, Any]:
    totals, known = lookup.totals(run), _subjects()
    lines = lookup.newest(period, limit=limit, run=run)
    sentences = [
        f"Run {run} of {one.batch}: {one.records:,} {one.record}"
        f" {evidence.done_to(one.record, known) if one.state == 'deleted' else one.state},"
        f" from {moment(one.first)} to {moment(one.last)}."
        for one in totals
    ] or [f"The audit has nothing that run {run} has deleted."]
    if (row := JobRun.get_or_none(JobRun.id == run)) is not None:
        sentences += _written_by(row.batch)
    return {
        "run": run,
        "totals": [one._asdict() for one in totals],
        "deletions": [_row(one) for one in lines],
        "sentences": sentences,
        "rows": [evidence.shown(one, known) for one in lines],
        **_reach(),
    }


def _newest(period: Period, batch: str | None, who: str | None, limit: int) -> dict[str, Any]:
    people = lookup.acts(period, limit=limit, who=who, batch=batch)
    known, lines = _subjects(), [] if who else lookup.newest(period, limit=limit, batch=batch)
    rows = sorted(
        [
            *((act.at, evidence.act(act)) for act in people),
            *((line.at, evidence.shown(line, known)) for line in lines),
        ],
        key=lambda row: row[0],
        reverse=True,
    )[:limit]
    return {
        "acts": [act.__data__ for act in people],
        "deletions": [_row(line) for line in lines],
        "sentences": [] if rows else ["The audit has nothing of that."],
        "rows": [row for _, row in rows],
        **_reach(),
    }


def _reach() -> dict[str, Any]:
    return {"reaches_back": lookup.reaches_back()}


def _row(line: Line) -> dict[str, Any]:
    return {**line._asdict(), "records": line.size}


def _fact(found: Found) -> dict[str, Any]:
    line = {name: getattr(found.line, name) for name in ("at", "batch", "record", "run", "tick", "child", "phase")}
    return {**line, "state": found.state, **found.facts}


def _period(since: str | None, until: str | None) -> Period:
    instant = now()
    begins, ends = (None if text is None else times.past(text)(instant) for text in (since, until))
    return Period(begins, ends)


def hint(run: int) -> list[str]:
    """Say in a run's story where to ask what it has deleted, if the audit has anything of it."""
    if not lookup.has_run(run):
        return []
    return [f"`forgekeeper audit --run {run}` shows what it has deleted."]
