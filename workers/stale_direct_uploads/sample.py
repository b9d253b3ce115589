"""Sample data of batch 100: uploads of yesterday and of just now."""

from __future__ import annotations

import secrets
from datetime import timedelta

from forgekeeper.batches import Sample
from forgekeeper.connections import client
from forgekeeper.settings import Settings
from forgekeeper.storage import stores
from models import JobArtifact
from workers.stale_direct_uploads import register

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
