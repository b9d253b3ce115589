"""An upload that completes while it is being reaped: in every order there is, and ten thousand times at once.

The scripts and Redis are real; the object store and the table of rows are the model's.
"""

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import redis

from tests.harness.thorough import examples
from tests.harness.upload_register import (
    DONE,
    FIVE_MINUTES,
    MEMBER,
    THREE_HOURS,
    VISIBILITY,
    WITHOUT_REDIS,
    ask,
    held_by,
    insert_then_ask,
    remember,
)
from workers.stale_direct_uploads import failures
from workers.stale_direct_uploads import register as uploads
from workers.stale_direct_uploads.entries import BeingDeleted, Entry

LOCATION, PATH = "artifacts", "a/b"
CLAIM_TTL = 60
"""Seconds for which the engine acts on a claim."""


@pytest.fixture(scope="module")
def client(urls):
    with redis.Redis.from_url(urls.redis) as client:
        client.flushdb()
        yield client


# Every order


def prepare(client, world, me):
    try:
        uploads.prepare(client, LOCATION, PATH)
    except BeingDeleted:
        return {"then": DONE}
    return {"then": "put", "told": None}


def complete(client, world, me):
    told = uploads.complete(client, LOCATION, PATH)
    return {"then": "commit" if told else "roll back", "told": told}


def claim(client, world, me):
    mine = uploads.claim(client, stale_after=THREE_HOURS, visibility=VISIBILITY, limit=10)
    if not mine.entries:
        return {"then": DONE}
    client.hset(uploads.CLAIMS, MEMBER, me)
    return {"then": "look", "late": world.late - {me}}


def forget(client, world, me):
    uploads.forget(client, held_by(me), [Entry(MEMBER, 0)])
    return {"then": DONE}


def fail(client, world, me):
    uploads.fail(client, held_by(me), Entry(MEMBER, 0), backoff=VISIBILITY)
    return {"then": DONE}


def put_back(client, world, me):
    uploads.put_back(client, held_by(me), [Entry(MEMBER, 0)])
    return {"then": DONE}


# Redis goes back


def ask_without_lock(client, world, me):
    return {**ask(client, world, me), "locked": False}


WITHOUT_REDIS |= {insert_then_ask, ask, ask_without_lock, remember}


# Ten thousand at once

UPLOADS, PRODUCERS, REAPERS = examples(10_000), 4, 3


class Crash(Exception):
    """The thread's work is abandoned where it stands."""


class Clock:
    """A monotonic clock that leaps, and takes Redis's register along, so that claims run out."""

    def __init__(self, client):
        self.client = client
        self.seconds = 0.0
        self.leaping = threading.Condition()

    def __call__(self):
        return self.seconds

    def leap(self):
        with self.leaping:
            self.seconds += FIVE_MINUTES.total_seconds()
            self.client.eval(
                "for _, member in ipairs(redis.call('zrange', KEYS[1], 0, -1)) do"
                " redis.call('zincrby', KEYS[1], -300, member) end",
                1,
                uploads.DELETING,
            )
            self.leaping.notify_all()

    def freeze(self):
        """Stand still until the clock has leapt."""
        with self.leaping:
            before = self.seconds
            self.leaping.wait_for(lambda: self.seconds > before, timeout=30)


@dataclass
class Storm:
    """The world that all threads share."""

    client: redis.Redis
    clock: Clock
    lock: threading.Lock = field(default_factory=threading.Lock)
    objects: set = field(default_factory=set)
    rows: set = field(default_factory=set)
    completed: set = field(default_factory=set)
    refused: set = field(default_factory=set)
    seen: Counter = field(default_factory=Counter)
    producing: threading.Event = field(default_factory=threading.Event)

    def note(self, event):
        with self.lock:
            self.seen[event] += 1


