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
from forgekeeper.batches import BATCHES
from forgekeeper.connections import client
from forgekeeper.storage.outbox import DeletedObject
from models import JobArtifact, Project, UserStatus
from tests.harness.audited import gone, lines, unclosed
from tests.harness.waiting import wait_until
from workers.stale_direct_uploads import register

from .worlds import CASES, EVERY_SECOND, World

DURATION = float(os.environ.get("AUDIT_CHAOS_SECONDS", "15"))
SEED = int(os.environ.get("CHAOS_SEED", random.randrange(2**32)))
PATIENCE = 120.0
AT_WORK = {name: CASES[name] for name in CASES if name not in {"prune", "stale_imports"}}
OPTIONS = {f"cron_{batch}": EVERY_SECOND if batch in AT_WORK else "off" for batch in BATCHES}
OPTIONS |= {"retry_after": "1", "object_visibility": "30", "upload_visibility": "30"}
# Slow enough that there is something left to the end.
PACES = {f"pace_{name}": f"{case.total / DURATION / 2}" for name, case in AT_WORK.items()}
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
            world.files(),
            {row.id for row in JobArtifact.select(JobArtifact.id)},
            {row.user_id for row in UserStatus.select(UserStatus.user_id)},
        )


@pytest.fixture
def cases(database, tmp_path):
    """Something to delete for each batch, and something to leave alone."""
    world = World.make(database, tmp_path)
    cases = [case(world) for case in AT_WORK.values()]
    for case in cases:
        case.seed()
    world.put(*(row.file_final_path for row in JobArtifact.select() if row.file_final_path))
    return cases


def left(cases):
    """Count what is still to be deleted."""
    return sum(case.left() for case in cases) + DeletedObject.select().count()


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
            # As a forge that knows what it lost registers the uploads whose objects are there.
            found = world.files()
            there = {one: began for one, began in uploads.items() if one.partition(b":")[2].decode() in found}
            if there:
                client.zadd(register.PENDING, there)
    for each in workers:
        each.restart_if_dead()


def test_what_is_gone_has_its_line_and_what_is_there_has_none(cases, services, say):
    world = cases[0].world
    before = Truth.of(world)
    options = {**world.environment, **OPTIONS, **PACES}
    scheduler = services("scheduler", "scheduler", **options)
    workers = [services(f"worker-{number}", *WORKER, **options) for number in range(2)]
    dice, until = random.Random(SEED), time.monotonic() + DURATION
    uploads = dict(client.zrange(register.PENDING, 0, -1, withscores=True))
    while time.monotonic() < until:
        torment(dice, workers, uploads, world)
        wait_until(lambda: time.monotonic() > until, dice.uniform(0.3, 1.5))
    for service in (*workers, scheduler):
        service.kill()
    interrupted = unclosed()
    finish(cases, services)
    after = Truth.of(world)

    refs = {(line["project_id"], line["ref"]) for line in lines("git_ref_deletion") if line["state"] == "deleted"}
    say(f"seed {SEED}, {DURATION:.0f} s: {interrupted} intents left open by the chaos")
    assert refs == before.refs - after.refs
    assert gone("deleted_object", "path") | gone("stale_upload", "path") == before.objects - after.objects
    assert gone("expired_artifact", "id") == before.artifacts - after.artifacts
    assert gone("user_status", "id") == before.statuses - after.statuses
    assert unclosed() == 0


def finish(cases, services):
    """Let everything be done by workers that nobody disturbs."""
    for case in cases:
        case.claims_run_out()
    options = {**cases[0].world.environment, **OPTIONS, "dead_after": "30"}
    services("last-scheduler", "scheduler", **options)
    services("last-worker", *WORKER, **options)
    assert wait_until(lambda: left(cases) == 0 and unclosed() == 0, PATIENCE), (left(cases), unclosed())
