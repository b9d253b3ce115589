"""Workers and schedulers whose PostgreSQL ends their sessions, restarts, falls silent or has no room for them."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime, timedelta
from itertools import pairwise

import psycopg2
import pytest

from demo.servers import folder, postgres
from demo.servers.machine import Programs
from demo.tables import make_tables
from forgekeeper import migrations
from forgekeeper.batches import BATCHES
from forgekeeper.boot import load
from forgekeeper.connections import Limits, client, connect
from forgekeeper.database import database, now
from forgekeeper.runs.deadline import Deadline
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import PREFIX
from models import UserStatus
from tests.harness import samples as sample
from tests.harness.machine import Held
from tests.harness.performing import perform
from tests.harness.waiting import wait_until
from workers.user_status_cleanup import BATCH_SIZE, user_status_cleanup

from .proxy import postgres_through
from .worlds import CASES, World

LIMIT = 60.0
BATCH = "user_status_cleanup"
OFF = {f"cron_{batch}": "off" for batch in BATCHES}
IMPATIENT = OFF | {"dead_after": "2", "poll_interval": "0.5", "retry_after": "0.5", "log_format": "json"}
EVERY_SECOND = IMPATIENT | {f"cron_{BATCH}": "* * * * * *"}
WORKER = ("worker", "--processes", "1", "--threads", "3")
FAILURES = {"reconcile failed", "message failed", "run failed", "run lost"}
UNEXPECTED = {"critical"}


def pass_time(seconds):
    """Let a fault last: its length is what is tested."""
    threading.Event().wait(seconds)


def failures(*services):
    """Return the lines that say that something was tried and failed."""
    lines = [line for service in services for line in service.lines()]
    return [line for line in lines if line.get("message") in FAILURES or line.get("level") in UNEXPECTED]


def succeeded(batch=BATCH):
    return JobRun.select().where(JobRun.batch == batch, JobRun.state == "succeeded").count()


def goes_on():
    """Wait for a run that begins and ends well from now on; return after how many seconds."""
    began, moment = time.monotonic(), now()
    new = JobRun.select().where(JobRun.batch == BATCH, JobRun.state == "succeeded", JobRun.started_at > moment)
    return time.monotonic() - began if wait_until(new.exists, LIMIT) else float("inf")


# Sessions that are ended

TOGETHER = ("user_status_cleanup", "stale_imports", "stale_direct_uploads")
"""Batches that have nothing to do with one another, so that they can run at once."""
ROUNDS = 8
TERMINATE = """
    select count(pg_terminate_backend(pid)) from pg_stat_activity
    where application_name ~ '^forgekeeper (worker|scheduler)'
