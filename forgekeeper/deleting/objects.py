"""Objects as a batch's items: how they are deleted at a store, and what has become of those of a dead attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import structlog

from forgekeeper.declaring.items import Deleted, One
from forgekeeper.storage.objects import OUTSIDE, Objects, StoreUnavailable

log = structlog.get_logger(__name__)


def deleted_at(
    store: Objects,
    paths: Mapping[One, str],
    until: float,
    *,
    unless_changed_since: Mapping[str, datetime] | None = None,
) -> Deleted[One]:
    """Delete the objects at the *paths* of items; say what is known of each, also where the store does not answer."""
    error: StoreUnavailable | None = None
    try:
        known = store.delete(list(paths.values()), until=until, unless_changed_since=unless_changed_since)
    except StoreUnavailable as unavailable:
        known, error = unavailable.known, unavailable
    outside = [path for path, outcome in known.items() if OUTSIDE in outcome.reason]
    if outside:
        log.error("objects not deleted", reason=OUTSIDE, objects=len(outside), first=outside[0])
    states = {one: known[path] for one, path in paths.items() if path in known}
    return Deleted(states, error=error, began=error is None or error.began)


def stood_at(store: Objects, rows: Sequence[Mapping[str, Any]], *, until: float) -> list[str | None]:
    """Say of the objects of a dead attempt whether they are there; None of those of which the store says nothing."""
    there = store.present([row["path"] for row in rows], until=until)
    return [None if row["path"] not in there else "kept" if there[row["path"]] else "deleted" for row in rows]
