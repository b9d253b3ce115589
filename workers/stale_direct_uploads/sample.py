"""Sample data of batch 100: uploads of yesterday and of just now."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import timedelta

from forgekeeper.brought import Figure, Results, Sample, processed
from forgekeeper.connections import client
from forgekeeper.settings import Settings
from forgekeeper.storage import stores
from models import JobArtifact
from workers.stale_direct_uploads import by_hand, register

TOTAL = 200
MALFORMED = ("no location at all", "artifacts:", "artifacts:../../etc/passwd")
"""Members of the register that no upload can have made: they end as failed, and stop nobody else."""
UNKNOWN = ("nowhere:uploads/a:b",)
"""Members whose location is not configured: they are tried again, and stop nobody else."""


def add(scale: int, settings: Settings) -> Sample:
    """Register uploads, of which one has no object, and a few entries that only a bug could write."""
    total, location = TOTAL * scale, JobArtifact.location
    names = [f"uploads/{secrets.token_hex(4)}:{n}" for n in range(total)]
    stale, fresh = names[: total // 2], names[total // 2 :]
    yesterday = client.time()[0] - timedelta(days=1).total_seconds()
    if stale:
        client.zadd(register.PENDING, {f"{location}:{name}": yesterday for name in stale})
    for name in fresh:
        register.prepare(client, location, name)
    client.zadd(register.PENDING, dict.fromkeys(MALFORMED + UNKNOWN, 0))
    store = stores.at(location, settings)
    if store is not None:
        store.put(names[1:])
    odd = len(MALFORMED + UNKNOWN)
    return Sample("direct uploads", total + odd, len(stale) + odd)


def present(_settings: Settings) -> Sample:
    """Count the uploads, and those that are stale."""
    due = _stale()
    objects = max(0, due - len(MALFORMED + UNKNOWN) - 1)
    return Sample("direct uploads", register.count(client), due, objects)


def left() -> int:
    """Count what is still to be dealt with; what is at an unknown location is, once it was tried."""
    tried = len(UNKNOWN) * bool(by_hand.failed(client, 1))
    return _stale() + int(client.zcard(register.DELETING)) - tried


def proof(before: Sample, _results: Results) -> Iterator[Figure]:
    """Say what the pages of metrics show of it."""
    yield processed("stale_direct_uploads", "stale_upload", before.due - len(MALFORMED + UNKNOWN))
    yield Figure("exporter", "quarantine_records", {"record": "failed_upload"}, len(MALFORMED))


def _stale() -> int:
    return int(client.zcount(register.PENDING, "-inf", int(client.time()[0]) - 3 * 3600))