"""


def test_batches_whose_sessions_are_ended_again_and_again_end_as_undisturbed_ones(
    database, services, tmp_path, outcome
):
    world = World.make(database, tmp_path)
    cases = {name: CASES[name](world) for name in TOGETHER}
    for case in cases.values():
        case.seed()
    for name in TOGETHER:
        assert services(f"undisturbed {name}", "run", name, **world.environment).process.wait(LIMIT) == 0
    expected = {name: case.state() for name, case in cases.items()}
    world.empty()
    for case in cases.values():
        case.seed()

    options = EVERY_SECOND | world.environment | {f"cron_{name}": "* * * * * *" for name in TOGETHER}
    options |= {name: value for case in cases.values() for name, value in getattr(case, "pace", {}).items()}
    # Nobody dies: a run that is lost to a busy machine would be a failure more.
    options |= {"dead_after": "4", "upload_visibility": "10"}
    schedulers = [services(f"scheduler{number}", "scheduler", **options) for number in range(2)]
    worker = services("worker", *WORKER, **options)
    assert wait_until(lambda: any(case.left() < case.total for case in cases.values()), LIMIT), "nothing was done"
    ended = 0
    for _ in range(ROUNDS):
        # Idle ones in their pool, some in a transaction, some at a commit: whatever they are at.
        ended += world.ask(TERMINATE)[0][0]
        pass_time(0.3)

    began = time.monotonic()
    done = wait_until(lambda: {name: case.state() for name, case in cases.items()} == expected, LIMIT)
    recovery = [time.monotonic() - began, goes_on()]
    complained = len(failures(worker, *schedulers))

    def nobody_complains_for_a_second():
        before = len(failures(worker, *schedulers))
        pass_time(1)
        return len(failures(worker, *schedulers)) == before

    # A busy machine may be the reason of a single one.
    silent = wait_until(nobody_complains_for_a_second, LIMIT / 4)
    outcome(24, injected=ended, violations=(not done) + (not silent), recovery=recovery)
    assert {name: case.state() for name, case in cases.items()} == expected
    assert ended > ROUNDS
    # Each session that ended failed at one thing, and at nothing else.
    assert complained <= ended
    assert silent, "they complain for ever"
    assert [service.process.poll() for service in (worker, *schedulers)] == [None] * 3


def test_a_run_whose_session_is_ended_is_tried_again_and_its_worker_not_held_dead(database, services, outcome):
    sample.user_statuses(1_000)
    options = OFF | {"dead_after": "60", "retry_after": "0.2", "poll_interval": "0.2", "log_format": "json"}
    run = JobRun.claim_manual(BATCH, by="test")
    services("scheduler", "scheduler", **options)
    # So slow that it is still at it when a busy machine has come to ending its session.
    services("worker", *WORKER, **options, **{f"pace_{BATCH}": "100"})
    due = UserStatus.due(now())
    before = due.count()
    assert wait_until(lambda: 0 < due.count() < before, LIMIT), "the run did nothing"

    ended = database.execute_sql(TERMINATE).fetchone()[0]
    began = time.monotonic()
    done = wait_until(lambda: JobRun.get_by_id(run).state == "succeeded", LIMIT / 2)

    row = JobRun.get_by_id(run)
    violations = (not done) + row.losses
    outcome(24, injected=ended, violations=violations, recovery=[time.monotonic() - began])
    assert done
    assert (row.attempt, row.failures, row.losses) == (2, 1, 0)
    assert due.count() == 0


# A server of our own


class Server:
    """A PostgreSQL that a test may restart; migrated, and in the settings."""

    def __init__(self, site, options):
        self._site, self._options = site, options
        self.url = postgres.url(site)

    def start(self):
        self._server = postgres.start(self._site, Programs.found(), self._options)
        self._server.wait_until_ready()

    def end(self, how):
        self._server.process.send_signal(how)
        self._server.process.wait(LIMIT)

    def stop(self):
        self._server.stop()


@pytest.fixture
def serve(settings, monkeypatch):
    """Start a server of our own, with options."""
    with ExitStack() as stack:

        def start(**options):
            site = stack.enter_context(folder.opened(None))
            server = Server(site, options)
            server.start()
            stack.callback(server.stop)
            monkeypatch.setenv(PREFIX + "DATABASE_URL", server.url)
            own = load()
            connect(own, Limits.of_worker(own), name="tests", connections=2)
            stack.callback(database.close_all)
            database.connect()
            migrations.migrate(database.obj)
            make_tables(database.obj)
            client.flushdb()
            return server

        yield start
        client.connection_pool.disconnect()


FAST, IMMEDIATE = signal.SIGINT, signal.SIGQUIT


def test_everything_goes_on_by_itself_after_postgresql_was_restarted(serve, services, outcome):
    # What was committed must be there after a crash.
    server = serve(fsync="on", synchronous_commit="on", full_page_writes="on")
    sample.user_statuses(2_500)
    options = EVERY_SECOND | {f"pace_{BATCH}": "200"}
    kept = UserStatus.select().where(UserStatus.clear_status_at.is_null()).count()
    scheduler, worker = services("scheduler", "scheduler", **options), services("worker", *WORKER, **options)
    assert wait_until(lambda: succeeded() + JobRun.select().where(JobRun.state == "started").count() > 0, LIMIT)

    recovery = []
    for how in (FAST, IMMEDIATE):
        database.close()
        server.end(how)
        pass_time(0.5)
        server.start()
        began = time.monotonic()
        database.connect()
        goes_on()
        recovery.append(time.monotonic() - began)
    drained = wait_until(lambda: UserStatus.due(now()).count() == 0, LIMIT)

    alive = [service.process.poll() for service in (scheduler, worker)]
    twice = ticks_with_two_rows()
    wrong = (not drained) + twice + sum(status is not None for status in alive)
    outcome(25, injected=2, violations=wrong, recovery=recovery)
    assert max(recovery) < LIMIT
    assert drained
    assert UserStatus.select().where(UserStatus.clear_status_at.is_null()).count() == kept
    assert (twice, alive) == (0, [None, None])


def ticks_with_two_rows():
    rows = JobRun.select(JobRun.batch, JobRun.tick).where(JobRun.tick.is_null(False)).tuples()
    return len(rows) - len(set(rows))


def test_without_a_connection_left_everybody_waits_and_goes_on_once_there_is_one(serve, services, outcome):
    server = serve(max_connections="20")
    schedulers = [services(f"scheduler{number}", "scheduler", **EVERY_SECOND) for number in range(2)]
    worker = services("worker", *WORKER, **EVERY_SECOND)
    everyone = [*schedulers, worker]
    assert wait_until(lambda: succeeded() > 0, LIMIT), "nothing ever ran"

    with hoarded(server.url):
        hoarded_at = time.monotonic()
        before = len(failures(*everyone))
        pass_time(3)
        wait_until(lambda: len(failures(*everyone)) > before, LIMIT)
        complained = len(failures(*everyone)) - before
        seconds = time.monotonic() - hoarded_at
        alive = [service.process.poll() for service in everyone]
    recovery = goes_on()

    violations = sum(status is not None for status in alive) + (recovery == float("inf"))
    outcome(30, injected=1, violations=violations, recovery=[recovery])
    assert alive == [None] * 3
    assert complained > 0, "they had connections"
    # A turn for each tick and each poll, in each of two schedulers, and some for the worker.
    assert complained < 2 * 3 * len(BATCHES) * (seconds + 1), "somebody tries all the time"
    assert recovery < LIMIT / 2


@contextmanager
def hoarded(url):
    """Take all connections that there are, the others' too."""
    taken = []
    try:
        rounds_without = 0
        while rounds_without < 3:
            database.execute_sql(TERMINATE)
            try:
                taken.append(psycopg2.connect(url))
                rounds_without = 0
            except psycopg2.OperationalError:
                rounds_without += 1
        yield
    finally:
        for connection in taken:
            connection.close()


