"""Direct uploads of yesterday and of just now, and entries of the register that only a bug could write."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import timedelta

from demo.figures import Figure, Results, Sample, SampleData, processed
from forgekeeper.connections import client
from forgekeeper.settings import Settings
from forgekeeper.storage import stores
from models import JobArtifact
from workers.stale_direct_uploads import register

MALFORMED = ("no location at all", "artifacts:", "artifacts:../../etc/passwd")
"""They end as failed, and stop no other."""


def add(scale: int, settings: Settings) -> Sample:
    """Register uploads, one of them without an object."""
    total, location = 200 * scale, JobArtifact.location
    names = [f"uploads/{secrets.token_hex(4)}:{n}" for n in range(total)]
    stale, fresh = names[: total // 2], names[total // 2 :]
    yesterday = client.time()[0] - timedelta(days=1).total_seconds()
    if stale:
        client.zadd(register.PENDING, {f"{location}:{name}": yesterday for name in stale})
    for name in fresh:
        register.prepare(client, location, name)
    client.zadd(register.PENDING, dict.fromkeys(MALFORMED, 0))
    store = stores.at(location, settings)
    if store is not None:
        store.put(names[1:])
    odd = len(MALFORMED)
    return Sample("direct uploads", total + odd, len(stale) + odd)


def count(_settings: Settings) -> Sample:
    due = int(client.zcount(register.PENDING, "-inf", int(client.time()[0]) - 3 * 3600))
    objects = max(0, due - len(MALFORMED) - 1)
    return Sample("direct uploads", register.count(client), due, objects)


def figures(before: Sample, _results: Results) -> Iterator[Figure]:
    yield processed("stale_direct_uploads", "stale_upload", before.due - len(MALFORMED))
    yield Figure("exporter", "quarantine_records", {"record": "failed_upload"}, len(MALFORMED))


SAMPLE_DATA = SampleData(add, count, figures)
