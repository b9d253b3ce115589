"""Read-only views of a queue of refs: backlog, share for the circuit breaker, quarantine, rows in each state."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from forgekeeper.api.answers import Backlog, Rows
from forgekeeper.api.inspection import RefusedRecords, parse_ids
from forgekeeper.api.refs import Refs
from forgekeeper.platform.database import queries
from forgekeeper.platform.database.queries import AffectedShare
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.status_queue import RefQueue


def count_pending_refs(refs: Refs[Any], batch: str, _now: datetime) -> Backlog:
    """Count the pending rows; a row that a person retries is due since the retry."""
    return Backlog.from_query(RefQueue(refs, batch).select_not_excluded(), oldest=refs.source.updated_at)


def measure_affected_refs(refs: Refs[Any], batch: str, _now: datetime) -> AffectedShare:
    """Return the counts for the circuit breaker: pending rows of all rows, because refs cannot be counted."""
    return AffectedShare.from_queries(RefQueue(refs, batch).select_not_excluded())


def define_ref_quarantine(refs: Refs[Any], batch: str) -> RefusedRecords:
    """Return the rejected rows as a part of the quarantine."""
    queue = RefQueue(refs, batch)
    return RefusedRecords(
        kind=refs.called,
        record=refs.rejected_record,
        count=lambda: queries.count_bounded(queue.select_rejected()),
        entries=lambda _settings, limit: queue.list_entries(limit),
        retry=lambda keys: queue.retry(parse_ids(keys)),
        discard=lambda keys: queue.discard(parse_ids(keys)),
    )


def select_pending_rows(refs: Refs[Any], _now: datetime, _settings: Settings) -> list[Rows[Any]]:
    """Return the pending rows, as `peek` shows them."""
    queue = refs.source
    return [Rows(queue.model, queue.status == queue.pending, since=queue.created_at, record=refs.record)]


def select_processed_rows(refs: Refs[Any], _now: datetime) -> Rows[Any]:
    """Return the processed rows that housekeeping deletes."""
    queue, record = refs.source, refs.processed_record
    is_processed = queue.status == queue.processed
    since, keep = queue.processed_at, queue.keep_processed
    return Rows(queue.model, is_processed, since=since, older_than=keep, record=record, counted=f"{record}s")
