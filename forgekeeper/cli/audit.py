"""`audit`: acts of people, deletions by runs, their reasons and the state of objects."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from heapq import merge
from itertools import islice
from typing import Annotated, Any, NamedTuple

import typer

from forgekeeper.api.answers import Subject
from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import lookup
from forgekeeper.audit.acts import Act
from forgekeeper.audit.lookup import PATH_SUBJECT, AuditedRecord, AuditLine
from forgekeeper.cli.connection import connect_command
from forgekeeper.cli.terminal import (
    Json,
    format_facts,
    format_time,
    format_value,
    print_json,
    print_sentences,
    print_table,
    read_time,
    wrong_use,
)
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.database import now
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.outbox import DeletedObject

AuditAnswer = dict[str, Any]
DELETION_STATE_TEXTS = {
    None: "was about to be deleted (the result is not known yet: its run is at work, or has died)",
    "missing": "was about to be deleted, and no longer existed",
    "kept": "was about to be deleted, and was kept",
    "moved": "was about to be deleted, and had been changed",
    "repeated": "was about to be deleted, and a later attempt recorded the deletion",
    "failed": "was about to be deleted, and the deletion failed",
}
"""Text for each state of an announced deletion, except "deleted"."""


def audit(
    *,
    what: Annotated[
        str | None,
        typer.Option(
            metavar="KIND:…",
            help="Who deleted this record, when and why: artifact:ID, status:USER, import:ID, entity:ID,"
            " ref:PROJECT:REF, path:[LOCATION:]PATH.",
        ),
    ] = None,
    run: Annotated[int | None, typer.Option(min=0, help="Only deletions by this run and its children.")] = None,
    project: Annotated[int | None, typer.Option(min=0, metavar="P", help="Only deletions in this project.")] = None,
    who: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only acts of this user, host, or FORGEKEEPER_ACTOR.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME|AGE", help="Only entries since a time in UTC, or an age: 2026-11-20T08:30, 90m, 2h, 3d."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="Maximum number of entries, newest first.")] = 20,
    json: Json = False,
) -> None:
    """Show acts of people and deletions, newest first; with --what, who deleted a record, when and why."""
    rows: list[Any] = []
    if sum(option is not None for option in (what, run, project, who)) > 1:
        wrong_use("use only one of --what, --run, --project and --who")
    asked = None if what is None else parse_subject(what)
    with connect_command("audit", redis_needed=False) as settings:
        begins = None if since is None else read_time(since, now(), ahead=False)
        if asked is not None:
            answer = answer_about_record(*asked, begins, settings, limit=limit)
        elif project is not None:
            answer, rows = answer_about_project(project, begins, limit)
        elif run is not None:
            answer, lines = list_run_deletions(run, begins, limit)
            rows = [*map(table_row, lines)]
        else:
            answer, found = list_newest(begins, who, limit)
            rows = [*map(table_row, found)]
        answer["reaches_back"] = lookup.find_oldest_time()
    if json:
        print_json(answer)
        return
    print_sentences(answer["sentences"])
    if rows:
        print_table(("at", "by", "action", "target", "reason"), rows)


def answer_about_project(
    project: int, since: datetime | None, limit: int, *, offset: int = 0
) -> tuple[AuditAnswer, list[tuple[Any, ...]]]:
    """Return the answer about a project's deletions, and rows for the newest records after *offset*."""
    since = since or lookup.find_oldest_time() or now()
    sentences, every = list_project_deletions(project, since, BATCHES)
    found = every[offset:]
    rows = [
        (one.line.at, table_row(one.line)[1], describe_state(one.line.record, one.state), _describe_record(one), "")
        for one in found[:limit]
    ]
    deletions = list(map(_deletion_facts, found[:limit]))
    return {"project": project, "since": since, "deletions": deletions, "sentences": sentences}, rows


