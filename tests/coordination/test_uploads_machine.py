"""An upload that completes while it is being reaped: in every order there is, and ten thousand times at once.

The scripts and Redis are real; the object store and the table of rows are the model's.
"""

import random
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import NamedTuple

import pytest
import redis

from tests.harness.thorough import examples
from workers.stale_direct_uploads import failures
from workers.stale_direct_uploads import register as uploads
from workers.stale_direct_uploads.entries import BeingDeleted, Claim, Entry

LOCATION, PATH = "artifacts", "a/b"
MEMBER = f"{LOCATION}:{PATH}"
THREE_HOURS = timedelta(hours=3)
VISIBILITY = timedelta(hours=2)
DONE = "done"
CLAIM_TTL = 60
"""Seconds for which the engine acts on a claim."""


@pytest.fixture(scope="module")
def client(urls):
    with redis.Redis.from_url(urls.redis) as client:
        client.flushdb()
        yield client


# Every order


class Register(NamedTuple):
    """What the register knows of the one upload: its time in each set, and who holds it."""

    pending: str | None = None
    deleting: str | None = None
    failed: bool = False
    attempts: int = 0
    holder: str | None = None


@dataclass(frozen=True)
class World:
    """All there is between two steps.  A row counts from its commit on."""

    next_steps: tuple[str, ...]
    register: Register
    stored: bool = False
    row: bool = False
    came_late: bool = False
    told: bool | None = None
    late: frozenset[str] = frozenset()
    pauses_left: int = 2
    lost: bool = False
    reaped: bool = False
    locked: bool = False
    earlier: Register | None = None
    gone_back: bool = False


class Tally(NamedTuple):
    """In how many orders, and in how many of them a row names, or True was said of, an object that is gone."""

    orders: int
    losing: int


def prepare(client, world, me):
    try:
        uploads.prepare(client, LOCATION, PATH)
    except BeingDeleted:
        return {"then": DONE}
    return {"then": "put", "told": None}


def put(client, world, me):
    return {"then": "insert", "stored": True, "came_late": world.register.pending is None}


def insert(client, world, me):
    return {"then": "complete"}


def complete(client, world, me):
    told = uploads.complete(client, LOCATION, PATH)
    return {"then": "commit" if told else "roll back", "told": told}


def commit(client, world, me):
    return {"then": DONE, "row": True}


def roll_back(client, world, me):
    return {"then": DONE}


PRODUCER = {
    "prepare": [prepare],
    "put": [put],
    "insert": [insert],
    "complete": [complete],
    "commit": [commit],
    "roll back": [roll_back],
}


def claim(client, world, me):
    mine = uploads.claim(client, stale_after=THREE_HOURS, visibility=VISIBILITY, limit=10)
    if not mine.entries:
        return {"then": DONE}
    client.hset(uploads.CLAIMS, MEMBER, me)
    return {"then": "look", "late": world.late - {me}}


def look(client, world, me):
    return {"then": "forget" if world.row else "check"}


def check(client, world, me):
    return {"then": DONE if me in world.late else "delete"}


def delete(client, world, me):
    return {"then": "forget", "stored": False}


def refuse(client, world, me):
    return {"then": "fail"}


def stop_location(client, world, me):
    return {"then": "put back"}


def forget(client, world, me):
    uploads.forget(client, held_by(me), [Entry(MEMBER, 0)])
    return {"then": DONE}


def fail(client, world, me):
    uploads.fail(client, held_by(me), Entry(MEMBER, 0), backoff=VISIBILITY)
    return {"then": DONE}


def put_back(client, world, me):
    uploads.put_back(client, held_by(me), [Entry(MEMBER, 0)])
    return {"then": DONE}


REAPER = {
    "claim": [claim],
    "look": [look],
    "check": [check],
    "delete": [delete, refuse, stop_location],
    "forget": [forget],
    "fail": [fail],
    "put back": [put_back],
}


WITHOUT_REDIS = {put, insert, commit, roll_back, look, check, delete, refuse, stop_location}


def held_by(me):
    return Claim(me, [Entry(MEMBER, 0)])


