"""Disks that are full while workers work: that of the repositories, and that of their metrics."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from urllib.request import urlopen

import pytest

from demo import sample_data as sample
from forgekeeper.api.batches import BATCHES
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.database import now
from forgekeeper.targets import sentinel
from metrics.full_disk import METRICS_FILE_BYTES
from models import UserStatus
from tests.harness.installation import INSTALLATION
from tests.harness.ports import free_ports
from tests.harness.programs import ROOT
from tests.harness.waiting import wait_until

from .worlds import CASES, PATIENT, World

LIMIT = 60.0
OFF = {f"cron_{batch}": "off" for batch in BATCHES} | {"poll_interval": "0.5", "log_format": "json"}
WORKER = ("worker", "--processes", "1", "--threads", "4")
MIB = 1024 * 1024


@pytest.fixture
def disk(tmp_path, capsys):
    """Mount a small disk; where that cannot be done, say so and skip the test."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size):
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "none", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = f"full disks were not tested, a small one cannot be mounted: {error}"
            with capsys.disabled():
                sys.stdout.write(f"\n{reason}\n")
            pytest.skip(reason)
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder):
    """Leave no byte; return the file that takes them all."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    return filler


def mentions(service, words):
    """Count the lines with these words in them."""
    return sum(words in str(line) for line in service.lines())


def succeeded():
    return JobRun.select().where(JobRun.state == "succeeded").count()


def test_on_a_full_disk_no_ref_counts_as_deleted_and_all_go_once_there_is_room(database, services, disk, outcome):
    repositories = disk(8 * MIB)
    world = World(database, repositories.with_name("objects"), repositories)
    sentinel.Folder(repositories).create_sentinel(INSTALLATION)
    case = CASES["git_ref_cleanup"](world)
    case.seed()
    filler = fill(repositories)
    options = OFF | world.environment | PATIENT | {"cron_git_ref_cleanup": "* * * * * *", "object_stores": "{}"}
    services("scheduler", "scheduler", **options)
    worker = services("worker", *WORKER, **options)

    noticed = wait_until(lambda: mentions(worker, "No space left on device") >= case.projects, LIMIT)
    consumed = case.total - case.left()
    others = wait_until(lambda: succeeded() > 0, LIMIT)
    filler.unlink()
    room_at = time.monotonic()
    done = wait_until(lambda: retried(database) and case.left() == 0, LIMIT)
    recovery = time.monotonic() - room_at

    packed = [world.refs(disk_path)[0] for (disk_path,) in world.ask("select disk_path from projects")]
    doomed = {f"refs/merge-requests/{number}/head" for number in range(case.doomed)}
    left = [line for text in packed for line in text.splitlines() if line.partition(" ")[2] in doomed]
    outcome(37, injected=1, violations=consumed + (not done) + len(left), recovery=[recovery])
    assert (noticed, consumed) == (True, 0)
    assert others, "its children's trouble must not hold up the batch"
    assert (done, left) == (True, [])


def retried(database):
    """Let no child wait for its next try: the more often it has failed, the longer it would."""
    database.execute_sql("update quarantine set retry_at = now() where retry_at > now() and retry_at < 'infinity'")
    return True


def test_batches_go_on_while_the_disk_of_their_metrics_is_full(database, services, disk, monkeypatch, outcome):
    sample.add_statuses(1_000)
    folder, (port,) = disk(MIB), free_ports(1)
    options = OFF | {"cron_user_status_cleanup": "* * * * * *", "metrics_port_worker": str(port)}
    with monkeypatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        worker = services("worker", *WORKER, **options)
    assert wait_until(lambda: mentions(worker, "is booting up"), LIMIT)
    assert list(folder.glob("forgekeeper-worker-*")), "it counts elsewhere"
    fill(folder)
    services("scheduler", "scheduler", **options)

    began = time.monotonic()
    done = wait_until(lambda: UserStatus.select().where(UserStatus.clear_status_at <= now()).count() == 0, LIMIT)
    recovery = time.monotonic() - began
    more = wait_until(lambda: succeeded() > 2, LIMIT)
    status = worker.process.poll()
    failures = JobRun.select().where(JobRun.failures > 0).count()
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT) as answer:
        page = answer.status
    outcome(39, injected=1, violations=(not done) + (not more) + failures + (status is not None), recovery=[recovery])
    assert (status, done, more, failures, page) == (None, True, True, 0, 200)


COUNT_ALL = """
import workers
from forgekeeper.api.batches import all_declared
from metrics.catalogue import build_metrics
from metrics.instruments import Instruments

Instruments("worker").declare_metrics(build_metrics(all_declared())).create_all_series()
"""


def test_there_is_room_for_everything_that_a_worker_counts(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    subprocess.run([sys.executable, "-c", COUNT_ALL], env=environment, check=True)

    assert {file.stat().st_size for file in tmp_path.glob("*.db")} == {METRICS_FILE_BYTES}
