"""Page of the audit: acts of people and deletions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import lookup
from forgekeeper.audit.acts import Act
from forgekeeper.cli import audit
from forgekeeper.cli.audit import AuditCursor
from forgekeeper.cli.connection import batch_named
from forgekeeper.cli.console.pages import PageRequest, choose_page, page
from forgekeeper.cli.console.texts import TranslatableText
from forgekeeper.cli.terminal import Problem, read_number, read_time, wrong_use
from forgekeeper.platform.database import now

ROWS_PER_PAGE = 100
"""Rows per page."""
START_OF_DAY = "00:00"
QUESTION_PARAMETERS = ("what", "project", "run", "who")


@page(
    "/audit",
    "audit.html",
    TranslatableText("Audit"),
    query=("what", "since", "project", "batch", "page", "run", "act", "line", "who"),
    timeout_seconds=10,
    live=False,
)
def show_audit(request: PageRequest) -> dict[str, Any]:
    """Answer one question: about a thing, a project, a run or a person, or the newest entries."""
    try:
        answer = _answer_question(request)
    except Problem as problem:
        answer = {"sentences": [TranslatableText("%(sentence)s.", sentence=problem.sentence)]}
    usages = [one.usage for one in (*audit.list_subjects(), lookup.PATH_SUBJECT)]
    return {"at": now(), "reaches_back": lookup.find_oldest_time(), "usages": usages, **answer}


def _answer_question(request: PageRequest) -> dict[str, Any]:
    query, at = request.query, now()
    if sum(name in query for name in QUESTION_PARAMETERS) > 1:
        wrong_use(TranslatableText("use only one of these: %(names)s", names=", ".join(QUESTION_PARAMETERS)))
    since = read_time(query["since"], at, ahead=False) if "since" in query else None
    if "what" in query:
        answer = audit.answer_about_record(
            *audit.parse_subject(query["what"]), since, request.settings, limit=ROWS_PER_PAGE
        )
        return {"sentences": answer["sentences"]}
    if "project" in query:
        project = read_number(query["project"], "a project")
        batch = query.get("batch")
        names = [batch_named(batch).name] if batch else [*BATCHES]
        sentences, found = audit.list_project_deletions(
            project, since or read_time(START_OF_DAY, at, ahead=False), names
        )
        records = [(one, audit.describe_state(one.line.record, one.state)) for one in found]
        return {"sentences": sentences, **choose_page(records, request, ROWS_PER_PAGE)}
    if "run" in query:
        answer, lines = audit.list_run_deletions(read_number(query["run"], "a run"), since, ROWS_PER_PAGE)
        return {"sentences": answer["sentences"], "rows": [(audit.table_row(line), line) for line in lines]}
    return _list_newest(query, since)


def _list_newest(query: Mapping[str, str], since: datetime | None) -> dict[str, Any]:
    """Return a page of the newest entries; the next page begins below the oldest ids shown."""
    below = {name: read_number(query[name], f"a {name}") for name in ("act", "line") if name in query}
    answer, found = audit.list_newest(since, query.get("who"), ROWS_PER_PAGE + 1, AuditCursor(**below))
    shown = found[:ROWS_PER_PAGE]
    for one in shown:
        below["act" if isinstance(one, Act) else "line"] = one.id
    kept = {name: query[name] for name in ("who", "since") if name in query}
    return {
        "sentences": answer["sentences"],
        "rows": [(audit.table_row(one), one) for one in shown],
        "older": kept | below if len(found) > ROWS_PER_PAGE else None,
    }
