"""The audit in sentences: when something was deleted, by which run, why, and what has become of its object."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from forgekeeper.audit.acts import Act
from forgekeeper.audit.lookup import Found, Line, Subject
from forgekeeper.cli.console import facts as pairs
from forgekeeper.cli.console import moment, plain

STATES = {
    None: "was about to be deleted (what became of it is not known yet: its run is at it, or has died)",
    "missing": "was not there any more when it was to be deleted",
    "kept": "was about to be deleted, and was kept",
    "moved": "was about to be deleted, and had been changed",
    "failed": "was about to be deleted, and could not be",
}
"""What has become of something that was said to be about to go; else it has gone."""


def tell(found: Found, asked: Subject, rest: str, known: Sequence[Subject]) -> Iterator[str]:
    """Tell what was deleted, when, by whom, why, what it was, and how it is brought back."""
    subject = _subject_of(found.line.record, known) or asked
    gone = found.state == "deleted"
    because = f", because {_filled(subject.because, found.facts)}" if gone and subject.because else ""
    became = subject.gone if gone else STATES.get(found.state, f"was {found.state}")
    yield f"{asked.called.capitalize()} {rest} {became}{_when(found.line)}{because}."
    facts = {name: _written(value) for name, value in found.facts.items() if value is not None}
    if said := pairs({name: fact for name, fact in facts.items() if name not in {"state", "due"}}):
        yield f"It was: {said}."
    if subject.restore and gone:
        yield f"`{_filled(subject.restore, found.facts)}` may bring it back."


def of_object(path: str, found: Sequence[Found]) -> Iterator[str]:
    """Tell what has become of an object that went with something; the latest first."""
    for one in found:
        yield f"Its object {path} {STATES.get(one.state, 'was deleted')}{_when(one.line)}."
    if not found:
        yield f"Of its object {path} the audit has nothing: it waits to be deleted, or was there no more."


def shown(line: Line, kinds: Iterable[Subject]) -> tuple[Any, ...]:
    """Return a row of the table for a chunk, in the words of those *kinds*."""
    states = line.detail.get("state") or "deleted"
    became = ", ".join(sorted(set(map(str, states if isinstance(states, list) else [states]))))
    how = {"done": done_to(line.record, kinds), "intent": "about to delete"}.get(line.phase, became)
    of = "" if line.child is None else f", {line.child}"
    run = "no run" if line.run is None else f"run {line.run}"
    return line.at, f"{line.batch} ({run}{of})", how, f"{line.size:,} {line.record}", ""


def done_to(record: str, kinds: Iterable[Subject]) -> str:
    """Say in a word what a batch has done to a record that is gone."""
    subject = _subject_of(record, kinds)
    return subject.done if subject else "deleted"


def act(done: Act) -> tuple[Any, ...]:
    """Return a row of the table for what a person did."""
    actor = f" ({done.actor})" if done.actor else ""
    return done.at, f"{done.by_user}@{done.by_host}{actor}", done.act, done.what, done.reason


def _subject_of(record: str, kinds: Iterable[Subject]) -> Subject | None:
    """Return what people call records of that kind."""
    return next((one for one in kinds if one.record == record), None)


def _when(line: Line) -> str:
    run = f"by run {line.run} of {line.batch}" if line.run is not None else f"by {line.batch}, outside a run"
    details = [f"the tick of {moment(line.tick)}"] if line.tick else []
    details += [f"child {line.child}"] if line.child else []
    return f" at {moment(line.at)}, {run}" + (f" ({', '.join(details)})" if details else "")


def _filled(template: str, facts: Mapping[str, Any]) -> str:
    return template.format_map(defaultdict(lambda: "unknown", {name: _written(fact) for name, fact in facts.items()}))


def _written(value: Any) -> str:
    if isinstance(value, str) and len(value) > 18 and value[4:5] == "-" and value[10:11] == "T":
        with suppress(ValueError):
            return moment(datetime.fromisoformat(value))
    return plain(value)
