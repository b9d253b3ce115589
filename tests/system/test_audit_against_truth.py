"""The audit against the truth: after kills, restarts and an emptied Redis whatever is gone has its line, and nothing else.

Workers delete refs, objects, uploads and rows while all of that happens to them; then they have a last undisturbed run,
which closes what they left open.  AUDIT_CHAOS_SECONDS sets for how long; CHAOS_SEED repeats a schedule.
"""

import os
import random
import time
from dataclasses import dataclass

import pytest

from demo import git_repositories
from demo.sample_data.expired_job_artifacts import add_artifacts as artifacts
from demo.sample_data.git_ref_cleanup import add_projects as projects
from demo.sample_data.git_ref_cleanup import add_ref_deletions as ref_deletions
from forgekeeper.batches import BATCHES
from forgekeeper.connections import client
from forgekeeper.database import now
from forgekeeper.declaring.flags import FeatureFlag
from forgekeeper.storage import sentinel
from forgekeeper.storage.outbox import DeletedObject
from models import GitRefDeletion, JobArtifact, Project, UserStatus
from tests.harness.audited import gone, lines, unclosed
from tests.harness.samples import user_statuses
from tests.harness.thorough import WHOLE
from tests.harness.waiting import wait_until
from workers.stale_direct_uploads import register

from .worlds import World

DURATION = float(os.environ.get("AUDIT_CHAOS_SECONDS", "60" if WHOLE else "20"))
SEED = int(os.environ.get("CHAOS_SEED", random.randrange(2**32)))
PATIENCE = 120.0
BATCHES_AT_WORK = (
    "git_ref_cleanup",
    "delete_objects",
    "stale_direct_uploads",
    "expired_job_artifacts",
    "user_status_cleanup",
)
REPOSITORIES, REFS = 12, 400
OBJECTS = 4_000
ROWS = 4_000
EVERY_SECOND = "* * * * * *"
FOUR_HOURS = 4 * 3_600
ENVIRONMENT = {
    **{f"cron_{batch}": EVERY_SECOND if batch in BATCHES_AT_WORK else "off" for batch in BATCHES},
    "retry_after": "1",
    "object_visibility": "30",
    "upload_visibility": "30",
    # Slow enough that there is something left to the end.
    "pace_git_ref_cleanup": f"{REFS / 4}",
    "pace_delete_objects": f"{OBJECTS / DURATION}",
    "pace_stale_direct_uploads": f"{OBJECTS / DURATION}",
    "pace_user_status_cleanup": f"{ROWS / DURATION}",
    "pace_expired_job_artifacts": f"{ROWS / DURATION / 10}",
}
WORKER = ("worker", "--processes", "2", "--threads", "4")


@dataclass
class Truth:
    """What is there: refs by project, objects by path, and the ids of rows."""

    refs: set
    objects: set
    artifacts: set
    statuses: set

    @classmethod
    def of(cls, world):
        return cls(
            {
                (project.id, ref)
                for project in Project.select()
                for ref in git_repositories.refs(world.repositories / project.disk_path)
            },
            files(world),
            {row.id for row in JobArtifact.select(JobArtifact.id)},
            {row.user_id for row in UserStatus.select(UserStatus.user_id)},
        )


def files(world):
    """List the objects; a folder may vanish meanwhile."""
    found = {f"{folder}/{name}" for folder, _, names in os.walk(world.root) for name in names}
    return {path.removeprefix(f"{world.root}/") for path in found} - {sentinel.NAME}