def _describe_record(one: AuditedRecord) -> str:
    """Return the record's kind and id, and its path or ref if it has one."""
    name = one.facts.get("path") or one.facts.get("ref") or ""
    return f"{one.line.record} {one.facts.get('id', '')} {name}".strip()


def list_subjects() -> list[Subject]:
    """Return the kinds of record that people may ask for, each with its batch."""
    return [Subject(**{**one._asdict(), "batch": batch.name}) for batch in BATCHES.values() for one in batch.subjects]


def parse_subject(text: str) -> tuple[Subject, str]:
    """Parse ``CALLED:…`` into the kind and the rest.

    The rest is a number if the kind lacks a name. Raises `Problem` if the kind is unknown or the rest is malformed.
    """
    known = (*list_subjects(), PATH_SUBJECT)
    called, _, rest = text.partition(":")
    subject = next((one for one in known if one.called == called), None)
    if subject is None or not rest:
        usages = ", ".join(one.usage for one in known)
        wrong_use(f"{text!r} does not name a kind of record: write {usages}")
    if subject.name is None and not (rest.isascii() and rest.isdigit() and len(rest) < 19):
        wrong_use(f"{rest!r} is not a number: write {subject.usage}")
    if subject.within and not subject.argument.startswith("[") and ":" not in rest:
        wrong_use(f"{text!r} lacks a part: write {subject.usage}")
    return subject, rest


def answer_about_record(
    subject: Subject, rest: str, since: datetime | None, settings: Settings, *, limit: int
) -> AuditAnswer:
    """Return who deleted a record and when, and the state of its object if it had one."""
    found, known = lookup.find_records(subject, rest, since, limit=limit), list_subjects()
    sentences = [sentence for one in found for sentence in _describe_deletion(one, subject, rest, known)]
    if restored := bool(found) and found[0].state == "deleted" and _is_restored(subject, rest):
        sentences.append(f"It is restored: the forge has {subject.called} {rest} again.")
    objects: list[AuditedRecord] = []
    if subject is not PATH_SUBJECT and found and (path := found[0].facts.get("path")):
        objects = [
            one
            for one in lookup.find_records(PATH_SUBJECT, path, since, limit=limit)
            if one.line.record != subject.record
        ]
        sentences += _describe_object(path, objects)
    return {
        "what": f"{subject.called}:{rest}",
        "found": list(map(_deletion_facts, found)),
        "restored": restored,
        "object": list(map(_deletion_facts, objects)),
        "sentences": sentences or list(_explain_nothing_found(subject, rest, settings)),
    }


def _is_restored(subject: Subject, rest: str) -> bool:
    """Check whether the forge has the record again; False if its kind cannot be looked up."""
    return subject.is_there is not None and subject.is_there(int(rest))


def _explain_nothing_found(subject: Subject, rest: str, settings: Settings) -> Iterator[str]:
    """Yield sentences that nothing was found, and the limits of this statement."""
    yield f"The audit has no entry about {subject.called} {rest}."
    yield _describe_reach()
    for name in [subject.batch] if subject.batch else list(BATCHES):
        if not settings.is_audited(name):
            yield f"FORGEKEEPER_AUDIT or FORGEKEEPER_AUDIT_{name.upper()} leaves the deletions of {name} out of it."
        yield from _warn_of_own_writes(name)


def _describe_reach() -> str:
    back = lookup.find_oldest_time()
    return f"It reaches back to {format_time(back)}." if back else "It has no deletions yet."


def _warn_of_own_writes(name: str) -> Iterator[str]:
    """Warn that the audit does not see the writes of a batch that writes by itself."""
    if (batch := BATCHES.get(name)) is not None and batch.writes is not None:
        yield f"It has no entries about the writes that {name} makes by itself: {batch.writes!r}."


