"""Endpoint of the audit."""

from __future__ import annotations

from typing import Any

from forgekeeper.audit import lookup
from forgekeeper.cli import audit
from forgekeeper.cli.audit import NEWEST_PAGE, AuditCursor
from forgekeeper.cli.console.audit import QUESTION_PARAMETERS
from forgekeeper.cli.console.pages import PageRequest
from forgekeeper.cli.console.web_api.endpoints import (
    CURSOR,
    INTEGER,
    LIMIT,
    SINCE,
    Parameter,
    endpoint,
    read_cursor,
    read_limit,
    read_since,
)
from forgekeeper.cli.console.web_api.models import AuditAnswer
from forgekeeper.cli.terminal import read_number, wrong_use

WHAT = Parameter(
    "what", "Who deleted this record, when and why: artifact:ID, ref:PROJECT:REF, path:[LOCATION:]PATH, …."
)
RUN = Parameter("run", "Only deletions by this run and its children.", INTEGER)
PROJECT = Parameter("project", "Only deletions in this project.", INTEGER)
WHO = Parameter("who", "Only acts of this user, host, or FORGEKEEPER_ACTOR.")


@endpoint("/audit", AuditAnswer, query=(WHAT, RUN, PROJECT, WHO, SINCE, LIMIT, CURSOR))
def read_audit(request: PageRequest) -> dict[str, Any]:
    """Read acts of people and deletions, newest first, as in `forgekeeper audit --json`.

    The first four parameters exclude each other.
    """
    if sum(name in request.query for name in QUESTION_PARAMETERS) > 1:
        wrong_use(f"use only one of these: {', '.join(QUESTION_PARAMETERS)}")
    return _answer_question(request) | {"reaches_back": lookup.find_oldest_time()}


def _answer_question(request: PageRequest) -> dict[str, Any]:
    query, since, limit = request.query, read_since(request), read_limit(request)
    if "what" in query:
        subject = audit.parse_subject(query["what"])
        return audit.answer_about_record(*subject, since, request.settings, limit=limit) | {"next": None}
    if "project" in query:
        offset = read_cursor(request) or 0
        project = read_number(query["project"], "a project", least=0)
        answer, rows = audit.answer_about_project(project, since, limit + 1, offset=offset)
        answer["deletions"] = answer["deletions"][:limit]
        return answer | {"next": str(offset + limit) if len(rows) > limit else None}
    if "run" in query:
        run = read_number(query["run"], "a run", least=0)
        answer, lines = audit.list_run_deletions(run, since, limit + 1, before=read_cursor(request))
        answer["deletions"] = answer["deletions"][:limit]
        return answer | {"next": str(lines[limit - 1].id) if len(lines) > limit else None}
    return _list_newest(request)


def _list_newest(request: PageRequest) -> dict[str, Any]:
    """Return a page of acts and a page of deletions; the next pages begin below the oldest ids shown."""
    limit, before = read_limit(request), _read_ids(request.query.get(CURSOR.name))
    answer, _rows = audit.list_newest(read_since(request), request.query.get("who"), limit + 1, before)
    acts, lines = answer["acts"], answer["deletions"]
    more = max(len(acts), len(lines)) > limit
    # An id of 0 is below every entry: that list has ended.
    oldest = [(shown[-1]["id"] if (shown := found[:limit]) else 0) for found in (acts, lines)]
    cursor = "{}.{}".format(*oldest) if more else None
    return answer | {"acts": acts[:limit], "deletions": lines[:limit], "next": cursor}


def _read_ids(cursor: str | None) -> AuditCursor:
    if cursor is None:
        return NEWEST_PAGE
    act, _, line = cursor.partition(".")
    return AuditCursor(*(read_number(part, "the last answer's `next`", least=0) for part in (act, line)))
