"""Endpoints of the quarantine."""

from __future__ import annotations

from typing import Any

from forgekeeper.cli import quarantine
from forgekeeper.cli.console.pages import PageRequest
from forgekeeper.cli.console.web_api.endpoints import (
    BATCH,
    CURSOR,
    LIMIT,
    Parameter,
    endpoint,
    read_cursor,
    read_limit,
)
from forgekeeper.cli.console.web_api.models import EntryAnswer, QuarantineAnswer

KIND = Parameter("kind", "Only entries of this kind: record, child, message, upload, ….")


@endpoint("/quarantine", QuarantineAnswer, query=(BATCH, KIND, LIMIT, CURSOR))
def read_quarantine(request: PageRequest) -> dict[str, Any]:
    """Read quarantined entries, oldest first, as in `forgekeeper quarantine list --json`.

    Entries that batches keep themselves are in the first answer only, at most *limit* of each kind.
    """
    batch, kind = request.query.get("batch"), request.query.get("kind")
    limit, after = read_limit(request), read_cursor(request)
    rows = quarantine.list_rows_after(after or 0, batch, kind, limit + 1)
    kept = quarantine.list_kept_entries(request.settings, batch, kind, limit)
    if after is not None:
        kept = kept._replace(entries=[])
    shown = rows[:limit]
    facts = quarantine.list_facts(shown, kept, quarantine.count_rows(batch, kind))
    return facts | {"next": shown[-1].id if len(rows) > limit else None}


@endpoint("/quarantine/{id}", EntryAnswer)
def read_entry(request: PageRequest) -> dict[str, Any]:
    """Read one quarantined entry, as in `forgekeeper quarantine show ID --json`."""
    return quarantine.require_entry(request.path["id"], request.settings)._asdict()
