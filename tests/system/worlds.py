"""What the batches work on, as sample data that a killed run and an undisturbed one can be compared over."""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from demo import sample_data as sample
from demo.sample_data import create_repository
from forgekeeper.api.batches import FeatureFlag
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import now
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.targets import sentinel
from models import GitRefDeletion
from tests.harness.audited import list_audited_deletions
from tests.harness.installation import INSTALLATION
from tests.harness.stale_uploads import uploads
from tests.harness.tables import empty

LIMIT = 60.0
DEAD_AFTER = "3"
EVERY_SECOND = "* * * * * *"
ONCE_A_YEAR = "0 0 1 1 *"
STATE = (
    "user_id from user_statuses",
    "id, status from bulk_imports",
    "id, status from bulk_import_entities",
    "id, status from bulk_import_trackers",
    "id, file_final_path from ci_job_artifacts",
    "* from project_statistics",
    "store_dir, file, project_id, file_store, attempts from deleted_objects",
    "id, project_id, ref, status, reason from batched_git_ref_updates_deletions",
)


@dataclass
class World:
    """What the batches work on: the tables, Redis, a store and repositories."""

    database: Any
    root: Any
    repositories: Any

    @classmethod
    def make(cls, database, folder):
        world = cls(database, folder / "objects", folder / "repositories")
        for root in (world.root, world.repositories):
            root.mkdir()
        sentinel.Store("artifacts", f"file://{world.root}").create_sentinel(INSTALLATION)
        sentinel.Folder(world.repositories).create_sentinel(INSTALLATION)
        return world

    @property
    def environment(self):
        """Settings of processes that work on it, without much patience."""
        return {
            "object_stores": json.dumps({"artifacts": f"file://{self.root}"}),
            "repositories_root": str(self.repositories),
            "dead_after": DEAD_AFTER,
            "poll_interval": "0.5",
            "object_grace": "0",
            "bucket_silent_after": "2",
            "log_format": "json",
        }

    def ask(self, sql):
        return self.database.execute_sql(sql).fetchall()

    def count(self, sql):
        return self.ask(f"select count(*) from {sql}")[0][0]

    def files(self):
        """List the objects; a folder may vanish while it is looked at."""
        found = {Path(folder, name) for folder, _, names in os.walk(self.root) for name in names}
        return {str(path.relative_to(self.root)) for path in found} - {sentinel.SENTINEL_NAME}

    def refs(self, disk_path):
        """List a repository's refs as its files have them; a file or a folder may vanish meanwhile."""
        repository, packed = self.repositories / disk_path, ""
        with suppress(FileNotFoundError):
            packed = (repository / "packed-refs").read_text()
        return packed, {(folder, name) for folder, _, names in os.walk(repository / "refs") for name in names}

    def state(self):
        """Return everything that a batch may change."""
        keys = (uploads.keys.pending, uploads.keys.deleting, uploads.keys.failed)
        register = [set(client.zrange(key, 0, -1)) for key in keys]
        refs = [self.refs(disk_path) for (disk_path,) in self.ask("select disk_path from projects order by 1")]
        rows = [sorted(self.ask(f"select {what}")) for what in STATE]
        return (
            rows,
            register,
            client.hgetall(uploads.keys.attempts),
            client.hgetall(uploads.keys.claims),
            self.files(),
            refs,
        )

    def put(self, *paths):
        for path in paths:
            file = self.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"")

    def empty(self):
        empty()
        client.flushdb()
        for path in self.files():
            (self.root / path).unlink()
        for repository in self.repositories.glob("*/"):
            shutil.rmtree(repository)


def take_away(root):
    """Let a store or all repositories vanish, as a disk that is not mounted any more."""
    root.rename(root.with_suffix(".away"))


def bring_back(root):
    """Mount it again, as an operator does after an alert for stale locks."""
    away = root.with_suffix(".away")
    # A git that loses its disk in the middle of a transaction cannot reach the locks that it holds there.
    for lock in (*away.rglob("*.lock"), *away.rglob("packed-refs.new")):
        lock.unlink()
    # It has made folders where it wanted more of them; a disk that is mounted again covers those.
    shutil.rmtree(root, ignore_errors=True)
    away.rename(root)


class Case:
    """A batch: its sample data, what is left to do, and how things stand."""

    cron = ONCE_A_YEAR
    """Rare: it is the killed run itself that must be taken up, not a later tick's."""
    record = None
    """Whose lines the audit has, if the batch deletes what has such."""
    key = "id"

    def __init__(self, world):
        self.world = world

    def state(self):
        """Say how things stand."""
        return self.world.state()

    def standing(self):
        """Say how things stand, and of what the audit says that it is gone."""
        return self.state(), list_audited_deletions(self.record, self.key)

    def claims_run_out(self):
        """Let the time pass for which what a dead run claimed is nobody else's."""