# A network that swallows everything

CLONE_NEWNET = 0x40000000
SCHEDULER_TIMEOUT, SLACK = 2.0, 2.0
NOTICED = 20.0
"""By the default timeouts a worker's query fails after 15 s; it says so after 3 s of trying to write that down elsewhere."""


class Network:
    """A network namespace of its own, with a loopback device that can be taken down."""

    def __init__(self):
        self._libc = ctypes.CDLL(None, use_errno=True)
        # A thread has a namespace, and what it starts inherits it.
        before = self._present()
        self._do(self._libc.unshare(CLONE_NEWNET))
        self._own = self._present()
        try:
            self._ip("up")
        finally:
            self._enter(before)
            os.close(before)

    def close(self):
        os.close(self._own)

    @contextmanager
    def inside(self):
        """Let what is started meanwhile be in this namespace."""
        before = self._present()
        self._enter(self._own)
        try:
            yield
        finally:
            self._enter(before)
            os.close(before)

    def down(self):
        """Swallow every packet from now on, of connections that are open, too."""
        with self.inside():
            self._ip("down")

    def up(self):
        with self.inside():
            self._ip("up")

    def _ip(self, how):
        subprocess.run(["ip", "link", "set", "lo", how], check=True)

    def _present(self):
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    def _enter(self, namespace):
        self._do(self._libc.setns(namespace, CLONE_NEWNET))

    def _do(self, result):
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@pytest.fixture
def network(capsys):
    try:
        if shutil.which("ip") is None:
            raise FileNotFoundError("there is no command ip")
        network = Network()
    except OSError as error:
        reason = f"PostgreSQL as a black hole was not tested, a network of our own cannot be made: {error}"
        with capsys.disabled():
            sys.stdout.write(f"\n{reason}\n")
        pytest.skip(reason)
    with closing(network):
        yield network


