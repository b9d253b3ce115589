"""A batch that is killed in the middle, and then taken up by a scheduler and a worker, ends as if nothing had been."""

import json
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import pytest

from coordination import uploads
from embedded.waiting import wait_until
from models import DeletedObject, FeatureFlag, JobRun, sample
from storage import sentinel
from workers.clients import client

LIMIT = 60.0
DEAD_AFTER = "1"
EVERY_SECOND = "* * * * * *"
ONCE_A_YEAR = "0 0 1 1 *"
BATCHES = ("user_status_cleanup", "stale_imports", "stale_direct_uploads", "delete_objects", "expired_job_artifacts")
TABLES = (
    "user_statuses",
    "bulk_imports",
    "bulk_import_entities",
    "bulk_import_trackers",
    "ci_job_artifacts",
    "project_statistics",
    "ci_deleted_objects",
    "feature_flags",
    "job_runs",
    "batches",
)


@dataclass
class World:
    """What the batches work on: the tables, Redis and a store."""

    database: Any
    root: Any

    def ask(self, sql):
        return self.database.execute_sql(sql).fetchall()

    def count(self, sql):
        return self.ask(f"select count(*) from {sql}")[0][0]

    def files(self):
        found = set()
        # A folder may vanish while it is looked at.
        with suppress(FileNotFoundError):
            found = {str(file.relative_to(self.root)) for file in self.root.rglob("*") if file.is_file()}
        return found - {sentinel.NAME}

    def put(self, *paths):
        for path in paths:
            file = self.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"")

    def empty(self):
        self.database.execute_sql(f"truncate {', '.join(TABLES)} restart identity")
        client.flushdb()
        for path in self.files():
            (self.root / path).unlink()


class Case:
    """A batch: its sample data, what is left to do, and how things stand."""

    cron = ONCE_A_YEAR
    """Rare: it is the killed run itself that must be taken up, not a later tick's."""

    def __init__(self, world):
        self.world = world

    def claims_run_out(self):
        """Let the time pass for which what a dead run claimed is nobody else's."""


class UserStatusCleanup(Case):
    total = 1_000
    pace: ClassVar = {"pace_user_status_cleanup": "200"}

    def seed(self):
        sample.user_statuses(2_500)

    def left(self):
        return self.world.count("user_statuses where clear_status_at <= now()")

    def state(self):
        return self.world.ask("select user_id from user_statuses order by user_id")


class StaleImports(Case):
    total = 600
    pace: ClassVar = {"pace_stale_imports": "200"}

    def seed(self):
        sample.imports(1_000)

    def left(self):
        stale = "where status in (0, 1) and updated_at < now() - interval '1 day'"
        return self.world.count(f"bulk_imports {stale}") + self.world.count(f"bulk_import_entities {stale}")

    def state(self):
        tables = ("bulk_imports", "bulk_import_entities", "bulk_import_trackers")
        return [self.world.ask(f"select id, status from {table} order by id") for table in tables]


class StaleDirectUploads(Case):
    total = 3_000
    pace: ClassVar = {"pace_stale_direct_uploads": "2000"}

    def seed(self):
        stale = [f"stale/{number:04}" for number in range(self.total)]
        fresh = [f"fresh/{number:04}" for number in range(100)]
        self.world.put(*stale, *fresh)
        now = client.time()[0]
        client.zadd(uploads.PENDING, {f"artifacts:{path}": now - 4 * 3600 for path in stale})
        client.zadd(uploads.PENDING, {f"artifacts:{path}": now - 60 for path in fresh})

    def left(self):
        return sum(path.startswith("stale/") for path in self.world.files())

    def state(self):
        keys = (uploads.PENDING, uploads.DELETING, uploads.FAILED)
        register = [set(client.zrange(key, 0, -1)) for key in keys]
        return register, client.hgetall(uploads.ATTEMPTS), client.hgetall(uploads.CLAIMS), self.world.files()

    def claims_run_out(self):
        for member in client.zrange(uploads.DELETING, 0, -1):
            client.zadd(uploads.DELETING, {member: 0})


