"""The outbox of objects in S3: the batch in one process and through a worker, compared with bare clients."""

from __future__ import annotations

from benchmarks.contest import Benchmark
from benchmarks.moto_server import path
from benchmarks.stores import World
from demo.servers import Servers
from forgekeeper.platform.database import database
from forgekeeper.sources.outbox import DeletedObject, split_path

OBJECTS = 20_000
ADD = """
    insert into deleted_objects (project_id, store_dir, file, pick_up_at)
    select 1, folder, file, now() - interval '1 minute'
    from unnest(%(folders)s::text[], %(files)s::text[]) as object (folder, file)
"""


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times 20,000 objects whose artifacts are deleted."""
    outbox = Outbox(servers, "outbox", "delete_objects", max(1, round(OBJECTS * scale)))
    return [
        Benchmark("objects", "objects/s", outbox.run, outbox.peers()),
        Benchmark("objects_worker", "objects/s", outbox.worker, outbox.peers()[:2]),
    ]


class Outbox(World):
    """Objects in the outbox."""

    def fill(self) -> None:
        """Insert the objects into the outbox."""
        folders, files = zip(*(split_path(path(number)) for number in range(self.delete)), strict=True)
        database.execute_sql(ADD, {"folders": list(folders), "files": list(files)})

    def check(self) -> None:
        """Raise unless the outbox is empty."""
        left = DeletedObject.select().count()
        assert not left, f"{left} are left in the outbox"

    def check_result(self, result: dict[str, object]) -> None:
        """Raise unless a run has deleted all."""
        nothing = dict.fromkeys(("missing", "failed", "remaining", "kept"), 0)
        wanted = {"deleted": self.delete, "stopped": "drained", **nothing}
        assert result == wanted, f"{result} is not {wanted}"
