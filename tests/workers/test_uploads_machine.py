"""An upload that completes while it is being reaped: in every order there is.

The scripts and Redis are real; the object store and the table of rows are the model's.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

import pytest
import redis

from forgekeeper.platform.connections import RedisClient
from forgekeeper.sources.register.entries import BeingDeleted, UploadClaim, UploadEntry
from forgekeeper.sources.register.redis_register import RedisRegister
from tests.harness.settings import settings_with
from workers.stale_direct_uploads import UPLOADS_REGISTER

LOCATION, PATH, DONE = "artifacts", "a/b", "done"
MEMBER = f"{LOCATION}:{PATH}"
ENTRY = UploadEntry(MEMBER, 0)
VISIBILITY = timedelta(hours=2)
uploads = RedisRegister(replace(UPLOADS_REGISTER, retry=UPLOADS_REGISTER.retry._replace(first=VISIBILITY)))


@pytest.fixture(scope="module")
def client(urls):
    with redis.Redis.from_url(urls.redis) as client:
        client.flushdb()
        yield client


@pytest.fixture
def bridging(client):
    """A client of a process whose settings say that the forge registers uploads in its hash."""
    bridging = RedisClient(connection_pool=client.connection_pool)
    bridging.settings = settings_with(uploads_register="hash")
    return bridging


# Every order


class Register(NamedTuple):
    """What the register knows of the one upload: its time in each set, and who holds it."""

    pending: str | None = None
    deleting: str | None = None
    failed: bool = False
    attempts: int = 0
    holder: str | None = None
    in_hash: str | None = None


@dataclass(frozen=True)
class World:
    """All there is between two steps.  A row counts from its commit on; *excused* is a loss that is not prevented."""

    next_steps: tuple[str, ...]
    register: Register
    stored: bool = False
    row: bool = False
    told: bool | None = None
    late: frozenset[str] = frozenset()
    pauses_left: int = 2
    lost: bool = False
    excused: bool = False


class Tally(NamedTuple):
    """In how many orders, and in how many of them a row names, or True was said of, an object that is gone."""

    orders: int
    losing: int


def to(then, **changes):
    """Make a step that the model takes alone, without Redis."""
    return lambda _world, _me: {"then": then, **changes}


def look(world, me):
    return {"then": "forget" if world.row else "check"}


def check(world, me):
    return {"then": DONE if me in world.late else "delete"}


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
    mine = uploads.claim(client, visibility=VISIBILITY, limit=10)
    if not mine.entries:
        return {"then": DONE}
    client.hset(uploads.keys.claims, MEMBER, me)
    return {"then": "look", "late": world.late - {me}}


def forget(client, world, me):
    uploads.forget(client, UploadClaim(me, [ENTRY]), [ENTRY])
    return {"then": DONE}


def fail(client, world, me):
    uploads.record_failure(client, UploadClaim(me, [ENTRY]), ENTRY)
    return {"then": DONE}


def put_back(client, world, me):
    uploads.put_back(client, UploadClaim(me, [ENTRY]), [ENTRY])
    return {"then": DONE}


# With a forge that registers uploads in its hash: it asks for no leave, and takes no lock.


def prepare_in_hash(client, world, me):
    client.hset(uploads.keys.hash, MEMBER, client.time()[0])
    return {"then": "put"}


def find(world, me):
    return {"then": "complete" if world.stored else DONE}


def complete_in_hash(client, world, me):
    client.hdel(uploads.keys.hash, MEMBER)
    return {"then": "commit"}


def commit(world, me):
    looked = {"check", "delete"}.intersection(world.next_steps)
    return {"then": DONE, "row": True, "excused": world.excused or bool(looked)}


def move(client, world, me):
    uploads.bridge.move_stale(client, limit=10)
    return {"then": DONE}


def delete(world, me):
    saving = {"complete", "commit"}.intersection(world.next_steps)
    return {"then": "forget", "stored": False, "excused": world.excused or bool(saving)}


IN_REDIS = {prepare_in_hash, complete_in_hash, move, prepare, complete, claim, forget, fail, put_back}
PRODUCER = {
    "prepare": [prepare],
    "put": [to("insert", stored=True)],
    "insert": [to("complete")],
    "complete": [complete],
    "commit": [to(DONE, row=True)],
    "roll back": [to(DONE)],
}
REAPER = {
    "claim": [claim],
    "look": [look],
    "check": [check],
    "delete": [to("forget", stored=False), to("fail"), to("put back")],
    "forget": [forget],
    "fail": [fail],
    "put back": [put_back],
}
FORGE = {
    "prepare": [prepare_in_hash],
    "put": [to("find", stored=True)],
    "find": [find],
    "complete": [complete_in_hash],
    "commit": [commit],
}
REAPER_OF_HASH = REAPER | {"claim": [claim, move], "delete": [delete, to("fail"), to("put back")]}


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
        if world.register.in_hash == "fresh":
            yield replace(world, register=world.register._replace(in_hash="stale"))
        if world.register.deleting == "held" and world.pauses_left:
            due = world.register._replace(deleting="due")
            yield replace(world, register=due, late=frozenset(self.names), pauses_left=world.pauses_left - 1)

    def made(self, world, process, act):
        me = self.names[process]
        if act in IN_REDIS:
            # What a script does depends on the register alone, and that is written anew before each: once tells all.
            key = act, me, world.register, world.late
            if key not in self.acted:
                self.write(world.register)
                self.acted[key] = act(self.client, world, me) | {"register": self.read()}
            changes = dict(self.acted[key])
        else:
            changes = act(world, me)
        then = changes.pop("then")
        after = self.moved(replace(world, **changes), process, then)
        return replace(after, lost=after.lost or self.broken(after))

    def broken(self, world):
        return not world.stored and not world.excused and (world.row or world.told is True)

    def moved(self, world, process, then):
        steps = world.next_steps
        return replace(world, next_steps=(*steps[:process], then, *steps[process + 1 :]))

    def write(self, register):
        pipe = self.client.pipeline()
        pipe.delete(
            uploads.keys.pending, uploads.keys.deleting, uploads.keys.failed, uploads.keys.attempts, uploads.keys.claims
        )
        pipe.delete(uploads.keys.hash, uploads.keys.cursor)
        if register.pending:
            pipe.zadd(uploads.keys.pending, {MEMBER: self.start - (4 * 3600 if register.pending == "stale" else 0)})
        if register.deleting:
            pipe.zadd(uploads.keys.deleting, {MEMBER: self.start + (2 * 3600 if register.deleting == "held" else -1)})
        if register.failed:
            pipe.zadd(uploads.keys.failed, {MEMBER: self.start})
        if register.attempts:
            pipe.hset(uploads.keys.attempts, MEMBER, register.attempts)
        if register.holder:
            pipe.hset(uploads.keys.claims, MEMBER, register.holder)
        if register.in_hash:
            pipe.hset(uploads.keys.hash, MEMBER, self.start - (4 * 3600 if register.in_hash == "stale" else 0))
        pipe.execute()

    def read(self):
        pipe = self.client.pipeline()
        for key in (uploads.keys.pending, uploads.keys.deleting, uploads.keys.failed):
            pipe.zscore(key, MEMBER)
        for key in (uploads.keys.attempts, uploads.keys.claims, uploads.keys.hash):
            pipe.hget(key, MEMBER)
        pending, deleting, failed, attempts, holder, in_hash = pipe.execute()
        return Register(
            pending and ("fresh" if pending >= self.start - 3600 else "stale"),
            deleting and ("held" if deleting >= self.start + 3600 else "due"),
            failed is not None,
            int(attempts or 0),
            holder and holder.decode(),
            in_hash and ("fresh" if int(in_hash) >= self.start - 3600 else "stale"),
        )


def test_no_order_of_completing_reaping_crashing_and_freezing_loses_an_object(client):
    explorer = Explorer(client, producer=PRODUCER, reaper=REAPER, second=REAPER)

    assert explorer.explore() == Tally(orders=57_677_114, losing=0)


def test_with_a_hash_an_object_is_lost_only_if_it_is_saved_after_the_last_look_or_while_it_goes(bridging):
    explorer = Explorer(bridging, producer=FORGE, reaper=REAPER_OF_HASH, second=REAPER_OF_HASH)

    assert explorer.explore() == Tally(orders=51_436_542, losing=0)
