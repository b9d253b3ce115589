"""What has to be true of the world before a batch may delete anything in it."""

from __future__ import annotations

from forgekeeper.batches import BatchSpec
from forgekeeper.database.schema import misread
from forgekeeper.installation import agreement
from forgekeeper.runs import clocks
from forgekeeper.runs.blocked import Blocked
from forgekeeper.settings import Settings


def require(batch: BatchSpec, settings: Settings, *, claims: bool = True) -> None:
    """Raise `Blocked` where *batch*, or a child of it, must not work; asked once, before it begins.

    A run claims a Redis that is nobody's; a preview does not, and raises `redis.RedisError` where Redis is away.
    """
    clocks.require(settings)
    try:
        agreement.require(batch.deletes_from, settings, claims=claims)
    except agreement.Disagreement as disagreement:
        raise Blocked("installation", str(disagreement)) from None
    for sentence in (*misread(batch.tables), *batch.misreadings()):
        raise Blocked("schema", sentence)