class Explorer:
    """Walks through every order of the steps, each made on the real register.

    Orders that have come to the same world go on alike, so that each world is visited
    once and its orders are counted, not walked.
    """

    def __init__(self, client, **programs):
        self.client = client
        self.names = tuple(programs)
        self.programs = tuple(programs.values())
        self.start = client.time()[0]
        self.known = {}
        self.acted = {}

    def explore(self):
        return self.visit(World(tuple(next(iter(program)) for program in self.programs), Register()))

    def visit(self, world):
        if world not in self.known:
            if set(world.next_steps) == {DONE}:
                self.known[world] = Tally(1, int(world.lost))
            else:
                tallies = [self.visit(following) for following in self.following(world)]
                self.known[world] = Tally(*map(sum, zip(*tallies, strict=True)))
        return self.known[world]

    def following(self, world):
        for process, step in enumerate(world.next_steps):
            if step != DONE:
                yield self.moved(world, process, DONE)  # it crashes, and its open transaction with it
                for act in self.programs[process][step]:
                    yield self.made(world, process, act)
        if world.register.pending == "fresh":
            yield replace(world, register=world.register._replace(pending="stale"))
        if world.register.deleting == "held" and world.pauses_left:
            due = world.register._replace(deleting="due")
            yield replace(world, register=due, late=frozenset(self.names), pauses_left=world.pauses_left - 1)

    def made(self, world, process, act):
        me = self.names[process]
        if act in WITHOUT_REDIS:
            changes = act(self.client, world, me)
        else:
            # What a script does depends on the register alone, and that is written anew before each: once tells all.
            key = act, me, world.register, world.late
            if key not in self.acted:
                self.write(world.register)
                self.acted[key] = act(self.client, world, me) | {"register": self.read()}
            changes = dict(self.acted[key])
        then = changes.pop("then")
        after = self.moved(replace(world, **changes), process, then)
        return replace(after, lost=after.lost or self.broken(after))

    def broken(self, world):
        return not world.stored and (world.row or world.told is True)

    def moved(self, world, process, then):
        steps = world.next_steps
        return replace(world, next_steps=(*steps[:process], then, *steps[process + 1 :]))

    def write(self, register):
        pipe = self.client.pipeline()
        pipe.delete(uploads.PENDING, uploads.DELETING, uploads.FAILED, uploads.ATTEMPTS, uploads.CLAIMS)
        if register.pending:
            pipe.zadd(uploads.PENDING, {MEMBER: self.start - (4 * 3600 if register.pending == "stale" else 0)})
        if register.deleting:
            pipe.zadd(uploads.DELETING, {MEMBER: self.start + (2 * 3600 if register.deleting == "held" else -1)})
        if register.failed:
            pipe.zadd(uploads.FAILED, {MEMBER: self.start})
        if register.attempts:
            pipe.hset(uploads.ATTEMPTS, MEMBER, register.attempts)
        if register.holder:
            pipe.hset(uploads.CLAIMS, MEMBER, register.holder)
        pipe.execute()

    def read(self):
        pipe = self.client.pipeline()
        for key in (uploads.PENDING, uploads.DELETING, uploads.FAILED):
            pipe.zscore(key, MEMBER)
        for key in (uploads.ATTEMPTS, uploads.CLAIMS):
            pipe.hget(key, MEMBER)
        pending, deleting, failed, attempts, holder = pipe.execute()
        return Register(
            pending and ("fresh" if pending >= self.start - 3600 else "stale"),
            deleting and ("held" if deleting >= self.start + 3600 else "due"),
            failed is not None,
            int(attempts or 0),
            holder and holder.decode(),
        )

    def ends(self):
        return [world for world in self.known if set(world.next_steps) == {DONE}]


@pytest.fixture(scope="module")
def ours(client):
    explorer = Explorer(client, producer=PRODUCER, reaper=REAPER, second=REAPER)
    explorer.explore()
    return explorer


def test_no_order_of_completing_reaping_crashing_and_freezing_loses_an_object(ours):
    assert ours.explore() == Tally(orders=57_677_114, losing=0)


def see_stale(client, world, me):
    return {"then": "delete" if world.register.pending == "stale" else DONE}


def drop(client, world, me):
    client.zrem(uploads.PENDING, MEMBER)
    return {"then": DONE}


def complete_unheard(client, world, me):
    client.zrem(uploads.PENDING, MEMBER)
    return {"then": "commit"}


REFERENCE_PRODUCER = {**PRODUCER, "complete": [complete_unheard]}
# Its hash of start times is our sorted set here; what it does, and when, is its own.
REFERENCE_REAPER = {"see": [see_stale], "delete": [delete], "forget": [drop]}


@pytest.mark.parametrize(("reapers", "tally"), [(1, Tally(575, 96)), (2, Tally(79_172, 25_334))])
def test_the_order_of_the_reference_loses_objects(client, reapers, tally):
    programs = dict.fromkeys(["reaper", "second"][:reapers], REFERENCE_REAPER)

    assert Explorer(client, producer=REFERENCE_PRODUCER, **programs).explore() == tally


# Redis goes back


class GoingBack(Explorer):
    """Lets Redis go back once, from anywhere to anything it was before.  The producer's transaction holds the lock."""

    def following(self, world):
        yield from super().following(world)
        if world.earlier is None:
            yield replace(world, earlier=world.register)
        elif not world.gone_back:
            yield replace(world, register=world.earlier, gone_back=True)

    def moved(self, world, process, then):
        after = super().moved(world, process, then)
        return replace(after, locked=False) if (process, then) == (0, DONE) else after

    def broken(self, world):
        # What was told True and never committed names nothing, once its transaction is over.
        return not world.stored and (world.row or (world.locked and world.told is True))


def insert_then_ask(client, world, me):
    return {"then": "ask"}


def ask(client, world, me):
    return {"then": "roll back", "told": False} if world.reaped else {"then": "complete", "locked": True}


def ask_without_lock(client, world, me):
    return {**ask(client, world, me), "locked": False}


def remember(client, world, me):
    """Look and remember in one transaction, under the lock."""
    if world.locked:
        return {"then": DONE}
    return {"then": "forget"} if world.row else {"then": "check", "reaped": True}


WITHOUT_REDIS |= {insert_then_ask, ask, ask_without_lock, remember}
ASKING = {**PRODUCER, "insert": [insert_then_ask], "ask": [ask]}
REMEMBERING = {**REAPER, "look": [remember], "delete": [delete]}


@pytest.fixture(scope="module")
def going_back(client):
    return GoingBack(client, producer=ASKING, reaper=REMEMBERING)


def test_no_order_loses_an_object_that_a_row_names_though_redis_goes_back(going_back):
    assert going_back.explore() == Tally(orders=658_336, losing=0)


def test_without_what_is_remembered_an_upload_completes_whose_object_is_gone(client):
    reaper = {**REAPER, "delete": [delete]}

    assert GoingBack(client, producer=PRODUCER, reaper=reaper).explore() == Tally(612_768, 14_220)


# Ten thousand at once

UPLOADS, PRODUCERS, REAPERS = examples(10_000), 4, 3
FIVE_MINUTES = timedelta(minutes=5)


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
