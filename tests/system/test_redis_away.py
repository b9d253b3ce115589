"""Workers, schedulers and senders whose Redis cannot be reached, hangs, or loses a reply, beside bare Dramatiq."""

import time
from collections import Counter
from contextlib import contextmanager
from hashlib import sha1
from math import inf

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

from forgekeeper.connections import client
from forgekeeper.delivery.broker import NAMESPACE
from forgekeeper.locks import leases
from forgekeeper.scripts import FOLDERS
from tests.harness.waiting import wait_until

from .stock import NOTHING, QUEUE, Ours, Stock, cleaned_up, eventually, pass_time

CAP = 20.0
"""Nothing of ours is waited for any longer than this."""
GRACE = 5.0
"""Seconds that bare Dramatiq is given when ours are done."""
AWAY = 2.0
"""Seconds that Redis is away for."""
THREADS = 4
SHORT = {"dead_after": 1, "redis_timeout": 1}


@pytest.fixture
def sides(database, urls, tmp_path):
    with cleaned_up(Ours(urls.redis, tmp_path), Stock(urls.redis, tmp_path)) as sides:
        yield sides


@pytest.fixture
def ours(database, urls, tmp_path):
    with cleaned_up(Ours(urls.redis, tmp_path)) as (ours,):
        yield ours


# Away for a moment


@contextmanager
def unreachable(sides):
    for side in sides:
        side.proxy.refuse()
        side.proxy.cut()
    yield
    pass_time(AWAY)
    for side in sides:
        side.proxy.passing()


@contextmanager
def closing_all_connections(sides):
    client.client_kill_filter(_type="normal", skipme=True)
    yield


@pytest.mark.parametrize("fault", [unreachable, closing_all_connections])
def test_what_was_delayed_or_at_work_is_done_once_redis_is_back(sides, go, outcome, fault):
    at_work = [f"at-work-{number}" for number in range(THREADS)]
    delayed = [f"delayed-{number}" for number in range(20)]
    for side in sides:
        side.start(threads=THREADS, **(SHORT if side is sides[0] else {}))
        for key in at_work:
            side.send("hold", key, str(go))
    eventually(lambda: all(len(side.notes("began")) == THREADS for side in sides))
    for side in sides:
        for key in delayed:
            side.send("note", key, delay=2 * AWAY)
    eventually(lambda: all(side.fetched() for side in sides))
    due_at = time.monotonic() + 2 * AWAY

    with fault(sides):
        go.touch()
    ours, keys = sides[0], at_work + delayed
    ended = wait_until(lambda: ours.left() == NOTHING and ours.in_hand() == 0, CAP)
    wait_until(lambda: inf not in sides[1].waits(keys, due_at), GRACE)

    for side in sides:
        waits = side.waits(keys, due_at)
        violations, late = waits.count(inf), [wait for wait in waits if wait]
        outcome(15, injected=1, violations=violations, recovery=late, duplicates=side.doubled(), stock=side is not ours)
    assert ours.done() == sorted(keys)
    assert ended, "messages are left"
    assert not ours.said("messages reclaimed")


def test_what_fails_while_redis_is_away_is_tried_again_afterwards(sides, go, outcome):
    keys = [str(number) for number in range(THREADS)]
    for side in sides:
        side.start(threads=THREADS, **(SHORT if side is sides[0] else {}))
        for key in keys:
            side.send("fail_first", key, str(go))
    eventually(lambda: all(len(side.notes("began")) == THREADS for side in sides))

    with unreachable(sides):
        go.touch()
        eventually(lambda: all(len(side.notes("failed")) == THREADS for side in sides))
    back_at = time.monotonic()
    # Until there is nothing left that could be tried again.
    wait_until(lambda: all(side.left() == NOTHING for side in sides), CAP)

    ours = sides[0]
    for side in sides:
        waits, dead = side.waits(keys, back_at), side.dead()
        outcome(
            21,
            injected=len(keys),
            violations=max(0, waits.count(inf) - dead),
            recovery=waits,
            duplicates=side.doubled(),
            stock=side is not ours,
        )
    assert ours.done() == keys


# Slow


