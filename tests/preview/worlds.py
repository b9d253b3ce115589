"""Worlds whose records are rows, and all worlds there are."""

from typing import ClassVar

from forgekeeper.api.batches import FeatureFlag
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import client
from forgekeeper.sources.settled import SettledUpload
from models import BulkImport, BulkImportEntity, BulkImportTracker, GitRefDeletion, JobArtifact, UserStatus
from tests.harness.artifacts import buckets
from tests.harness.performing import perform
from tests.preview.outside import Objects, Refs, Uploads, UploadsInHash
from tests.preview.world import DAY, HOUR, MICROSECOND, NOON, World
from workers import expired_job_artifacts

BUCKETS = 5


class Statuses(World):
    batch = "user_status_cleanup"
    tables = ("user_statuses",)
    ways: ClassVar = {"long ago": True, "now": True, "a microsecond later": False, "later": False, "never": False}
    locking = "select 1 from user_statuses where user_id = any(%(keys)s) for update"
    shifts: ClassVar = {"long ago": -DAY, "now": 0 * DAY, "a microsecond later": MICROSECOND, "later": DAY}

    def put(self, key, way):
        shift = self.shifts.get(way)
        UserStatus.create(user_id=key, clear_status_at=None if shift is None else NOON + shift)

    def present(self):
        return self.ids("select user_id from user_statuses")


class Artifacts(World):
    batch = "expired_job_artifacts"
    tables = ("ci_job_artifacts", "deleted_objects", "project_statistics")
    ways: ClassVar = {
        "long ago": True,
        "a microsecond ago": True,
        "now": False,
        "later": False,
        "never": False,
        "locked": False,
        "unknown": False,
        "trace": False,
        "no path": False,
        "no object": True,
    }
    locking = "select 1 from ci_job_artifacts where id = any(%(keys)s) for update"
    excluding: ClassVar = {
        "project:1": lambda key: key % 3 == 0,
        "pattern:ab/1*": lambda key: str(key).startswith("1"),
        # In SQL these two would stand for anything, and any character.
        "pattern:ab/1%": lambda _key: False,
        "pattern:ab_?": lambda _key: False,
        "pattern:AB/*": lambda _key: False,
    }
    shifts: ClassVar = {"a microsecond ago": -MICROSECOND, "now": 0 * DAY, "later": DAY, "never": None}

    def empty(self):
        super().empty()
        FeatureFlag.turn(expired_job_artifacts.FLAG, on=True)
        buckets.tidy(client, BUCKETS)

    def put(self, key, way):
        shift = self.shifts.get(way, -DAY)
        JobArtifact.create(
            id=key,
            project_id=1 + key % 3,
            job_id=key,
            file_type=3 if way == "trace" else 1,
            file=None if way == "no object" else "x.zip",
            file_final_path="" if way.startswith("no ") else f"ab/{key}",
            size=None if key % 5 == 0 else key,
            expire_at=None if shift is None else NOON + shift,
            locked={"locked": 1, "unknown": 2}.get(way, 0),
        )

    def present(self):
        return self.ids("select id from ci_job_artifacts")

    def run(self):
        for _ in range(BUCKETS):
            perform(expired_job_artifacts.delete_artifact_bucket, settings=self.settings, now=self.at)


class Imports(World):
    """Odd keys are imports, even ones entities with two trackers each, one of them unfinished."""

    batch = "stale_imports"
    tables = ("bulk_import_trackers", "bulk_import_entities", "bulk_imports")
    ways: ClassVar = {
        "long ago": True,
        "with failures": True,
        "a microsecond before": True,
        "a day ago": False,
        "fresh": False,
        "finished": False,
    }
    locking = (
        "select 1 from bulk_imports where id = any(%(keys)s) for update;"
        "select 1 from bulk_import_entities where id = any(%(keys)s) for update"
    )
    excluding: ClassVar = {"pattern:a/*": lambda key: key % 2 == 0}
    shifts: ClassVar = {"a microsecond before": -DAY - MICROSECOND, "a day ago": -DAY, "fresh": -HOUR}

    def put(self, key, way):
        touched, status = NOON + self.shifts.get(way, -3 * DAY), 2 if way == "finished" else key % 3 % 2
        facts = {"id": key, "status": status, "updated_at": touched, "has_failures": way == "with failures"}
        if key % 2:
            BulkImport.create(user_id=1, **facts)
            return
        places = {"source_full_path": "a/b", "destination_name": "b", "destination_namespace": "a"}
        BulkImportEntity.create(bulk_import_id=1, **places, **facts)
        for number, tracker in ((2 * key, (0, 1, 3)[key % 3]), (2 * key + 1, 2)):
            BulkImportTracker.create(
                id=number, bulk_import_entity_id=key, relation="r", status=tracker, updated_at=NOON
            )

    def present(self):
        either = "select id, status from bulk_imports union all select id, status from bulk_import_entities"
        return self.ids(f"select id from ({either}) as records where status <> 3")


class Old(World):
    """By their rest modulo 3 keys are ref deletions, runs and uploads."""

    batch = "prune"
    tables = ("batched_git_ref_updates_deletions", "job_runs", "settled_uploads")
    ways: ClassVar = {"long ago": True, "just old": True, "just not old": False, "young": False, "open": False}
    locking = (
        "select 1 from batched_git_ref_updates_deletions where id = any(%(keys)s) for update;"
        "select 1 from job_runs where id = any(%(keys)s) for update;"
        "select 1 from settled_uploads where path = any(%(keys)s::text[]) for update"
    )
    keeps = (DAY, 30 * DAY, 30 * DAY)
    newest = 1_000_000

    def empty(self):
        super().empty()
        JobRun.create(id=self.newest, batch="old", state="started")

    def put(self, key, way):
        exact = self.keeps[key % 3]
        shifts = {"long ago": -DAY, "just old": -MICROSECOND, "just not old": 0 * DAY, "young": exact / 2}
        since = NOON - exact + shifts.get(way, 100 * DAY)
        if key % 3 == 0:
            status = 1 if way == "open" else 2
            GitRefDeletion.create(id=key, project_id=1, ref="a", status=status, processed_at=since)
        elif key % 3 == 1:
            JobRun.create(id=key, batch="old", state="succeeded", finished_at=since)
        else:
            SettledUpload.create(location="artifacts", path=str(key), reaped=True, settled_at=since)

    def key(self, _part, number, name):
        return int(name if name and name.isdigit() else number)

    def present(self):
        rows = " union all ".join(
            f"select {key}::bigint from {table}" for table, key in zip(self.tables, ("id", "id", "path"), strict=True)
        )
        return self.ids(rows) - {self.newest}


WORLDS = (Statuses, Refs, Artifacts, Objects, Uploads, UploadsInHash, Imports, Old)
