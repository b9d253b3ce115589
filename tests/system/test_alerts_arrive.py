"""Alerts from end to end: a cause, real processes, our rules and routes, and exactly the people who are to get them.

One set of processes serves all cases, at sixty times the pace of the rules (`monitoring.py`).
"""

from contextlib import suppress
from datetime import timedelta
from urllib.request import urlopen

import pytest

from demo.sample_data import add_artifacts
from forgekeeper.api.batches import BATCHES, FeatureFlag
from forgekeeper.ledger.holds import KINDS_BY_PEOPLE, Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import ServerTimeouts, configure_clients
from forgekeeper.platform.database import database, now
from models import JobArtifact
from tests.harness.ports import free_ports
from tests.harness.settings import settings_with
from tests.harness.waiting import wait_until

from .monitoring import monitoring
from .service import Service
from .worlds import ONCE_A_YEAR, World

pytestmark = pytest.mark.timeout(300)

PATIENCE = 90.0
FLAG = "bulk_delete_job_artifacts"
WATCHDOG = ("watchdog", "Watchdog")
FORGOTTEN_PAUSE = ("operations", "BatchPaused stale_direct_uploads")
FLAG_OFF = ("operations", f"BatchFeatureFlagOff {FLAG}")
BACKGROUND = {WATCHDOG, FORGOTTEN_PAUSE, FLAG_OFF}
"""What fires while other cases go on; each has a test of its own."""
LATE = ("operations", "BatchSchedulerMisfires stale_direct_uploads")
"""True of a machine that has too much to do."""
SCHEDULES = {f"cron_{name}": ONCE_A_YEAR for name in BATCHES} | {"cron_stale_direct_uploads": "* * * * *"}
"""A case sends the batch that it is about; only the paused one would have ticks."""
PATIENT = {"dead_after": "10", "scheduler_timeout": "10", "breaker_least": "20000"}
"""A busy machine must not be taken for a dead worker, nor for a database that is away; nor so many statuses for a mistake."""


class Town:
    """Everything that runs, and who got which alert."""

    def __init__(self, world, scheduler, watch):
        self.world = world
        self.scheduler = scheduler
        self.watch = watch

    def arrive(self, status, pairs, since=0):
        """Wait until everybody has got these alerts in that state."""
        return wait_until(lambda: all(self._has(status, pair, since) for pair in pairs), PATIENCE)

    def _has(self, status, pair, since):
        if status == "firing":
            # What does not last may be over by the time that we look.
            return (*pair, status) in self.watch.sink.told[since:]
        return self.watch.sink.status(*pair, since=since) == status

    def alarms(self, cause, remedy, expected):
        """Let *cause* happen until the *expected* have it, *remedy* it until they have that too; return who got what."""
        since = len(self.watch.sink.told)
        cause()
        assert self.arrive("firing", expected, since), self.watch.firing()
        remedy()
        assert self.arrive("resolved", expected, since), self.watch.firing()
        return {one[:2] for one in self.watch.sink.told[since:]} - BACKGROUND - {LATE}


def listens(port):
    with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5):
        return True
    return False


@pytest.fixture(scope="module")
def world(urls, _migrated, tmp_path_factory):
    """Empty tables, servers and disks, connected for the whole module."""
    settings = settings_with(database_url=urls.database, redis_url=urls.redis)
    configure_clients(settings, ServerTimeouts.for_worker(settings), name="tests", connections=20)
    with database.connection_context():
        made = World.make(database, tmp_path_factory.mktemp("world"))
        made.empty()
        yield made
        made.empty()
    database.close_all()


@pytest.fixture(scope="module")
def town(urls, world, tmp_path_factory):
    """A scheduler, a worker, an exporter, Prometheus and Alertmanager."""
    folder = tmp_path_factory.mktemp("town")
    commands = {"scheduler": (), "worker": ("--processes", "1", "--threads", "2"), "exporter": ()}
    ports = dict(zip(commands, free_ports(3), strict=True))
    urls = {"database_url": urls.database, "redis_url": urls.redis}
    pages = {f"metrics_port_{name}": str(port) for name, port in ports.items()}
    settings = world.environment | urls | pages | SCHEDULES | PATIENT
    services = [Service(name, (name, *options), folder, settings) for name, options in commands.items()]
    hold_back()
    try:
        for service in services:
            service.start()
        assert wait_until(lambda: all(map(listens, ports.values())), PATIENCE)
        with monitoring(folder, {f"forgekeeper-{name}": port for name, port in ports.items()}) as watch:
            town = Town(world, services[0], watch)
            assert town.arrive("firing", [WATCHDOG])
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
    add_artifacts(10)
    JobArtifact.update(expire_at=yesterday).where(JobArtifact.expire_at.is_null(False)).execute()


def test_the_watchdog_arrives_again_and_again(town):
    assert wait_until(lambda: town.watch.sink.told.count((*WATCHDOG, "firing")) >= 2, PATIENCE)


def test_a_root_that_is_away_is_paged_and_listed(town):
    root, elsewhere = town.world.repositories, town.world.repositories.with_name("elsewhere")
    expected = {("pager", "BatchRootUnreadable repositories"), ("operations", "BatchRootUnreadable repositories")}

    got = town.alarms(lambda: root.rename(elsewhere), lambda: elsewhere.rename(root), expected)

    assert got == expected


def test_a_stopped_scheduler_is_paged_and_what_follows_from_it_is_not(town):
    expected = {
        ("pager", "BatchSchedulerDown"),
        ("operations", "BatchSchedulerDown"),
        ("operations", "BatchTargetDown forgekeeper-scheduler"),
    }

    def remedy():
        assert wait_until(lambda: "BatchScheduleMissing prune" in town.watch.firing(), PATIENCE), "nothing followed"
        town.scheduler.start()

    got = town.alarms(town.scheduler.stop, remedy, expected)

    assert got == expected


def test_statuses_that_pile_up_reach_the_system_administrators_until_they_are_cleared(town):
    expected = {("system-admins", "UserStatusCleanupBacklogHigh user_status_cleanup")}
    due = (
        "insert into user_statuses (user_id, message, clear_status_at) "
        "select n, '', clock_timestamp() from generate_series(1000000, 1010000) as n"
    )

    got = town.alarms(
        lambda: database.execute_sql(due), lambda: JobRun.claim_manual("user_status_cleanup", by="test"), expected
    )

    assert got == expected


def test_a_pause_and_a_flag_that_is_off_reach_operations_and_nobody_is_paged(town):
    assert town.arrive("firing", [FORGOTTEN_PAUSE, FLAG_OFF]), town.watch.firing()

    database.execute_sql("truncate ci_job_artifacts")
    FeatureFlag.turn(FLAG, on=True)
    Hold.lift("stale_direct_uploads", KINDS_BY_PEOPLE)

    assert town.arrive("resolved", [FORGOTTEN_PAUSE, FLAG_OFF])
    got = {one[:2] for one in town.watch.sink.told if one.alert in {FORGOTTEN_PAUSE[1], FLAG_OFF[1]}}
    assert got == {FORGOTTEN_PAUSE, FLAG_OFF}
