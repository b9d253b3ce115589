"""Page of the audit: acts of people and deletions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import lookup
from forgekeeper.audit.acts import Act
from forgekeeper.cli import audit
from forgekeeper.cli.audit import Before
from forgekeeper.cli.connection import batch_named
from forgekeeper.cli.console.pages import Asked, choose_page, page
from forgekeeper.cli.terminal import Problem, read_number, read_time, wrong_use
from forgekeeper.platform.database import now

SIZE = 100
"""Rows per page."""
TODAY = "00:00"
QUESTIONS = ("what", "project", "run", "who")


@page(
    "/audit",
    "audit.html",
    "Audit",
    query=("what", "since", "project", "batch", "page", "run", "act", "line", "who"),
    patience=10,
    live=False,
)
def recorded(asked: Asked) -> dict[str, Any]:
    """Answer one question: about a thing, a project, a run or a person, or the newest entries."""
    try:
        answer = _answer(asked)
    except Problem as problem:
        answer = {"sentences": [f"{problem}."]}
    usages = [one.usage for one in (*audit.subjects(), lookup.PATH)]
    return {"at": now(), "reaches_back": lookup.reaches_back(), "usages": usages, **answer}


def _answer(asked: Asked) -> dict[str, Any]:
    query, at = asked.query, now()
    if sum(name in query for name in QUESTIONS) > 1:
        wrong_use(f"ask for one of these: {', '.join(QUESTIONS)}")
    since = read_time(query["since"], at, ahead=False) if "since" in query else None
    if "what" in query:
        answer = audit.about(*audit.subject_named(query["what"]), since, asked.settings, limit=SIZE)
        return {"sentences": answer["sentences"]}
    if "project" in query:
        project = read_number(query["project"], "a project")
        batch = query.get("batch")
        names = [batch_named(batch).name] if batch else [*BATCHES]
        sentences, found = audit.of_project(project, since or read_time(TODAY, at, ahead=False), names)
        records = [(one, audit.became(one.line.record, one.state)) for one in found]
        return {"sentences": sentences, **choose_page(records, asked, SIZE)}
    if "run" in query:
        answer, lines = audit.of_run(read_number(query["run"], "a run"), since, SIZE)
        return {"sentences": answer["sentences"], "rows": [(audit.row_of(line), line) for line in lines]}
    return _newest(query, since)


def _newest(query: Mapping[str, str], since: datetime | None) -> dict[str, Any]:
    """Return a page of the newest entries; the next page begins below the oldest ids shown."""
    below = {name: read_number(query[name], f"a {name}") for name in ("act", "line") if name in query}
    answer, found = audit.newest(since, query.get("who"), SIZE + 1, Before(**below))
    shown = found[:SIZE]
    for one in shown:
        below["act" if isinstance(one, Act) else "line"] = one.id
    kept = {name: query[name] for name in ("who", "since") if name in query}
    return {
        "sentences": answer["sentences"],
        "rows": [(audit.row_of(one), one) for one in shown],
        "older": kept | below if len(found) > SIZE else None,
    }
