"""Alerts from end to end: a cause, real processes, our rules and routes, and exactly those people who are to be told.

One set of processes serves all cases, at sixty times the pace of the rules (`monitoring.py`).  What takes its
time begins with the fixture and goes on behind the other cases: a run that lasts longer than a minute, a flag that is
off, a pause of yesterday.
"""

import time
from datetime import timedelta
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from demo import git_repositories
from demo.sample_data.expired_job_artifacts import add_artifacts as artifacts
from demo.sample_data.git_ref_cleanup import add_projects
from demo.sample_data.git_ref_cleanup import add_ref_deletions as ref_deletions
from forgekeeper.batches import BATCHES
from forgekeeper.connections import Limits, connect
from forgekeeper.database import database, now
from forgekeeper.delivery import dead_letters
from forgekeeper.delivery.broker import broker
from forgekeeper.flags import FeatureFlag
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.holds import BY_PEOPLE, Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import PREFIX
from models import GitRefDeletion, JobArtifact, UserStatus
from tests.harness import samples as sample
from tests.harness.ports import free_ports
from tests.harness.settings import settings_with
from tests.harness.waiting import wait_until

from .monitoring import monitoring
from .service import Service
from .worlds import ONCE_A_YEAR, World

pytestmark = pytest.mark.timeout(300)

PATIENCE = 90.0
SLOW = 61.0
"""Seconds; document 48 allows a run sixty."""
FLAG = "bulk_delete_job_artifacts"
DURATION = ("system-admins", "UserStatusCleanupDurationHigh user_status_cleanup")
WATCHDOG = ("watchdog", "Watchdog")
FORGOTTEN_PAUSE = ("operations", "BatchPaused stale_direct_uploads")
FLAG_OFF = ("operations", f"BatchFeatureFlagOff {FLAG}")
BACKGROUND = {DURATION, WATCHDOG, FORGOTTEN_PAUSE, FLAG_OFF}
"""What is told while other cases go on; each has a test of its own."""
NO_PROGRESS = ("operations", "BatchNotProgressing clean_project_refs")
"""True as well while a child's message kills its workers, and told where that takes long."""
LATE = ("operations", "BatchSchedulerMisfires stale_direct_uploads")
"""True of a machine that has too much to do."""
SCHEDULES = {f"cron_{name}": ONCE_A_YEAR for name in BATCHES} | {"cron_stale_direct_uploads": "* * * * *"}
"""A case sends the batch that it is about; only the paused one would have ticks."""


class Town:
    """Everything that runs, and who was told what."""

    def __init__(self, world, services, watch):
        self.world = world
        self.watch = watch
        self.scheduler, self.cron_worker, self.git_worker = services

    def mark(self):
        return len(self.watch.sink.told)

    def is_told(self, status, pairs, since=0):
        return wait_until(lambda: all(self._was_told(status, pair, since) for pair in pairs), PATIENCE)

    def _was_told(self, status, pair, since):
        if status == "firing":
            # What does not last may be over by the time that we look.
            return (*pair, status) in self.watch.sink.told[since:]
        return self.watch.sink.status(*pair, since=since) == status

    def told(self, since=0):
        """Who was told of what, but for that which goes on behind the cases."""
        return {told[:2] for told in self.watch.sink.told[since:]} - BACKGROUND - {LATE}

    def alarms(self, cause, remedy, expected):
        """Let *cause* happen until everybody *expected* is told, then *remedy* it until they are told of that too.

        Returns who was told, of all that was told meanwhile.
        """
        since = self.mark()
        cause()
        assert self.is_told("firing", expected, since), (self.told(since), self.watch.firing())
        remedy()
        assert self.is_told("resolved", expected, since), (self.told(since), self.watch.firing())
        return self.told(since)


def run_by_hand(batch):
    """Leave a run to the scheduler and the workers; return its row's id."""
    return JobRun.claim_manual(batch, by="test")


def state(run):
    return JobRun.get_by_id(run).state


def listens(port):
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5):
            return True
    except (URLError, OSError):
        return False


@pytest.fixture(scope="module")
def world(urls, _migrated, tmp_path_factory):
    """Empty tables, servers and disks, connected for the whole module."""
    settings = settings_with(database_url=urls.database, redis_url=urls.redis)
    connect(settings, Limits.of_worker(settings), name="tests", connections=20)
    with database.connection_context():
        made = World.make(database, tmp_path_factory.mktemp("world"))
        made.empty()
        yield made
        made.empty()
    database.close_all()


