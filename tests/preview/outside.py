"""Worlds whose records lie outside the database: refs, objects, uploads."""

import shutil
from typing import ClassVar

from forgekeeper.platform.connections import client
from forgekeeper.platform.database import now
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.settled import SettledUpload
from forgekeeper.targets import sentinel, stores
from models import GitRefDeletion, JobArtifact, Project
from tests.harness.git_samples import BareRepository, put_root
from tests.harness.installation import INSTALLATION
from tests.harness.performing import perform
from tests.harness.stale_uploads import uploads as register
from tests.preview.world import DAY, MINUTE, World
from workers.git_ref_cleanup import clean_project_refs
from workers.stale_direct_uploads import MAX_UPLOAD_DURATION


class Refs(World):
    batch = "git_ref_cleanup"
    tables = ("batched_git_ref_updates_deletions", "projects")
    ways: ClassVar = {
        "there": True,
        "as expected": True,
        "gone already": False,
        "moved": False,
        "its lock held": False,
        "closed": False,
        "default branch": False,
        "no name": False,
        "another in its way": False,
    }
    excluding: ClassVar = {"project:1": lambda key: key % 2 == 0, "pattern:refs/mr/?": lambda key: key < 10}
    at = None
    projects = (1, 2)
    stray = 1_000

    def options(self):
        self.root = put_root(self.folder / "repositories")
        self.repositories = {number: BareRepository(self.root, f"{number}.git") for number in self.projects}
        return {"repositories_root": self.root}

    def folders(self):
        return [self.root]

    def empty(self):
        super().empty()
        for number, repository in self.repositories.items():
            shutil.rmtree(repository.path / "refs" / "mr", ignore_errors=True)
            # All the time, so that nobody has to write what git may read.
            strays = [f"refs/stray/{key}" for key in range(1, 41)]
            repository.packed(*(f"{ref}/head" for ref in strays))
            repository.loose(*strays)
            Project.create(id=number, disk_path=repository.disk_path)

    def put(self, key, way):
        names = {
            "default branch": "refs/heads/main",
            "no name": "HEAD",
            "another in its way": f"refs/stray/{key}/head",
        }
        project = self.projects[key % len(self.projects)]
        repository, ref = self.repositories[project], f"refs/mr/{key}"
        if way != "gone already":
            repository.loose(ref)
        if way == "its lock held":
            (repository.path / f"{ref}.lock").touch()
        GitRefDeletion.create(
            id=key,
            project_id=project,
            ref=names.get(way, ref),
            expected_oid={"as expected": repository.one, "moved": "1" * 40}.get(way),
            status=2 if way == "closed" else 1,
        )

    def key(self, part, number, _name):
        return int(number) if part.record == "git_ref_deletion" else None

    def present(self):
        refs = {ref for repository in self.repositories.values() for ref in repository.refs()}
        strays = {self.stray + int(ref.split("/")[2]) for ref in refs if ref.startswith("refs/stray/")}
        mine = {int(ref.rpartition("/")[2]) for ref in refs if ref.startswith("refs/mr/") and "." not in ref}
        return mine | strays

    def run(self):
        for project in self.projects:
            perform(clean_project_refs, project, settings=self.settings)


class Stored(World):
    """A world with a folder of objects, whose names are those of the records."""

    at = None

    def options(self):
        self.store = self.folder / "store"
        self.store.mkdir()
        stores.open_object_store.cache_clear()
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

    def present(self):
        return {int(file.name) for file in self.store.glob("objects/*") if "#" not in file.name}

    def put(self, key, way):
        """Make the object; let a live artifact name it, or none."""
        file = self.store / "objects" / str(key)
        file.parent.mkdir(exist_ok=True)
        file.touch()
        if way == "named":
            JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path=f"objects/{key}")


class Objects(Stored):
    batch = "delete_objects"
    tables = ("deleted_objects", "ci_job_artifacts")
    ways: ClassVar = {"long ago": True, "a minute ago": True, "in a minute": False, "given up": False, "named": False}
    locking = "select 1 from deleted_objects where id = any(%(keys)s) for update"
    excluding: ClassVar = {"project:1": lambda key: key % 3 == 1, "pattern:objects/?": lambda key: key < 10}
    instants: ClassVar = {"a minute ago": -MINUTE, "in a minute": MINUTE}

    def put(self, key, way):
        super().put(key, way)
        DeletedObject.create(
            id=key,
            project_id=key % 3,
            store_dir="objects",
            file=str(key),
            pick_up_at=now() + self.instants.get(way, -DAY),
            attempts=10 if way == "given up" else 0,
        )


class Uploads(Stored):
    batch = "stale_direct_uploads"
    tables = ("ci_job_artifacts", "deleted_objects", "settled_uploads")
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
        "adopted, and written since": False,
    }
    locking = (
        "select pg_advisory_xact_lock(hashtextextended('artifacts:objects/' || key, 1801807216))"
        " from unnest(%(keys)s::int[]) as key"
    )
    excluding: ClassVar = {"pattern:artifacts:objects/?": lambda key: key < 10}
    stale = MAX_UPLOAD_DURATION.total_seconds()
    places: ClassVar = {
        "due again": (register.keys.deleting, -60),
        "ahead": (register.keys.deleting, 2 * 86_400),
        "being deleted": (register.keys.deleting, 300),
        "given up": (register.keys.failed, 0),
        "fresh": (register.keys.pending, -60),
        "nearly stale": (register.keys.pending, 60 - stale),
        "just stale": (register.keys.pending, -60 - stale),
    }

    def empty(self):
        super().empty()
        client.delete(register.keys.hash, register.keys.cursor)
        sets = (register.keys.pending, register.keys.deleting, register.keys.failed, register.keys.adopted)
        client.delete(*sets, register.keys.attempts, register.keys.claims)

    def put(self, key, way):
        super().put(key, way)
        if way == "completed":
            SettledUpload.record_completed("artifacts", f"objects/{key}")
        place, shift = self.places.get(way, (register.keys.pending, -60 - self.stale))
        path = f"forbidden/{key}" if way == "outside" else f"objects/{key}"
        client.zadd(place, {f"artifacts:{path}": client.time()[0] + round(shift)})
        if way.startswith("adopted"):
            client.zadd(register.keys.adopted, {f"artifacts:{path}": client.time()[0] - 2 * 86_400})

    def key(self, _part, _number, name):
        return int(name.rpartition("/")[2])


class UploadsInHash(Uploads):
    """The forge registers them in a hash of its own."""

    ways: ClassVar = {
        "stale": True,
        "just stale": True,
        "moved": True,
        "fresh": False,
        "nearly stale": False,
        "named": False,
        "outside": False,
        "no time": False,
        "prepared again": False,
    }

    def options(self):
        return super().options() | {"uploads_register": "hash"}

    def empty(self):
        super().empty()
        client.settings = self.settings

    def put(self, key, way):
        if way == "moved":
            super().put(key, "stale")
            return
        Stored.put(self, key, way)
        place = "forbidden" if way == "outside" else "objects"
        _, shift = self.places.get(way, (None, 0 if way == "prepared again" else -60 - self.stale))
        time = "x" if way == "no time" else client.time()[0] + round(shift)
        client.hset(register.keys.hash, f"artifacts:{place}/{key}", time)
        if way == "prepared again":
            client.zadd(register.keys.deleting, {f"artifacts:{place}/{key}": 1})