def list_run_deletions(
    run: int, since: datetime | None, limit: int, *, max_summed_rows: int | None = None, before: int | None = None
) -> tuple[AuditAnswer, list[AuditLine]]:
    """Return the totals and the newest deletions of a run and its children, optionally *before* an id.

    If the audit has more than *max_summed_rows* rows of the run, they are not added up, because that would take too
    long.
    """
    known = list_subjects()
    many = max_summed_rows is not None and lookup.has_more_rows(max_summed_rows, run)
    totals = [] if many else lookup.sum_by_state(run)
    lines = lookup.list_newest(since, limit=limit, run=run, before=before)
    nothing = f"The audit has no deletions by run {run}."
    if many:
        nothing = (
            f"The audit has more than {max_summed_rows:,} rows of run {run}: `forgekeeper audit --run {run}` adds"
            " them up."
        )
    sentences = [
        f"Run {run} of {one.batch}: {one.records:,} {one.record}"
        f" {_deletion_verb(one.record, known) if one.state == 'deleted' else one.state},"
        f" from {format_time(one.first)} to {format_time(one.last)}."
        for one in totals
    ] or [nothing]
    if (row := JobRun.get_or_none(JobRun.id == run)) is not None:
        sentences += _warn_of_own_writes(row.batch)
    deletions = [line.as_json() for line in lines]
    answer = {"run": run, "totals": [one._asdict() for one in totals], "deletions": deletions, "sentences": sentences}
    return answer, lines


class AuditCursor(NamedTuple):
    """Cursor of a page: only ids below these are listed. None starts at the newest row."""

    act: int | None = None
    line: int | None = None


NEWEST_PAGE = AuditCursor()


def list_newest(
    since: datetime | None, who: str | None, limit: int, before: AuditCursor = NEWEST_PAGE
) -> tuple[AuditAnswer, list[Act | AuditLine]]:
    """Return acts and deletions, newest first; if *who* is given, only acts."""
    people = lookup.list_acts(since, limit=limit, who=who, before=before.act)
    lines = [] if who else lookup.list_newest(since, limit=limit, before=before.line)
    answer = {
        "acts": [act.__data__ for act in people],
        "deletions": [line.as_json() for line in lines],
        "sentences": [] if people or lines else ["The audit has no such entries."],
    }
    # Both lists are ordered by id, so the next page continues after the last id.
    both: list[Iterable[Act | AuditLine]] = [people, lines]
    return answer, list(islice(merge(*both, key=lambda one: one.at, reverse=True), limit))


def list_project_deletions(
    project: int, since: datetime, names: Iterable[str]
) -> tuple[list[str], list[AuditedRecord]]:
    """Return sentences and records, latest first, of these batches' deletions in a project.

    Deletions before *since* are left out.
    """
    sentences, every = list[str](), list[AuditedRecord]()
    for name in names:
        found, whole = lookup.list_of_project(project, name, since)
        every += found
        for (record, state), count in Counter((one.line.record, one.state) for one in found).items():
            sentences.append(f"{name}: {count:,} {record} of project {project} {describe_state(record, state)}.")
        if not whole:
            sentences.append(f"{name} has deleted more since then: only the latest deletions are listed.")
    nothing = [f"The audit has no deletions in project {project} since {format_time(since)}.", _describe_reach()]
    return sentences or nothing, sorted(every, key=lambda one: one.line.at, reverse=True)


def describe_state(record: str, state: str | None) -> str:
    """Return one word for the state of a record."""
    return _deletion_verb(record, list_subjects()) if state == "deleted" else state or "not known yet"


def table_row(one: Act | AuditLine) -> tuple[Any, ...]:
    """Return a table row: at, by, act, record, reason."""
    return _act_row(one) if isinstance(one, Act) else _deletion_row(one, list_subjects())


def _deletion_facts(found: AuditedRecord) -> AuditAnswer:
    line = {name: getattr(found.line, name) for name in ("at", "batch", "record", "run", "tick", "child", "phase")}
    return {**line, "state": found.state, **found.facts}


