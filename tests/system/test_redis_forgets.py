"""A Redis that is emptied, killed, full, read-only or without its scripts, under workers that are at it."""

import threading
import time
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from math import inf

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

from demo.servers.folder import opened
from demo.servers.machine import redis_binary
from demo.servers.redis_server import start, url
from forgekeeper.batches import BATCHES
from forgekeeper.connections import client
from forgekeeper.database import now
from forgekeeper.delivery.broker import NAMESPACE
from forgekeeper.runs.ledger import JobRun
from tests.harness.waiting import wait_until

from .stock import NOTHING, Ours, cleaned_up, eventually, pass_time
from .worlds import CASES, PATIENT, World

CAP = 60.0
THREADS = 4
SHORT = {"dead_after": 1, "redis_timeout": 1}
ALIVE = {"dead_after": 3, "redis_timeout": 1}
"""The same where nobody dies: a busy machine must not be taken for a dead worker."""
EVERY_SECOND = "* * * * * *"
NEVER = datetime.min.replace(tzinfo=UTC)


@pytest.fixture
def ours(database, urls, tmp_path):
    with cleaned_up(Ours(urls.redis, tmp_path, proxied=False)) as (ours,):
        yield ours


# Emptied

EMPTIED = ("user_status_cleanup", "expired_job_artifacts", "git_ref_cleanup")
"""Batches whose sample data do not get into one another's way: their messages, leases and buckets are emptied."""
TIMES, EVERY = 8, 0.6
"""How often Redis is emptied, and seconds between."""


def test_batches_end_as_undisturbed_ones_though_redis_is_emptied(database, services, tmp_path, outcome):
    world = World.make(database, tmp_path)
    cases = [CASES[batch](world) for batch in EMPTIED]
    want = undisturbed(world, cases, services)
    off = {f"cron_{batch}": "off" for batch in BATCHES}
    paces = {name: pace for case in cases for name, pace in getattr(case, "pace", {}).items()}
    environment = {**world.environment, **off, **{f"cron_{batch}": EVERY_SECOND for batch in EMPTIED}, **paces}
    services("scheduler", "scheduler", **environment)
    services("worker", "worker", "--processes", "1", "--threads", str(THREADS), **environment)
    eventually(lambda: any(case.left() < case.total for case in cases))

    for _ in range(TIMES):
        client.flushall()
        pass_time(EVERY)
    client.flushall()
    last, last_at = now(), time.monotonic()
    drained = wait_until(lambda: not any(case.left() for case in cases), CAP)
    again = wait_until(lambda: all(newest_success(batch) > last for batch in EMPTIED), CAP)
    recovery = time.monotonic() - last_at if drained and again else inf

    def wrong_ones():
        return [batch for batch, case, state in zip(EMPTIED, cases, want, strict=True) if case.state() != state]

    # Somebody who does a thing once more, to no effect, may have his locks there at this moment.
    wrong = [] if wait_until(lambda: not wrong_ones(), CAP) else wrong_ones()
    outcome(13, injected=TIMES + 1, violations=len(wrong), recovery=[recovery])
    assert (drained, again, wrong) == (True, True, [])


def undisturbed(world, cases, services):
    """Say how things stand after runs that nobody disturbs, and seed the world anew."""
    for case in cases:
        case.seed()
    running = [services(f"undisturbed-{batch}", "run", batch, **world.environment | PATIENT) for batch in EMPTIED]
    assert [service.process.wait(CAP) for service in running] == [0] * len(cases)
    assert [case.left() for case in cases] == [0] * len(cases)
    want = [case.state() for case in cases]
    world.empty()
    for case in cases:
        case.seed()
    return want


def newest_success(batch):
    rows = JobRun.select().where(JobRun.batch == batch, JobRun.state == "succeeded")
    return max((row.finished_at for row in rows), default=NEVER)


# Killed

EACH = 0.005
"""Seconds between two messages."""
GUARANTEED = 2.0
"""What was acknowledged longer than this before the kill is in the log: Redis says a second, and two on a slow disk."""


class Sender(threading.Thread):
    """Puts messages in, again and again until each is acknowledged; notes when it was sent, and acknowledged."""

    def __init__(self, ours):
        super().__init__(daemon=True)
        self.acknowledged = {}
        self._ours = ours
        self.broker = RedisBroker(url=ours.url, namespace=NAMESPACE, middleware=[])
        self._stopped = threading.Event()

    def stop(self):
        self._stopped.set()
        self.join()
        self.broker.client.connection_pool.disconnect()

    def run(self):
        number = 0
        while not self._stopped.wait(EACH):
            sent_at = time.monotonic()
            try:
                self._ours.send("note", str(number), by=self.broker)
            except redis.RedisError:
                continue
            self.acknowledged[str(number)] = sent_at, time.monotonic()
            number += 1


