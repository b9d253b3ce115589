"""The audit in sentences: when something was deleted, by which run, why, and what has become of its object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from forgekeeper.audit.acts import Act
from forgekeeper.audit.lookup import Found, Line
from forgekeeper.audit.subjects import Subject, subject_of
from forgekeeper.cli.console import facts as pairs
from forgekeeper.cli.console import moment, plain

STATES = {
    "missing": "was not there any more when it was to be deleted",
    "kept": "was about to be deleted, and was kept",
    "moved": "was about to be deleted, and had been changed",
    "failed": "was about to be deleted, and could not be",
}
"""What has become of something that was said to be about to go; else it has gone."""
GONE = {"deleted", "missing"}


def tell(found: Found, asked: Subject, rest: str, known: Sequence[Subject]) -> Iterator[str]:
    """Tell what was deleted, when, by whom, why, what it was, and how it is brought back."""
    line, subject = found.line, subject_of(found.line.record, known) or asked
    name = f"{asked.called.capitalize()} {rest}"
    if found.state is None:
        yield f"{name} was about to be deleted at {moment(line.at)}, {_by(line)}."
        yield "What became of it is not known yet: that run is at it, or has died; then the next run says."
    elif found.state == "deleted":
        yield f"{name} {subject.gone} at {moment(line.at)}, {_by(line)}{_why(subject, found.facts)}."
    else:
        yield f"{name} {STATES.get(found.state, f'was {found.state}')} at {moment(line.at)}, {_by(line)}."
    if known_of_it := _known(found.facts):
        yield f"It was: {pairs(known_of_it)}."
    if subject.restore and found.state == "deleted":
        yield f"`{_filled(subject.restore, found.facts)}` may bring it back."


def of_object(path: str, found: Sequence[Found]) -> Iterator[str]:
    """Tell what has become of an object that went with something; the latest first."""
    for one in found:
        when = f"at {moment(one.line.at)}, {_by(one.line)}"
        if one.state is None:
            yield f"Its object {path} was about to be deleted {when}; what became of it is not known yet."
        else:
            yield f"Its object {path} {STATES.get(one.state, 'was deleted')} {when}."
    if not found:
        yield f"Of its object {path} the audit has nothing: it waits to be deleted, or was there no more."


def shown(line: Line, kinds: Iterable[Subject]) -> tuple[Any, ...]:
    """Return a row of the table for a chunk, in the words of those *kinds*."""
    how = {"done": done_to(line.record, kinds), "intent": "about to delete"}.get(line.phase) or _states(
        line.detail.get("state")
    )
    of = "" if line.child is None else f", {line.child}"
    run = "no run" if line.run is None else f"run {line.run}"
    return moment(line.at), f"{line.batch} ({run}{of})", how, f"{line.size:,} {line.record}", ""


def done_to(record: str, kinds: Iterable[Subject]) -> str:
    """Say in a word what a batch has done to a record that is gone."""
    subject = subject_of(record, kinds)
    return subject.done if subject else "deleted"


def act(done: Act) -> tuple[Any, ...]:
    """Return a row of the table for what a person did."""
    actor = f" ({done.actor})" if done.actor else ""
    return moment(done.at), f"{done.by_user}@{done.by_host}{actor}", done.act, done.what, done.reason


def _states(state: Any) -> str:
    return ", ".join(sorted({str(one) for one in (state if isinstance(state, list) else [state or "deleted"])}))


def _by(line: Line) -> str:
    run = f"by run {line.run} of {line.batch}" if line.run is not None else f"by {line.batch}, outside a run"
    details = [f"the tick of {moment(line.tick)}"] if line.tick else []
    details += [f"child {line.child}"] if line.child else []
    return f"{run} ({', '.join(details)})" if details else run


def _why(subject: Subject, facts: Mapping[str, Any]) -> str:
    return f", because {_filled(subject.because, facts)}" if subject.because else ""


def _filled(template: str, facts: Mapping[str, Any]) -> str:
    return template.format_map(_Facts({name: _written(value) for name, value in facts.items()}))


class _Facts(dict[str, str]):
    def __missing__(self, _name: str) -> str:
        return "unknown"


def _known(facts: Mapping[str, Any]) -> dict[str, str]:
    unsaid = {"state", "due"}
    return {name: _written(value) for name, value in facts.items() if name not in unsaid and value is not None}


def _written(value: Any) -> str:
    if isinstance(value, str) and len(value) > 18 and value[4:5] == "-" and value[10:11] == "T":
        try:
            return moment(datetime.fromisoformat(value))
        except ValueError:
            pass
    return plain(value)