def seed(world):
    """Give each batch something to delete, and something to leave alone."""
    FeatureFlag.turn("bulk_delete_job_artifacts", on=True)
    refs = [f"refs/mr/{number}" for number in range(REFS)]
    made = projects(REPOSITORIES)
    for disk_path in made.values():
        git_repositories.create(world.repositories, disk_path, refs)
    ref_deletions(list(made), refs[: REFS * 3 // 4])
    outbox = [f"outbox/{number:05}" for number in range(OBJECTS)]
    uploads = [f"uploads/{number:05}" for number in range(OBJECTS)]
    kept = [f"kept/{number:03}" for number in range(100)]
    world.put(*outbox, *uploads, *kept)
    DeletedObject.insert_many([{"store_dir": "outbox", "file": path.partition("/")[2]} for path in outbox]).execute()
    began = client.time()[0] - FOUR_HOURS
    client.zadd(register.PENDING, {f"artifacts:{path}": began for path in uploads})
    user_statuses(ROWS)
    artifacts(ROWS)
    world.put(*(row.file_final_path for row in JobArtifact.select() if row.file_final_path))


def left(world):
    """How much of it is still to be deleted."""
    pending = GitRefDeletion.pending().count() + DeletedObject.select().count()
    rows = JobArtifact.expired(now()).count() + UserStatus.due(now()).count()
    return pending + rows + sum(path.startswith("uploads/") for path in files(world))


@pytest.fixture
def tormented(database, services, tmp_path):
    """A world whose batches were killed, restarted and robbed of Redis's contents; what was there before."""
    world = World.make(database, tmp_path)
    seed(world)
    before = Truth.of(world)
    options = {**world.environment, **ENVIRONMENT}
    scheduler = services("scheduler", "scheduler", **options)
    workers = [services(f"worker-{number}", *WORKER, **options) for number in range(2)]
    dice = random.Random(SEED)
    until = time.monotonic() + DURATION
    uploads = client.zrange(register.PENDING, 0, -1, withscores=True)
    while time.monotonic() < until:
        torment(dice, workers, dict(uploads), world)
        wait_until(lambda: time.monotonic() > until, dice.uniform(0.3, 1.5))
    for service in (*workers, scheduler):
        service.kill()
    return world, before


def torment(dice, workers, uploads, world):
    """Kill a child or a worker, end one in order, or empty Redis."""
    worker = dice.choice(workers)
    match dice.choice(["child", "child", "child", "worker", "restart", "redis"]):
        case "child":
            worker.kill_a_child(dice)
        case "worker":
            worker.kill()
        case "restart":
            worker.stop()
        case "redis":
            client.flushdb()
            register_anew(uploads, world)
    for each in workers:
        each.restart_if_dead()


def register_anew(uploads, world):
    """Register the uploads whose objects are there again, as a forge that knows what it lost."""
    found = files(world)
    there = {member: began for member, began in uploads.items() if member.partition(b":")[2].decode() in found}
    if there:
        client.zadd(register.PENDING, there)


def test_what_is_gone_has_its_line_and_what_is_there_has_none(tormented, services, say):
    world, before = tormented
    interrupted, rows = unclosed(), len(before.artifacts) + len(before.statuses)
    calm(world, services)
    after = Truth.of(world)

    refs = {(line["project_id"], line["ref"]) for line in lines("git_ref_deletion") if line["state"] == "deleted"}
    objects = gone("deleted_object", "path") | gone("stale_upload", "path")
    say(
        f"seed {SEED}, {DURATION:.0f} s: {len(before.refs - after.refs)} refs, "
        f"{len(before.objects - after.objects)} objects, {rows - len(after.artifacts) - len(after.statuses)} rows, "
        f"{interrupted} intents left open by the chaos"
    )

    assert refs == before.refs - after.refs
    assert objects == before.objects - after.objects
    assert gone("expired_artifact", "id") == before.artifacts - after.artifacts
    assert gone("user_status", "id") == before.statuses - after.statuses
    assert unclosed() == 0


def calm(world, services):
    """Let everything be done by workers that nobody disturbs."""
    DeletedObject.update(pick_up_at="now").execute()
    for member in client.zrange(register.DELETING, 0, -1):
        client.zadd(register.DELETING, {member: 0})
    paces = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("pace_")}
    options = {**world.environment, **paces, "dead_after": "30"}
    services("calm-scheduler", "scheduler", **options)
    services("calm-worker", *WORKER, **options)
    assert wait_until(lambda: left(world) == 0 and unclosed() == 0, PATIENCE), (left(world), unclosed())
