"""Register uploads, run the batch that deletes stale uploads, and read the register."""

from datetime import timedelta

import pytest

from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.sources.register.redis_register import ADOPTION_DELAY, RedisRegister
from forgekeeper.targets.outcomes import StoreUnavailable
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from workers.stale_direct_uploads import (
    MAX_UPLOAD_DURATION,
    UPLOADS_REGISTER,
    StaleUploadsResult,
    producer,
    stale_direct_uploads,
)

uploads = RedisRegister(UPLOADS_REGISTER)
STALE = MAX_UPLOAD_DURATION.total_seconds() + 60
SECOND = timedelta(seconds=1)
BATCH = stale_direct_uploads
HERE, ELSEWHERE = "artifacts", "lfs"
CLOSED_PORT = "http://127.0.0.1:1"


def run(deadline=None, *, prefixes=None, outcome=None, **locations):
    settings = settings_with(object_stores=locations, object_prefixes=prefixes or {})
    return perform(BATCH, deadline=deadline, settings=settings, outcome=outcome)


def run_until_unavailable(deadline=None, **locations):
    """Run until it fails because stores do not answer; return the outcome and the message."""
    outcome = StaleUploadsResult()
    with pytest.raises(StoreUnavailable) as failure:
        run(deadline, outcome=outcome, **locations)
    return outcome, str(failure.value)


def now():
    return client.time()[0]


def register(*paths, location=HERE, age=STALE):
    register_members(*(f"{location}:{path}" for path in paths), age=age)


def register_members(*members, age=STALE):
    client.zadd(uploads.keys.pending, dict.fromkeys(members, now() - age))


def begin(store, *paths, location=HERE, age=STALE):
    """Begin uploads: store the objects, and register their entries."""
    store.put(*paths)
    register(*paths, location=location, age=age)


def time_passes(duration):
    """Let *duration* pass for the claimed entries."""
    for member, score in client.zrange(uploads.keys.deleting, 0, -1, withscores=True):
        client.zadd(uploads.keys.deleting, {member: score - duration.total_seconds()})


def members(key):
    return {member.decode(errors="surrogateescape") for member in client.zrange(key, 0, -1)}


def registered():
    """Return all entries: pending, claimed and failed."""
    return members(uploads.keys.pending) | members(uploads.keys.deleting) | members(uploads.keys.failed)


def attempts():
    return {member.decode(): int(number) for member, number in client.hgetall(uploads.keys.attempts).items()}


def unreachable_url(store):
    """Return the URL of the store with an address at which no server listens."""
    proxy = getattr(store, "proxy", None)
    return store.url.replace(proxy.url, CLOSED_PORT) if proxy else f"{store.url}/not/there"


def number_paths(count):
    return [f"@final/{number:05}" for number in range(count)]


def complete(location, path):
    with database.atomic():
        return producer.complete(client, location, path)


def adopt(*paths, ago=ADOPTION_DELAY + 5 * SECOND):
    """Register objects as `uploads reconcile` does, with a registration *ago* before now."""
    uploads.adopt(client, HERE, paths)
    for key in (uploads.keys.pending, uploads.keys.adopted):
        for path in paths:
            client.zincrby(key, -ago.total_seconds(), f"{HERE}:{path}")
