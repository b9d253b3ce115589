"""What is recorded: what people did and what was deleted, as `audit` answers it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from forgekeeper.audit import lookup
from forgekeeper.audit.acts import Act
from forgekeeper.audit.lookup import Line
from forgekeeper.cli import audit
from forgekeeper.cli.audit import Before
from forgekeeper.cli.terminal import Problem, read_time, wrong_use
from forgekeeper.console.pages import Asked, page
from forgekeeper.database import now

SIZE = 100
"""So many are on a page."""
TODAY = "00:00"
QUESTIONS = ("what", "project", "run", "who")


@page("/audit", "audit.html", "Audit", place="Audit", patience=10, live=False)
def recorded(asked: Asked) -> dict[str, Any]:
    """Answer one question: of one thing, of a project, of a run, or what is newest, of a person or of all."""
    usages = [one.usage for one in (*audit.subjects(), lookup.PATH)]
    facts = {
        "at": now(),
        "reaches_back": lookup.reaches_back(),
        "usages": usages,
        "rows": [],
        "found": [],
        "older": None,
    }
    try:
        return facts | _answer(asked)
    except Problem as problem:
        return facts | {"sentences": [f"{problem}."]}


def _answer(asked: Asked) -> dict[str, Any]:
    query, at = asked.query, now()
    if sum(name in query for name in QUESTIONS) > 1:
        wrong_use(f"ask for one of these: {', '.join(QUESTIONS)}")
    since = read_time(query["since"], at, ahead=False) if "since" in query else None
    if "what" in query:
        answer = audit.about(*audit.subject_named(query["what"]), since, asked.settings, limit=SIZE)
        return {"sentences": answer["sentences"]}
    if (project := _number(asked, "project")) is not None:
        sentences, found = audit.of_project(project, since or read_time(TODAY, at, ahead=False))
        records = [(one, audit.became(one.line.record, one.state)) for one in found[:SIZE]]
        return {"sentences": sentences, "found": records}
    if (run := _number(asked, "run")) is not None:
        answer, lines = audit.of_run(run, since, SIZE)
        return {"sentences": answer["sentences"], "rows": _rows(lines)}
    return _newest(asked, since)


def _newest(asked: Asked, since: datetime | None) -> dict[str, Any]:
    before = Before(_number(asked, "act"), _number(asked, "line"))
    answer, found = audit.newest(since, asked.query.get("who"), SIZE + 1, before)
    shown = found[:SIZE]
    acts, lines = ([one.id for one in shown if isinstance(one, kind)] for kind in (Act, Line))
    older = {"act": min(acts, default=before.act), "line": min(lines, default=before.line)}
    older = {name: number for name, number in older.items() if number is not None}
    kept = {name: asked.query[name] for name in ("who", "since") if name in asked.query}
    return {
        "sentences": answer["sentences"],
        "rows": _rows(shown),
        "older": kept | older if len(found) > SIZE else None,
    }


def _rows(found: Sequence[Act | Line]) -> list[tuple[tuple[Any, ...], Line | None, Act | None]]:
    """Return the rows of the command's table, each with the deletion or the act that it is about."""
    return [
        (audit.row_of(one), one if isinstance(one, Line) else None, one if isinstance(one, Act) else None)
        for one in found
    ]


def _number(asked: Asked, name: str) -> int | None:
    """Return the number of that name in the query; refuse what is none."""
    text = asked.query.get(name)
    if text is not None and not (text.isascii() and text.isdecimal() and len(text) < 19):
        wrong_use(f"{text!r} is no number of a {name}")
    return None if text is None else int(text)