class UserStatusCleanup(Case):
    total = 1_000
    record = "user_status"

    def seed(self):
        sample.add_statuses(2_500)

    def left(self):
        return self.world.count("user_statuses where clear_status_at <= now()")


class StaleImports(Case):
    total = 600

    def seed(self):
        sample.add_imports(1_000)

    def left(self):
        stale = "where status in (0, 1) and updated_at < now() - interval '1 day'"
        return self.world.count(f"bulk_imports {stale}") + self.world.count(f"bulk_import_entities {stale}")


class StaleDirectUploads(Case):
    total = 1_200
    record, key = "stale_upload", "path"

    def seed(self):
        stale = [f"stale/{number:04}" for number in range(self.total)]
        fresh = [f"fresh/{number:04}" for number in range(100)]
        self.world.put(*stale, *fresh)
        now = client.time()[0]
        client.zadd(uploads.keys.pending, {f"artifacts:{path}": now - 4 * 3600 for path in stale})
        client.zadd(uploads.keys.pending, {f"artifacts:{path}": now - 60 for path in fresh})

    def left(self):
        return sum(path.startswith("stale/") for path in self.world.files())

    def claims_run_out(self):
        for member in client.zrange(uploads.keys.deleting, 0, -1):
            client.zadd(uploads.keys.deleting, {member: 0})


class DeleteObjects(Case):
    total = 1_200
    record, key = "deleted_object", "path"

    def seed(self):
        gone = [f"gone/{number:04}" for number in range(self.total)]
        self.world.put(*gone, *(f"kept/{number:04}" for number in range(100)))
        DeletedObject.insert_many(
            [{"store_dir": "gone", "file": path.removeprefix("gone/")} for path in gone]
        ).execute()

    def left(self):
        return sum(path.startswith("gone/") for path in self.world.files())

    def claims_run_out(self):
        DeletedObject.update(pick_up_at=DeletedObject.pick_up_at - timedelta(minutes=10)).execute()


class ExpiredJobArtifacts(Case):
    total = 1_200
    record = "expired_artifact"
    cron = EVERY_SECOND
    """The run itself ends at once, its children's buckets are taken from them by a later one."""

    def seed(self):
        FeatureFlag.turn("bulk_delete_job_artifacts", on=True)
        sample.add_artifacts(2_000)

    def left(self):
        return self.world.count("ci_job_artifacts where expire_at < now() and locked = 0 and file_type <> 3")


class GitRefCleanup(Case):
    projects, doomed = 8, 30
    total = projects * doomed
    record = "git_ref_deletion"
    cron = EVERY_SECOND

    def seed(self):
        refs = [f"refs/merge-requests/{number}/head" for number in range(self.doomed + 5)]
        projects = sample.add_projects(self.projects)
        for disk_path in projects.values():
            create_repository(self.world.repositories, disk_path, refs)
        sample.add_ref_deletions(list(projects), refs[: self.doomed])

    def left(self):
        return GitRefDeletion.select_pending().count()


class Prune(Case):
    """Of each kind of record more than one chunk is old, and some are young."""

    each = 1_200
    total = 2 * each

    def seed(self):
        ends = [now() - timedelta(days=40)] * self.each + [now() - timedelta(hours=1)] * 10
        refs = [{"project_id": 1, "ref": f"refs/x/{n}", "status": 2, "processed_at": at} for n, at in enumerate(ends)]
        GitRefDeletion.insert_many(refs).execute()
        runs = [{"batch": "stale_imports", "state": "succeeded", "finished_at": at} for at in ends]
        JobRun.insert_many(runs).execute()

    def left(self):
        refs = self.world.count("batched_git_ref_updates_deletions where processed_at < now() - interval '1 day'")
        runs = self.world.count("job_runs where batch = 'stale_imports' and finished_at < now() - interval '30 days'")
        return refs + runs

    def state(self):
        runs = self.world.ask("select id from job_runs where batch = 'stale_imports'")
        return super().state(), sorted(runs)


CASES = {
    "user_status_cleanup": UserStatusCleanup,
    "stale_imports": StaleImports,
    "stale_direct_uploads": StaleDirectUploads,
    "delete_objects": DeleteObjects,
    "expired_job_artifacts": ExpiredJobArtifacts,
    "git_ref_cleanup": GitRefCleanup,
    "prune": Prune,
}
PATIENT = {"dead_after": "30"}
"""For where nobody dies: a busy machine must not be taken for a dead worker."""