@pytest.fixture
def black_hole(network, urls, monkeypatch):
    """A network through which the settings lead to PostgreSQL; it can be taken down."""
    with network.inside():
        proxy, url = postgres_through(urls.database)
    with proxy:
        monkeypatch.setenv(PREFIX + "DATABASE_URL", url)
        yield network


WAITING = """
    select count(*) from pg_stat_activity where application_name = 'forgekeeper worker' and wait_event_type = 'Lock'
"""


def test_a_query_that_is_never_answered_fails_in_twenty_seconds_and_a_scheduler_s_in_two(
    database, black_hole, other, services, outcome
):
    sample.user_statuses(200)
    run = JobRun.claim_manual(BATCH, by="test")
    own = OFF | {"poll_interval": "0.5", "log_format": "json"}
    other.execute("lock table user_statuses in access exclusive mode")
    with black_hole.inside():
        scheduler = services("scheduler", "scheduler", **own)
        worker = services("worker", *WORKER, **own, database_lock_timeout="120", database_statement_timeout="120")
    assert wait_until(lambda: database.execute_sql(WAITING).fetchone()[0] == 1, LIMIT), "no query is waiting"

    everyone = (scheduler, worker)
    held_up = [Held(lambda who=who: [who.process.pid]) for who in everyone]
    black_hole.down()
    down_at = time.time()
    found = wait_until(lambda: all(noticed(who, down_at) for who in everyone), LIMIT)
    detected, busy = [noticed(who, down_at) for who in everyone], [held.seconds() for held in held_up]
    black_hole.up()
    up_at = time.monotonic()
    other.connection.rollback()
    again = wait_until(lambda: JobRun.get_by_id(run).state == "succeeded", LIMIT)
    recovery = time.monotonic() - up_at

    promised = (2 * (SCHEDULER_TIMEOUT + SLACK), NOTICED + SLACK)
    late = [seconds > most + held for seconds, most, held in zip(detected, promised, busy, strict=True)]
    outcome(26, injected=2, violations=sum(late) + (not found) + (not again), recovery=detected)
    sys.stdout.write(f"noticed after {detected} s, done {recovery:.1f} s after the network was back\n")
    assert found
    assert late == [False, False], (detected, busy)
    assert again


def noticed(service, since):
    """Return how long after *since* the service first said that something had failed, 0.0 if it has not."""
    moments = [datetime.fromisoformat(line["at"]).timestamp() for line in failures(service)]
    return min((moment - since for moment in moments if moment > since), default=0.0)


# Old versions that nobody may clean up

PINNED_ROWS = 50_000


def test_batches_stay_as_quick_while_somebody_holds_an_old_snapshot(database, other, outcome):
    database.execute_sql(
        """
        insert into user_statuses (user_id, clear_status_at)
        select number, now() - interval '1 hour' + number * interval '1 ms' from generate_series(1, %s) as number
        """,
        (PINNED_ROWS,),
    )
    database.execute_sql("analyze user_statuses")
    other.execute("set transaction isolation level repeatable read")
    other.execute("select count(*) from user_statuses")
    moments = [time.monotonic()]

    deadline = Deadline(timedelta(minutes=1), safe_point=lambda: moments.append(time.monotonic()))
    result = perform(user_status_cleanup, deadline=deadline)

    seconds = [later - earlier for earlier, later in pairwise(moments)]
    tenth = len(seconds) // 10
    # The quickest of many: what else the machine does makes none quicker.
    first, last = min(seconds[:tenth]), min(seconds[-tenth:])
    outcome(29, injected=1, violations=last > 5 * first, recovery=[])
    sys.stdout.write(f"a batch took {first * 1e3:.1f} ms at first and {last * 1e3:.1f} ms in the end\n")
    other.execute("select count(*) from user_statuses")
    assert other.fetchone() == (PINNED_ROWS,), "the snapshot was not pinned"
    assert (result.deleted, result.batches) == (PINNED_ROWS, PINNED_ROWS // BATCH_SIZE)
    assert last < 5 * first