def _describe_deletion(found: AuditedRecord, asked: Subject, rest: str, known: Sequence[Subject]) -> Iterator[str]:
    """Yield sentences about a deletion: time, run, reason, facts, and how to restore it."""
    subject = _find_subject(found.line.record, known) or asked
    gone = found.state == "deleted"
    because = f", because {fill_template(subject.because, found.facts)}" if gone and subject.because else ""
    became = subject.gone if gone else DELETION_STATE_TEXTS.get(found.state, f"was {found.state}")
    yield f"{asked.called.capitalize()} {rest} {became}{_describe_time_and_run(found.line)}{because}."
    facts = {name: _format_fact(value) for name, value in found.facts.items() if value is not None}
    if said := format_facts({name: fact for name, fact in facts.items() if name not in {"state", "due", "others"}}):
        yield f"It was: {said}."
    obstacle = subject.obstacle() if gone and subject.obstacle else None
    if obstacle:
        yield f"{obstacle[0].upper()}{obstacle[1:]}."
    elif subject.restore and gone:
        yield f"`{fill_template(subject.restore, found.facts)}` may restore it."


def _describe_object(path: str, found: Sequence[AuditedRecord]) -> Iterator[str]:
    """Yield sentences about the object of a deleted record, latest first."""
    for one in found:
        yield (
            f"Its object {path} {DELETION_STATE_TEXTS.get(one.state, 'was deleted')}{_describe_time_and_run(one.line)}."
        )
    if not found:
        waits = [held for _, _, held in DeletedObject.find_at_paths([path])]
        state = "is kept by a person" if any(waits) else "waits to be deleted" if waits else "was missing, or is kept"
        yield f"The audit has no entry about its object {path}: it {state}."


def _deletion_row(line: AuditLine, kinds: Iterable[Subject]) -> tuple[Any, ...]:
    """Return the table row of a chunk, in the words of the declared *kinds*."""
    states = line.detail.get("state") or "deleted"
    became = ", ".join(sorted(set(map(str, states if isinstance(states, list) else [states]))))
    how = {"done": _deletion_verb(line.record, kinds), "intent": "about to delete"}.get(line.phase, became)
    of = "" if line.child is None else f", {line.child}"
    run = "no run" if line.run is None else f"run {line.run}"
    return line.at, f"{line.batch} ({run}{of})", how, f"{line.record_count:,} {line.record}", ""


def _deletion_verb(record: str, kinds: Iterable[Subject]) -> str:
    """Return the batch's word for deleting a record, such as "deleted"."""
    subject = _find_subject(record, kinds)
    return subject.done if subject else "deleted"


def _act_row(done: Act) -> tuple[Any, ...]:
    """Return the table row of a person's act."""
    actor = f" ({done.actor})" if done.actor else ""
    return done.at, f"{done.by_user}@{done.by_host}{actor}", done.act, done.what, done.reason


def _find_subject(record: str, kinds: Iterable[Subject]) -> Subject | None:
    """Return the declared kind of the record."""
    return next((one for one in kinds if one.record == record), None)


def _describe_time_and_run(line: AuditLine) -> str:
    run = f"by run {line.run} of {line.batch}" if line.run is not None else f"by {line.batch}, outside a run"
    details = [f"the tick of {format_time(line.tick)}"] if line.tick else []
    details += [f"child {line.child}"] if line.child else []
    return f" at {format_time(line.at)}, {run}" + (f" ({', '.join(details)})" if details else "")


def fill_template(template: str, facts: Mapping[str, Any]) -> str:
    """Fill the facts of a record into a template of its kind."""
    return template.format_map(
        defaultdict(lambda: "unknown", {name: _format_fact(fact) for name, fact in facts.items()})
    )


def _format_fact(value: Any) -> str:
    if isinstance(value, str) and len(value) > 18 and value[4:5] == "-" and value[10:11] == "T":
        with suppress(ValueError):
            return format_time(datetime.fromisoformat(value))
    return format_value(value)