def test_threads_that_reach_their_time_limit_while_redis_stalls_live_on(sides, go, tmp_path, outcome):
    ours, keys = sides[0], [str(number) for number in range(THREADS)]
    for side in sides:
        side.start(threads=THREADS, **(SHORT | {"redis_timeout": 5} if side is ours else {}))
    eventually(lambda: all(side.ready() for side in sides))
    for side in sides:
        for key in keys:
            side.send("fail_first_in_time", key, str(go))
    eventually(lambda: all(len(side.notes("began")) == THREADS for side in sides))
    processes = [master.children for master in ours.masters]

    # They fail before the limit, and Redis answers after it.
    client.client_pause(2_500, all=True)
    go.touch()
    paused_at = time.monotonic()
    wait_until(lambda: set(ours.done()) == set(keys), CAP)
    wait_until(lambda: set(sides[1].done()) == set(keys), GRACE)
    waits = [side.waits(keys, paused_at) for side in sides]
    later = tmp_path / "later"
    for side in sides:
        for number in range(THREADS):
            side.send("hold", f"later-{number}", str(later))

    def alive(side):
        return len([note for note in side.notes("began") if note.key.startswith("later")])

    wait_until(lambda: alive(ours) == THREADS, CAP)
    wait_until(lambda: alive(sides[1]) == THREADS, GRACE)
    for side, times in zip(sides, waits, strict=True):
        dead = THREADS - alive(side)
        violations = dead + times.count(inf)
        outcome(
            22,
            injected=THREADS,
            violations=violations,
            recovery=times,
            duplicates=side.doubled(),
            stock=side is not ours,
        )
    assert alive(ours) == THREADS
    assert ours.done() == keys
    assert processes == [master.children for master in ours.masters]
    later.touch()
    eventually(lambda: ours.left() == NOTHING)


# A lost reply


def sent(script, *, key=None):
    """Return what a request for the script contains, one whose first key is *key* if that is given."""
    (source,) = (file.read_bytes() for folder in FOLDERS if (file := folder / f"{script}.lua").is_file())
    start = f"{sha1(source).hexdigest()}\r\n"
    return f"{start}$1\r\n7\r\n${len(key)}\r\n{key}\r\n".encode() if key else start.encode()


LOST = {
    "message_fetch": ("note", sent("message_fetch", key=f"{NAMESPACE}:{QUEUE}")),
    "message_steps:start": ("note", b"\r\nstart\r\n"),
    "message_steps:ack": ("note", b"\r\nack\r\n"),
    "message_retry": ("fail_first", sent("message_retry")),
    "lease_acquire": ("with_lease", sent("lease_acquire")),
    "lease_release": ("with_lease", sent("lease_release")),
}


def test_a_lost_reply_neither_loses_nor_doubles_a_message_nor_leaves_a_lease(ours, go, outcome):
    go.touch()
    master = ours.start(threads=THREADS, **SHORT)
    eventually(ours.ready)
    # From here on scripts are asked for by their digest.
    for number, (actor, _) in enumerate(LOST.values()):
        ours.send(actor, f"first-{number}", *([str(go)] if actor == "fail_first" else []))
    eventually(lambda: ours.left() == NOTHING)
    keys = []

    waits = {}
    for name, (actor, request) in LOST.items():
        key = f"{name}-lost"
        keys.append(key)
        # Read first: an idle worker asks for messages all the time, and may lose its reply at once.
        before = ours.proxy.dropped
        ours.proxy.drop_replies(1, to=request)
        ours.send(actor, key, *([str(go)] if actor == "fail_first" else []))
        eventually(lambda before=before: ours.proxy.dropped > before)
        lost_at = time.monotonic()
        wait_until(lambda: ours.left() == NOTHING and ours.in_hand() == 0, CAP)
        waits[name] = time.monotonic() - lost_at

    done = Counter(ours.done())
    missing = sum(done[key] == 0 for key in keys)
    ghosts = len(leases(client))
    violations = missing + ghosts + ours.in_hand()
    outcome(16, injected=len(LOST), violations=violations, recovery=waits.values(), duplicates=ours.doubled())
    assert {key: done[key] for key in keys} == dict.fromkeys(keys, 1)
    assert leases(client) == []
    assert (ours.left(), ours.in_hand()) == (NOTHING, 0)
    assert ours.masters == [master]
    assert max(waits.values()) < CAP / 2


def test_a_message_whose_senders_reply_is_lost_is_sent_again_and_done_once(ours, outcome):
    sender = RedisBroker(url=f"{ours.url}?socket_timeout=4", namespace=NAMESPACE, middleware=[])
    assert ours.send("note", "first", by=sender)
    ours.proxy.drop_replies(1, to=sent("enqueue_unique"))
    with pytest.raises(redis.TimeoutError):
        ours.send("note", "lost", by=sender)

    lost_at = time.monotonic()
    again = ours.send("note", "lost", by=sender)
    ours.start(threads=THREADS, **SHORT)
    done = wait_until(lambda: ours.left() == NOTHING, CAP)

    waits = ours.waits(["lost"], lost_at)
    outcome(16, injected=1, violations=waits.count(inf), recovery=waits, duplicates=ours.doubled())
    assert again is False, "the first one has arrived"
    assert (done, ours.done()) == (True, ["first", "lost"])
    sender.client.connection_pool.disconnect()