class DeleteObjects(Case):
    total = 3_000
    pace: ClassVar = {"pace_delete_objects": "2000"}

    def seed(self):
        gone = [f"gone/{number:04}" for number in range(self.total)]
        self.world.put(*gone, *(f"kept/{number:04}" for number in range(100)))
        DeletedObject.insert_many(
            [{"store_dir": "gone", "file": path.removeprefix("gone/")} for path in gone]
        ).execute()

    def left(self):
        return sum(path.startswith("gone/") for path in self.world.files())

    def state(self):
        return self.world.ask(
            "select store_dir, file, attempts from ci_deleted_objects order by id"
        ), self.world.files()

    def claims_run_out(self):
        DeletedObject.update(pick_up_at=DeletedObject.pick_up_at - timedelta(minutes=10)).execute()


class ExpiredJobArtifacts(Case):
    total = 1_200
    pace: ClassVar = {"pace_expired_job_artifacts": "400"}
    cron = EVERY_SECOND
    """The run itself ends at once, its children's buckets are taken from them by a later one."""

    def seed(self):
        FeatureFlag.turn("bulk_delete_job_artifacts", on=True)
        sample.artifacts(2_000)

    def left(self):
        return self.world.count("ci_job_artifacts where expire_at < now() and locked = 0 and file_type <> 3")

    def state(self):
        artifacts = self.world.ask("select id, file_final_path from ci_job_artifacts order by id")
        outbox = self.world.ask(
            "select project_id, file_store, store_dir, file from ci_deleted_objects order by 1, 2, 3, 4"
        )
        return artifacts, outbox, self.world.ask("select * from project_statistics order by project_id")


CASES = dict(
    zip(BATCHES, (UserStatusCleanup, StaleImports, StaleDirectUploads, DeleteObjects, ExpiredJobArtifacts), strict=True)
)


@pytest.fixture
def world(database, tmp_path):
    root = tmp_path / "objects"
    root.mkdir()
    sentinel.Store("artifacts", f"file://{root}").create_sentinel()
    return World(database, root)


@pytest.fixture
def environment(world):
    return {
        "object_stores": json.dumps({"artifacts": f"file://{world.root}"}),
        "dead_after": DEAD_AFTER,
        "poll_interval": "0.5",
        "bucket_silent_after": "2",
        "log_format": "json",
    }


@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_that_is_killed_and_taken_up_ends_as_an_undisturbed_run(world, services, environment, batch):
    case = CASES[batch](world)
    expected = undisturbed(case, batch, services, environment)
    world.empty()
    case.seed()
    killed = services("killed", "run", batch, **environment, **case.pace)
    assert wait_until(lambda: 0 < case.left() < case.total, LIMIT), "the run did nothing"
    killed.kill()
    left = case.left()
    case.claims_run_out()

    others = {f"cron_{name}": "off" for name in (*BATCHES, "prune") if name != batch}
    options = {**environment, **others, f"cron_{batch}": case.cron}
    services("scheduler", "scheduler", **options)
    services("worker", "worker", "--processes", "1", "--threads", "2", **options)

    assert 0 < left < case.total, "it was not killed in the middle"
    wait_until(lambda: case.state() == expected, LIMIT)
    assert case.state() == expected
    assert wait_until(lambda: closed(batch), LIMIT), "the row of the killed run stayed open"


@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_that_is_killed_again_and_again_ends_as_an_undisturbed_run(world, services, environment, batch):
    case = CASES[batch](world)
    expected = undisturbed(case, batch, services, environment)
    world.empty()
    case.seed()
    left = case.total
    others = {f"cron_{name}": "off" for name in (*BATCHES, "prune") if name != batch}
    options = {**environment, **case.pace, **others, f"cron_{batch}": EVERY_SECOND}
    services("scheduler", "scheduler", **options)

    kills = []
    for number in range(3):
        worker = services(f"worker{number}", "worker", "--processes", "1", "--threads", "1", **options)
        assert wait_until(lambda left=left: case.left() < left, LIMIT), f"worker {number} did nothing"
        worker.kill()
        left = case.left()
        kills.append(left)
        case.claims_run_out()
    services("last worker", "worker", "--processes", "1", "--threads", "2", **options)

    wait_until(lambda: case.state() == expected, LIMIT)
    assert case.state() == expected
    assert kills[0] > 0, "the first was not killed in the middle"


def undisturbed(case, batch, services, environment):
    """Say how things stand after a run that nobody disturbs."""
    case.seed()
    assert case.left() == case.total
    service = services("undisturbed", "run", batch, **environment)
    assert service.process.wait(LIMIT) == 0
    assert case.left() == 0
    return case.state()


def closed(batch):
    """Say whether the batch's first run, the killed one, has come to its end."""
    return JobRun.select().where(JobRun.batch == batch).order_by(JobRun.id).first().state == "succeeded"
