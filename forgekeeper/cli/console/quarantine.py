"""Pages of the quarantine: filtered list, and a single entry."""

from __future__ import annotations

from typing import Any

from forgekeeper.api.batches import all_declared
from forgekeeper.cli import quarantine
from forgekeeper.cli.console.pages import PageRequest, page
from forgekeeper.cli.console.texts import TranslatableText
from forgekeeper.cli.terminal import read_number
from forgekeeper.ledger.quarantine import REASONS_BY_KIND
from forgekeeper.platform.database import now

ENTRIES_PER_PAGE = 100
"""Rows per page, and entries per kind that batches keep themselves, on the first page."""


@page("/quarantine", "quarantine.html", TranslatableText("Quarantine"), query=("batch", "kind", "after"))
def show_quarantine(request: PageRequest) -> dict[str, Any]:
    """Show the quarantine, oldest first; ``after`` is the last id of the page before."""
    batch, kind = request.query.get("batch"), request.query.get("kind")
    after = read_number(request.query["after"], "an entry") if "after" in request.query else 0
    kept = quarantine.list_kept_entries(request.settings, batch, kind, ENTRIES_PER_PAGE)
    rows = quarantine.list_rows_after(after, batch, kind, ENTRIES_PER_PAGE + 1)
    ours = quarantine.count_rows(batch, kind)
    return {
        "at": now(),
        "ours": ours,
        "total": ours + kept.total,
        "rows": rows[:ENTRIES_PER_PAGE],
        "next": rows[ENTRIES_PER_PAGE - 1].id if len(rows) > ENTRIES_PER_PAGE else None,
        "kept": kept._replace(entries=[]) if after else kept,
        "kinds": [*REASONS_BY_KIND, *(refused.kind for one in all_declared() for refused in one.refused)],
        "filter": {name: value for name, value in request.query.items() if name in {"batch", "kind"}},
    }


@page("/quarantine/{id:path}", "quarantined.html", TranslatableText("In quarantine"), timeout_seconds=5, live=False)
def show_entry(request: PageRequest) -> dict[str, Any]:
    """Show an entry by its id, as in the list."""
    number = request.path["id"]
    return {"at": now(), "one": quarantine.require_entry(number, request.settings), "row": quarantine.find_row(number)}