def produce(storm, rng, paths):
    def step():
        if rng.random() < 0.01:
            storm.note("producer crashed")
            raise Crash

    while paths:
        some = [paths.pop() for _ in range(min(len(paths), rng.randint(1, 8)))]
        for path in some:
            uploads.prepare(storm.client, LOCATION, path)
            with storm.lock:
                storm.objects.add(path)
        storm.client.zadd(uploads.PENDING, {f"{LOCATION}:{path}": 1 for path in some}, xx=True)
        rng.shuffle(some)
        for path in some:
            try:
                step()
                told = uploads.complete(storm.client, LOCATION, path)
                with storm.lock:
                    (storm.completed if told else storm.refused).add(path)
                step()
                if told:
                    with storm.lock:
                        storm.rows.add(path)
                        storm.seen["row without object"] += path not in storm.objects
            except Crash:
                continue


def reap(storm, rng):
    while storm.producing.is_set():
        try:
            reap_once(storm, rng)
        except Crash:
            storm.note("reaper crashed")


def reap_once(storm, rng):
    client, clock = storm.client, storm.clock

    def step():
        dice = rng.random()
        if dice < 0.01:
            raise Crash
        if dice < 0.02:
            storm.note("reaper frozen")
            clock.freeze()

    with clock.leaping:  # a leap inside the call would age Redis and not the claim
        mine = uploads.claim(client, stale_after=THREE_HOURS, visibility=FIVE_MINUTES, limit=rng.randint(1, 6))
        taken = clock()
    step()
    with storm.lock:
        named = [entry for entry in mine.entries if entry.path in storm.rows]
    for entry in mine.entries:
        step()
        if clock() > taken + CLAIM_TTL:
            storm.note("claim dropped")
            return
        step()
        dice = rng.random()
        if entry in named:
            storm.note("claimed though completed")
            uploads.forget(client, mine, [entry])
        elif dice < 0.05:
            uploads.fail(client, mine, entry, backoff=timedelta(minutes=1))
        elif dice < 0.07:
            uploads.put_back(client, mine, [entry])
        else:
            with storm.lock:
                storm.objects.discard(entry.path)
            step()
            uploads.forget(client, mine, [entry])


def drain(storm):
    """Let one run without faults finish what the storm has left."""
    client = storm.client
    failures.retry(client)
    while client.zcard(uploads.PENDING) or client.zcard(uploads.DELETING):
        storm.clock.leap()
        mine = uploads.claim(client, stale_after=THREE_HOURS, visibility=FIVE_MINUTES, limit=1000)
        storm.objects -= {entry.path for entry in mine.entries} - storm.rows
        uploads.forget(client, mine, mine.entries)


def test_ten_thousand_uploads_complete_while_they_are_reaped_and_none_is_lost(urls, client):
    client.flushdb()
    shared = redis.Redis.from_url(urls.redis)
    storm = Storm(shared, Clock(shared))
    paths = [[f"{n}/{producer}:{n}" for n in range(UPLOADS // PRODUCERS)] for producer in range(PRODUCERS)]
    producers = [threading.Thread(target=produce, args=(storm, random.Random(n), paths[n])) for n in range(PRODUCERS)]
    reapers = [threading.Thread(target=reap, args=(storm, random.Random(100 + n))) for n in range(REAPERS)]

    storm.producing.set()
    for thread in producers + reapers:
        thread.start()
    while any(thread.is_alive() for thread in producers):
        producers[0].join(timeout=0.01)
        storm.clock.leap()
    storm.producing.clear()
    while any(thread.is_alive() for thread in reapers):
        reapers[0].join(timeout=0.01)
        storm.clock.leap()
    drain(storm)
    shared.close()

    assert storm.seen["row without object"] == storm.seen["claimed though completed"] == 0
    assert storm.rows <= storm.completed <= storm.objects
    assert storm.objects == storm.completed
    assert client.keys("*") == []
    # The race was run in earnest, and everything that may happen did.
    assert min(len(storm.completed), len(storm.refused)) > UPLOADS / 20
    for event in ("producer crashed", "reaper crashed", "reaper frozen", "claim dropped"):
        assert storm.seen[event] > UPLOADS / 1_000
