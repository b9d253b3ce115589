"""Worlds whose records are objects of a store."""

import shutil
from typing import ClassVar

from forgekeeper.connections import client
from forgekeeper.storage import sentinel, stores
from tests.harness.installation import INSTALLATION
from tests.preview.world import DAY, MINUTE, World
from workers.stale_direct_uploads import register


class Stored(World):
    """A world with a folder of objects, whose names are those of the records."""

    at = None

    def options(self):
        self.store = self.folder / "store"
        self.store.mkdir()
        stores._opened.clear()
        sentinel.Store("artifacts", f"file://{self.store}").create_sentinel(INSTALLATION)
        return {
            "object_stores": {"artifacts": f"file://{self.store}"},
            "object_prefixes": {"artifacts": ("objects", "elsewhere")},
        }

    def folders(self):
        return [self.store]

    def empty(self):
        super().empty()
        shutil.rmtree(self.store / "objects", ignore_errors=True)

    def path(self, key):
        return f"objects/{key}"

    def present(self):
        return {int(file.name) for file in self.store.glob("objects/*") if "#" not in file.name}

    def upload(self, key):
        file = self.store / self.path(key)
        file.parent.mkdir(exist_ok=True)
        file.touch()

    def name(self, other, key, way):
        """Let a live artifact name the object, or none."""
        other.execute("delete from ci_job_artifacts where file_final_path = %s", (self.path(key),))
        if way == "named":
            values = "(project_id, job_id, file_type, file_final_path) values (1, 1, 1, %s)"
            other.execute(f"insert into ci_job_artifacts {values}", (self.path(key),))


class Objects(Stored):
    batch = "delete_objects"
    tables = ("ci_deleted_objects", "ci_job_artifacts")
    ways: ClassVar = {"long ago": True, "a minute ago": True, "in a minute": False, "given up": False, "named": False}
    locking = "select 1 from ci_deleted_objects where id = any(%(keys)s) for update"
    instants: ClassVar = {"a minute ago": -MINUTE, "in a minute": MINUTE}

    def put(self, other, key, way):
        self.upload(key)
        self.name(other, key, way)
        other.execute(
            "insert into ci_deleted_objects (id, project_id, store_dir, file, pick_up_at, attempts)"
            " values (%s, %s, 'objects', %s, clock_timestamp() + %s, %s) on conflict (id) do update set"
            " pick_up_at = excluded.pick_up_at, attempts = excluded.attempts",
            (key, key % 3, str(key), self.instants.get(way, -DAY), 10 if way == "given up" else 0),
        )


class Uploads(Stored):
    batch = "stale_direct_uploads"
    tables = ("ci_job_artifacts", "ci_deleted_objects", "settled_uploads")
    ways: ClassVar = {
        "stale": True,
        "due again": True,
        "ahead": True,
        "just stale": True,
        "fresh": False,
        "nearly stale": False,
        "being deleted": False,
        "given up": False,
        "named": False,
        "completed": False,
        "outside": False,
    }
    locking = (
        "select pg_advisory_xact_lock(hashtextextended('artifacts:objects/' || key, 1801807216))"
        " from unnest(%(keys)s::int[]) as key"
    )
    stale = register.MAX_UPLOAD_DURATION.total_seconds()
    places: ClassVar = {
        "due again": (register.DELETING, -60),
        "ahead": (register.DELETING, 2 * 86_400),
        "being deleted": (register.DELETING, 300),
        "given up": (register.FAILED, 0),
        "fresh": (register.PENDING, -60),
        "nearly stale": (register.PENDING, 60 - stale),
        "just stale": (register.PENDING, -60 - stale),
    }
    sets = (register.PENDING, register.DELETING, register.FAILED, register.ADOPTED)

    def empty(self):
        super().empty()
        client.delete(*self.sets, register.ATTEMPTS, register.CLAIMS)

    def put(self, other, key, way):
        self.upload(key)
        self.remove(other, key)
        self.name(other, key, way)
        if way == "completed":
            other.execute("insert into settled_uploads values ('artifacts', %s, false)", (self.path(key),))
        place, shift = self.places.get(way, (register.PENDING, -60 - self.stale))
        path = f"forbidden/{key}" if way == "outside" else self.path(key)
        client.zadd(place, {f"artifacts:{path}": client.time()[0] + round(shift)})

    def remove(self, other, key):
        other.execute("delete from settled_uploads where path = %s", (self.path(key),))
        for one in self.sets:
            client.zrem(one, f"artifacts:{self.path(key)}", f"artifacts:forbidden/{key}")

    def key(self, _part, _number, name):
        return int(name.rpartition("/")[2])
