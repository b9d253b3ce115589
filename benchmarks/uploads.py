"""Stale direct uploads in S3: the batch in one process and through a worker, compared with bare clients."""

from __future__ import annotations

from time import time

from benchmarks.contest import Benchmark, Peer
from benchmarks.moto_server import path
from benchmarks.stores import World
from demo.servers import Servers
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.register.keys import RegisterKeys
from workers.stale_direct_uploads import ENTRIES_PER_CHUNK, UPLOADS_REGISTER

UPLOAD_KEYS = RegisterKeys.for_register(UPLOADS_REGISTER.name)
STALE = 20_000
REGISTERED = 200_000
OLD = 4 * 3600
"""Seconds since a stale upload began."""


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times 20,000 stale uploads among 200,000 registered."""
    stale, registered = max(1, round(STALE * scale)), round(REGISTERED * scale)
    many, few = (Uploads(servers, max(1, stale // 2), most) for most in (registered, round(registered / 10)))
    uploads = Uploads(servers, stale, registered)
    return [
        Benchmark("uploads", "uploads/s", uploads.run, uploads.peers()),
        Benchmark("uploads_worker", "uploads/s", uploads.worker, uploads.peers()[:2]),
        Benchmark(
            "uploads_fresh",
            "ms an upload",
            lambda: 1e3 / many.run(),
            (Peer("a tenth registered", lambda: 1e3 / few.run(), 1.2),),
            less=True,
        ),
    ]


class Uploads(World):
    """*stale* uploads among *registered* uploads that are still in progress."""

    def __init__(self, servers: Servers, stale: int, registered: int) -> None:
        super().__init__(servers, "uploads", "stale_direct_uploads", stale)
        self._fresh = registered - stale

    def fill(self) -> None:
        """Register the uploads."""
        now = time()
        ages = [(f"{DeletedObject.location}:{path(n)}", int(now) - OLD - n % 1000) for n in range(self.delete)]
        ages += [(f"{DeletedObject.location}:new/{path(n)}", int(now) - n % 3600) for n in range(self._fresh)]
        for start in range(0, len(ages), ENTRIES_PER_CHUNK):
            client.zadd(UPLOAD_KEYS.pending, dict(ages[start : start + ENTRIES_PER_CHUNK]))

    def check(self) -> None:
        """Raise unless fresh uploads are registered and the others are recorded as settled."""
        (reaped,) = database.execute_sql("select count(*) from settled_uploads where reaped").fetchone()
        left = client.zcard(UPLOAD_KEYS.pending), client.zcard(UPLOAD_KEYS.deleting), reaped
        assert left == (self._fresh, 0, self.delete), f"{left} are pending, being deleted, and reaped"

    def check_result(self, result: dict[str, object]) -> None:
        """Raise unless a run has deleted all."""
        wanted = {"total_pending_entries": self._fresh + self.delete, "total_deleted_stale_entries": self.delete}
        wanted |= {"execution_timeout": False, "failed_entries": 0}
        assert result == wanted, f"{result} is not {wanted}"
