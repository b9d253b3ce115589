"""Pages of the quarantine: filtered list, and a single entry."""

from __future__ import annotations

from typing import Any

from forgekeeper.api.batches import all_declared
from forgekeeper.cli import quarantine
from forgekeeper.cli.console.pages import Asked, page
from forgekeeper.cli.terminal import read_number
from forgekeeper.ledger.quarantine import KINDS
from forgekeeper.platform.database import now

SIZE = 100
"""Rows per page, and entries per kind that batches keep themselves, on the first page."""


@page("/quarantine", "quarantine.html", "Quarantine", query=("batch", "kind", "after"))
def entries(asked: Asked) -> dict[str, Any]:
    """Show the quarantine, oldest first; ``after`` is the last id of the page before."""
    batch, kind = asked.query.get("batch"), asked.query.get("kind")
    after = read_number(asked.query["after"], "one that lies there") if "after" in asked.query else 0
    kept = quarantine.kept_by_documents(asked.settings, batch, kind, SIZE)
    rows = quarantine.after(after, batch, kind, SIZE + 1)
    ours = quarantine.count(batch, kind)
    return {
        "at": now(),
        "ours": ours,
        "total": ours + kept.total,
        "rows": rows[:SIZE],
        "next": rows[SIZE - 1].id if len(rows) > SIZE else None,
        "kept": kept._replace(entries=[]) if after else kept,
        "kinds": [*KINDS, *(refused.kind for one in all_declared() for refused in one.refused)],
        "filter": {name: value for name, value in asked.query.items() if name in {"batch", "kind"}},
    }


@page("/quarantine/{id:path}", "quarantined.html", "In quarantine", patience=5, live=False)
def entry(asked: Asked) -> dict[str, Any]:
    """Show an entry by its id, as in the list."""
    number = asked.path["id"]
    return {"at": now(), "one": quarantine.named(number, asked.settings), "row": quarantine.row_of(number)}