@pytest.fixture(scope="module")
def town(urls, world, tmp_path_factory):
    """A scheduler, a worker for `cron`, one for `git`, an exporter, Prometheus and Alertmanager."""
    folder = tmp_path_factory.mktemp("town")
    cron, git, scheduler, exporter = free_ports(4)
    urls = {"database_url": urls.database, "redis_url": urls.redis}
    ports = {"metrics_port_scheduler": str(scheduler), "metrics_port_exporter": str(exporter)}
    # Patient enough that a busy machine is not taken for a dead worker, nor for a database that is away.
    common = world.environment | urls | ports | SCHEDULES | {"dead_after": "10", "scheduler_timeout": "10"}
    faults = f"user_status_cleanup.deleted=sleep:{SLOW}*1,prune.removed=sleep:120,clean_project_refs.deleted=kill"
    environment = {f"{PREFIX}{name.upper()}": value for name, value in (common | {"failpoints": faults}).items()}
    # It dies three times, of one message; what waits for longer is told of, too.
    brief = {f"{PREFIX}DEAD_AFTER": "3"}
    one = ("--processes", "1", "--threads", "2")
    services = [
        Service("scheduler", ("scheduler",), folder, environment),
        Service("cron", ("worker", "--queues", "cron", *one, "--metrics-port", str(cron)), folder, dict(environment)),
        Service("git", ("worker", "--queues", "git", *one, "--metrics-port", str(git)), folder, environment | brief),
        Service("exporter", ("exporter",), folder, environment),
    ]
    hold_back()
    pages = {
        "forgekeeper-worker": [cron, git],
        "forgekeeper-scheduler": [scheduler],
        "forgekeeper-exporter": [exporter],
    }
    try:
        for service in services:
            service.start()
        assert wait_until(lambda: all(map(listens, (cron, git, scheduler, exporter))), PATIENCE)
        with monitoring(folder, pages) as watch:
            slow = run_slowly()
            town = Town(world, services[:3], watch)
            town.slow = slow
            assert town.is_told("firing", [WATCHDOG])
            yield town
    finally:
        for service in services:
            service.kill()


def hold_back():
    """Pause a batch that has never succeeded since yesterday, and leave old artifacts to a flag that is off."""
    Batch.register(BATCHES)
    yesterday = now() - timedelta(hours=30)
    Hold.add("stale_direct_uploads", "pause", until=None, reason="test", by="test", since=yesterday)
    Batch.update(registered_at=yesterday).where(Batch.name == "stale_direct_uploads").execute()
    FeatureFlag.turn(FLAG, on=False)
    artifacts(10)
    JobArtifact.update(expire_at=yesterday).where(JobArtifact.expire_at.is_null(False)).execute()


def run_slowly():
    """Begin a run of user status cleanup that has nothing left to do, and is slow about it."""
    sample.user_statuses(50)
    run = run_by_hand("user_status_cleanup")
    assert wait_until(lambda: state(run) == "started" and not UserStatus.due(now()).exists(), PATIENCE)
    return SimpleNamespace(id=run, began=time.monotonic())


def test_the_watchdog_is_told_of_again_and_again(town):
    assert wait_until(lambda: town.watch.sink.told.count((*WATCHDOG, "firing")) >= 2, PATIENCE)


def test_a_root_that_is_away_is_paged_and_listed(town):
    root, elsewhere = town.world.repositories, town.world.repositories.with_name("elsewhere")
    expected = {("pager", "BatchRootUnreadable repositories"), ("operations", "BatchRootUnreadable repositories")}

    told = town.alarms(lambda: root.rename(elsewhere), lambda: elsewhere.rename(root), expected)

    assert told == expected


def test_a_stopped_scheduler_is_paged_and_what_follows_from_it_is_not(town):
    expected = {
        ("pager", "BatchSchedulerDown"),
        ("operations", "BatchSchedulerDown"),
        ("operations", "BatchTargetDown forgekeeper-scheduler"),
    }

    def remedy():
        assert wait_until(lambda: "BatchScheduleMissing prune" in town.watch.firing(), PATIENCE), "nothing followed"
        town.scheduler.start()

    told = town.alarms(town.scheduler.stop, remedy, expected)

    assert told == expected


