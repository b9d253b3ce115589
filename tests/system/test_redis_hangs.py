"""A Redis that takes connections and never answers: how long senders are held up, and how workers and schedulers go on."""

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from math import inf

import pytest
import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

from forgekeeper.batches import BATCHES
from forgekeeper.connections import Limits, client
from forgekeeper.database import now
from forgekeeper.delivery.broker import broker
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import PREFIX
from tests.harness.waiting import wait_until

from .proxy import redis_through
from .service import ROOT
from .stock import NOTHING, QUEUE, Ours, cleaned_up, eventually

CAP = 30.0
LONGEST = {"enqueue_unique": 3.0, "actor.send": 3.0, "forgekeeper send": 4.5}
"""Two seconds are promised; a command has to end, too.  A busy machine may be late, but not every time."""
TIMES = 3
BEHIND = timedelta(seconds=10)
"""How far a scheduler's ledger may lag: the turn of a batch waits for Redis once, and the machine may be busy."""
BATCH = "user_status_cleanup"
CRON = {f"cron_{batch}": "off" for batch in BATCHES} | {f"cron_{BATCH}": "* * * * * *", "poll_interval": "0.5"}
THREADS = 4


@pytest.fixture
def ours(database, urls, tmp_path):
    with cleaned_up(Ours(urls.redis, tmp_path)) as (ours,):
        yield ours


@pytest.fixture
def stock_send(urls):
    """Let a bare Dramatiq broker, made as its manual makes it, send into a black hole; say how long that took."""
    proxy, _ = redis_through(urls.redis)
    sender = RedisBroker(host="127.0.0.1", port=proxy.port)
    sender.declare_queue(QUEUE)
    taken = []

    def send():
        began_at = time.monotonic()
        try:
            sender.enqueue(Message(QUEUE, "note", ("1",), {}, {}))
        except redis.RedisError:
            taken.append(time.monotonic() - began_at)

    def start():
        proxy.black_hole()
        thread = threading.Thread(target=send, daemon=True)
        thread.start()

        def seconds(limit):
            thread.join(max(0.0, limit))
            return taken[0] if taken else inf

        return seconds

    sender.client.ping()
    yield start
    proxy.close()


@contextmanager
def this_process_through(url, settings):
    """Let the Redis of this process be the one at *url*, with a scheduler's patience."""
    before, patience = client.connection_pool, Limits.of_scheduler(settings).redis.total_seconds()
    client.connection_pool = redis.BlockingConnectionPool.from_url(
        url,
        timeout=patience,
        socket_timeout=patience,
        socket_connect_timeout=patience,
        retry=before.connection_kwargs["retry"],
    )
    client.ping()
    try:
        yield
    finally:
        client.connection_pool.disconnect()
        client.connection_pool = before


def held_up(action):
    """Say for how long an action was held up before it failed, the quickest time of some."""

    def once():
        began_at = time.monotonic()
        with pytest.raises(redis.RedisError):
            action()
        return time.monotonic() - began_at

    return min(once() for _ in range(TIMES))


def command_held_up(redis_url):
    """Say for how long `forgekeeper send` is held up, from its first word to Redis to its end."""
    proxy, through = redis_through(redis_url)
    with proxy:
        proxy.black_hole()
        command = subprocess.Popen(
            [sys.executable, "-m", "forgekeeper.cli", "send", "stale_imports"],
            cwd=ROOT,
            env={**os.environ, f"{PREFIX}REDIS_URL": through},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        eventually(lambda: proxy.connections)
        asked_at = time.monotonic()
        _, said = command.communicate(timeout=CAP)
        seconds = time.monotonic() - asked_at
    assert (command.returncode, "cannot use Redis" in said) == (1, True), said
    return seconds


def newest_tick():
    return JobRun.newest_tick(BATCH)


def succeeded(since):
    """Say whether a run has succeeded that began after that moment."""
    return JobRun.select().where(JobRun.batch == BATCH, JobRun.state == "succeeded", JobRun.started_at > since).exists()


def in_time(condition, since):
    """Wait for the condition; say how long after that moment it was seen to hold, `inf` if it did not."""
    return time.monotonic() - since if wait_until(condition, CAP) else inf


def test_a_black_hole_holds_senders_up_for_two_seconds_and_all_go_on_afterwards(  # noqa: PLR0917, fixtures
    ours, services, settings, urls, stock_send, tmp_path, outcome, say
):
    go, keys, began = tmp_path / "go", [str(number) for number in range(THREADS - 1)], now()
    ours.start(threads=THREADS, queues=("cron", QUEUE))
    scheduler = services("scheduler", "scheduler", redis_url=ours.url, log_format="json", **CRON)
    for key in keys:
        ours.send("hold", key, str(go))
    eventually(lambda: len(ours.notes("began")) == len(keys) and succeeded(began))

    with this_process_through(ours.url, settings):
        ours.proxy.black_hole()
        hole_at, stock_seconds = time.monotonic(), stock_send()
        held = {
            "enqueue_unique": held_up(lambda: ours.send("note", "pushed")),
            "actor.send": held_up(lambda: broker.enqueue(Message(QUEUE, "note", ("sent",), {}, {}))),
        }
    held["forgekeeper send"] = min(command_held_up(urls.redis) for _ in range(TIMES))
    go.touch()
    behind = now() - newest_tick()
    ours.proxy.passing()
    back, back_at = now(), time.monotonic()
    ours.send("note", "new")
    waits = {
        "a new message is done": in_time(lambda: "new" in ours.done(), back_at),
        "a new run has succeeded": in_time(lambda: succeeded(back), back_at),
        "the old messages are ended": in_time(lambda: ours.left() == NOTHING, back_at),
    }
    seconds = stock_seconds(CAP - (time.monotonic() - hole_at))

    late = [name for name, one in held.items() if one > LONGEST[name]]
    missed = sum(wait == inf for wait in waits.values())
    outcome(17, injected=1, violations=len(late) + missed, recovery=list(waits.values()), duplicates=ours.doubled())
    outcome(17, injected=1, violations=int(seconds > LONGEST["actor.send"]), recovery=[seconds], stock=True)
    told = ", ".join(f"{name} {one:.1f} s" for name, one in held.items())
    say(f"held up by a black hole: {told}, bare Dramatiq {seconds:.1f} s")
    assert late == []
    assert behind < BEHIND
    assert scheduler.process.poll() is None
    assert inf not in waits.values(), waits
    assert set(keys) < set(ours.done())
    assert ours.doubled() == 0
