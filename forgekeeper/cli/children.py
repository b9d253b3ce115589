"""The children of a batch that fail, for `why` and `status`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forgekeeper.runs.quarantine import Quarantined


def failing(batch: str) -> dict[str, Any] | None:
    """Sum up the batch's children that failed and have not ended well since, None where there are none."""
    found = Quarantined.of(batch)
    last = found.first()
    fields = ("record", "key", "run", "error", "failures", "since", "failed_at")
    return last and {"count": found.count(), "last": {field: getattr(last, field) for field in fields}}


def said(found: Mapping[str, Any]) -> str:
    """Say what `failing` has found, for a line of a table."""
    last, count = found["last"], found["count"]
    return f"{count:,} {'child' if count == 1 else 'children'} failing, the last {last['key']}: {last['error']}"


def warning(batch: str, found: Mapping[str, Any]) -> str:
    """Say what `failing` has found, and where more is said."""
    return f"{batch}: {said(found)}; `forgekeeper quarantine list --kind child --batch {batch}` lists them"