def test_a_killed_redis_with_a_log_loses_no_message_acknowledged_a_second_before(database, tmp_path, go, outcome):
    binary = redis_binary()
    with opened(tmp_path / "redis") as site:
        server = start(site, binary)
        server.wait_until_ready()
        with closing(redis.Redis.from_url(url(site))) as look, cleaned_up(Ours(url(site), tmp_path)) as (ours,):
            try:
                ours.start(threads=THREADS, **SHORT)
                eventually(ours.ready)
                sender = Sender(ours)
                for number in range(THREADS):
                    ours.send("hold", f"at-work-{number}", str(go), by=sender.broker)
                eventually(lambda: len(ours.notes("began")) == THREADS)
                # They queue up behind those at work, for longer than may be lost.
                sender.start()
                eventually(lambda: len(sender.acknowledged) > 2 * GUARANTEED / EACH)

                alive_at = time.monotonic()
                server.process.kill()
                server.process.wait()
                dead_at = time.monotonic()
                server = start(site, binary)
                server.wait_until_ready()
                back_at = time.monotonic()
                go.touch()
                eventually(lambda: len(ours.notes("done", since=back_at)) > THREADS)
                resumed = ours.notes("done", since=back_at)[THREADS].at - back_at
                sender.stop()
                nothing_left = wait_until(lambda: not look.hlen(f"{NAMESPACE}:objects.msgs"), CAP)
            finally:
                server.stop()

    done = set(ours.done())
    lost = [times for key, times in sender.acknowledged.items() if key not in done]
    # What was acknowledged in time may have been noted late.
    too_early = [times for times in lost if times[1] < alive_at - GUARANTEED or times[0] > dead_at]
    outcome(14, injected=1, violations=len(too_early), recovery=[resumed], duplicates=ours.doubled())
    assert nothing_left
    assert too_early == [], f"{len(lost)} lost"


# Refusing to write


@contextmanager
def full():
    client.config_set("maxmemory", "1")
    try:
        yield "maxmemory"
    finally:
        client.config_set("maxmemory", "0")


@contextmanager
def read_only():
    client.replicaof("127.0.0.1", "1")
    try:
        yield "read only"
    finally:
        client.replicaof("no", "one")


@pytest.mark.parametrize(("number", "fault"), [(18, full), (19, read_only)])
def test_a_redis_that_takes_no_writes_refuses_new_messages_and_gets_rid_of_the_old_ones_afterwards(
    ours, go, outcome, number, fault
):
    at_work, delayed = [f"at-work-{n}" for n in range(THREADS)], [f"delayed-{n}" for n in range(20)]
    failing = [f"failing-{n}" for n in range(THREADS)]
    for _ in range(2):
        # Room for all, whichever of the two takes them.
        ours.start(threads=2 * THREADS, **ALIVE)
    eventually(ours.ready)
    for held, failed in zip(at_work, failing, strict=True):
        ours.send("hold", held, str(go))
        ours.send("fail_first", failed, str(go))
    eventually(lambda: len(ours.notes("began")) == 2 * THREADS)
    for key in delayed:
        ours.send("note", key, delay=2)
    eventually(ours.fetched)

    with fault() as complaint:
        with pytest.raises(redis.ResponseError, match=complaint):
            ours.send("note", "new")
        go.touch()
        # Longer than a worker may be silent, and than the delayed ones wait.
        pass_time(4.5)
    back_at, keys = time.monotonic(), at_work + failing + delayed
    ended = wait_until(lambda: ours.left() == NOTHING and ours.in_hand() == 0, CAP)
    recovery = time.monotonic() - back_at if ended else inf

    waits = ours.waits(keys, back_at)
    violations = waits.count(inf) + ours.dead() + ours.in_hand() + sum(ours.left()[1].values())
    outcome(number, injected=1, violations=violations, recovery=[recovery], duplicates=ours.doubled())
    assert (ours.done(), ended, ours.dead()) == (sorted(keys), True, 0)


# Without its scripts


def test_messages_are_done_without_an_error_while_scripts_are_flushed(ours, outcome):
    keys, flushed = [str(number) for number in range(400)], 0
    # With more patience than by default: that a server of a busy machine is late would be a complaint.
    ours.start(threads=THREADS, dead_after=60, redis_timeout=30, database_connect_timeout=30)
    eventually(ours.ready)
    ending = time.monotonic() + CAP
    began_at = time.monotonic()
    for key in keys:
        client.script_flush()
        flushed += 1
        ours.send("note", key)
    while ours.left() != NOTHING and time.monotonic() < ending:
        client.script_flush()
        flushed += 1

    done, complaints = ours.done(), [line for line in ours.lines() if line.get("level") not in {"info", "debug"}]
    violations = len(set(keys) - set(done)) + len(complaints)
    recovery = [time.monotonic() - began_at]
    outcome(20, injected=flushed, violations=violations, recovery=recovery, duplicates=ours.doubled())
    assert complaints == []
    assert (done, ours.left()) == (sorted(keys), NOTHING)