def test_a_child_that_ends_its_workers_is_a_dead_letter_of_git_ref_cleanup(town):
    expected = {("operations", "GitRefCleanupDeadLetters clean_project_refs")}
    letters = lambda: list(dead_letters.read(broker, dead_letters.addresses(broker, ["git"])))  # noqa: E731

    def poison():
        ((project, disk_path),) = add_projects(1).items()
        git_repositories.create(town.world.repositories, disk_path, ["refs/merge-requests/1/head"])
        ref_deletions([project], ["refs/merge-requests/1/head"])
        run_by_hand("git_ref_cleanup")
        assert wait_until(lambda: town.git_worker.restart_if_dead() or letters(), PATIENCE)
        assert [letter.reason for letter in letters()] == ["poison"]

    def cure():
        del town.git_worker.environment[f"{PREFIX}FAILPOINTS"]
        town.git_worker.kill()
        town.git_worker.start()
        assert [dead_letters.replay(broker, letter) for letter in letters()] == ["replayed"]

    told = town.alarms(poison, cure, expected)

    assert told - {NO_PROGRESS} == expected
    assert wait_until(lambda: not GitRefDeletion.pending().exists(), PATIENCE)


def test_a_message_that_is_none_is_a_dead_letter_of_nobody_s(town):
    expected = {("operations", "BatchDeadLetters unknown")}

    def remedy():
        (letter,) = dead_letters.read(broker, dead_letters.addresses(broker, ["cron"]))
        assert dead_letters.remove(broker, letter)

    told = town.alarms(lambda: broker.do_enqueue("cron", "bad", b"no message"), remedy, expected)

    # The one before may still be told of.
    assert told - {NO_PROGRESS} == expected


def test_a_run_of_more_than_a_minute_is_told_to_the_system_administrators(town):
    assert wait_until(lambda: state(town.slow.id) == "succeeded", SLOW + PATIENCE)

    assert town.is_told("resolved", [DURATION])
    assert {told.receiver for told in town.watch.sink.told if told.alert == DURATION[1]} == {DURATION[0]}


def test_a_worker_that_dies_in_a_run_is_lost_and_told_to_operations(town):
    expected = {("operations", "BatchWorkerLost prune")}

    def lose():
        run = run_by_hand("prune")
        assert wait_until(lambda: state(run) == "started", PATIENCE)
        town.cron_worker.kill()
        del town.cron_worker.environment[f"{PREFIX}FAILPOINTS"]
        town.cron_worker.start()
        assert wait_until(lambda: state(run) == "succeeded", PATIENCE)

    # It is over by itself: the run has been done by another.
    told = town.alarms(lose, lambda: None, expected)

    assert told == expected


def test_statuses_that_pile_up_are_told_to_the_system_administrators_until_they_are_cleared(town):
    expected = {("system-admins", "UserStatusCleanupBacklogHigh user_status_cleanup")}
    due = (
        "insert into user_statuses (user_id, message, clear_status_at) "
        "select n, '', clock_timestamp() from generate_series(1000000, 1010000) as n"
    )

    told = town.alarms(lambda: database.execute_sql(due), lambda: run_by_hand("user_status_cleanup"), expected)

    assert told == expected


def test_a_pause_and_a_flag_that_is_off_are_told_and_nobody_is_paged(town):
    assert town.is_told("firing", [FORGOTTEN_PAUSE, FLAG_OFF]), (town.told(), town.watch.firing())

    database.execute_sql("truncate ci_job_artifacts")
    FeatureFlag.turn(FLAG, on=True)
    Hold.lift("stale_direct_uploads", BY_PEOPLE)

    assert town.is_told("resolved", [FORGOTTEN_PAUSE, FLAG_OFF])
    paged = {told.alert for told in town.watch.sink.told if told.receiver == "pager"}
    assert paged <= {"BatchRootUnreadable repositories", "BatchSchedulerDown"}
    others = {told[:2] for told in town.watch.sink.told if told.alert in {FORGOTTEN_PAUSE[1], FLAG_OFF[1]}}
    assert others == {FORGOTTEN_PAUSE, FLAG_OFF}
