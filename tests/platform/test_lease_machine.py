"""Leases in any order of events: several workers, crashes, pauses, lost replies and networks that deliver late.

The scripts, Redis and the leases are real; time is not.  It passes when the machine says
so, for Redis's keys and the workers' clocks alike, or in a pause for the keys alone:
that is what a suspended machine sees.
"""

from collections import Counter
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import NamedTuple

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis.backoff import NoBackoff
from redis.retry import Retry

from forgekeeper.platform.coordination.leases import (
    LEASE_KEY_PREFIX,
    LeaseLost,
    LeaseTaken,
    break_lease,
    list_leases,
)
from tests.harness.leases import hold_lease
from tests.harness.thorough import examples, machine_settings, whole_only

NAMES = ["clean_project_refs:7", "clean_project_refs:8"]
WORKERS = range(3)
# So long that nothing is renewed in the background: here that is an event too.  Whole hours pass,
# and none ends on the instant that something expires.
TTL = timedelta(hours=3.5)
AT_MOST = timedelta(hours=10.5)
HALF_AN_HOUR = 1_800_000
FULL = 7


class Entry(NamedTuple):
    """What Redis has of a lease; *left* is half hours."""

    owner: bytes
    left: int


class Worker(redis.Redis):
    """A worker's client: no way to the server while *away*, and no reply to its next *lose* writes."""

    def __init__(self, **parameters):
        super().__init__(**parameters)
        self.reset()

    def reset(self):
        self.now = 0.0
        self.away = False
        self.lose = 0
        self.sent = []
        self.name = self.held = None
        self.uninformed = False  # away, and the lease is not what its clock makes it believe
        self.slept = False
        self.stack = ExitStack()

    def clock(self):
        return self.now

    def execute_command(self, *args, **options):
        if self.away:
            raise redis.ConnectionError("no way to the server")
        reply = super().execute_command(*args, **options)
        if args[0] == "EVALSHA":
            self.sent.append(args)
            if self.lose:
                self.lose -= 1
                raise redis.TimeoutError("the reply was lost")
        return reply

    @contextmanager
    def without_replies(self, lost):
        self.lose = lost
        try:
            yield
        finally:
            self.lose = 0

    @property
    def owner(self):
        return self.held.value.encode()

    def trusts(self):
        try:
            self.held.check()
        except LeaseLost:
            return False
        return True


class Sequences(RuleBasedStateMachine):
    workers = server = None
    examples = 0

    def __init__(self):
        super().__init__()
        type(self).examples += 1
        self.server.flushdb()
        for worker in self.workers:
            worker.reset()

    who = st.sampled_from(WORKERS)
    name = st.sampled_from([NAMES[0], *NAMES])
    lost = st.sampled_from([0, 0, 0, 1, 2])
    hours = st.sampled_from([1, 2, 4])

    @rule(who=who, name=name, lost=lost)
    def take(self, who, name, lost):
        worker = self.pick(who, holding=False)
        if worker is None:
            return
        before = self.look().get(name)
        free = before is None
        try:
            with worker.without_replies(lost):
                worker.held = worker.stack.enter_context(
                    hold_lease(worker, name, ttl=TTL, max_duration=AT_MOST, holder=f"worker {who}", clock=worker.clock)
                )
        except LeaseTaken:
            assert not free, "a free lease was refused"
            assert self.look().get(name) == before, "who was refused changed something"
        except redis.RedisError:
            assert worker.away or lost == 2
        else:
            assert free, "a lease was taken from its holder"
            worker.name, worker.slept = name, False

    @rule(who=who, lost=lost)
    def check(self, who, lost):
        worker = self.pick(who, holding=True)
        if worker is None:
            return
        before = self.look()
        stale = not self.owns(worker, before)
        with worker.without_replies(lost):
            trusted = worker.trusts()
        if stale:
            assert self.look() == before, "a stale token renewed"
            # Without a reply it goes by its clock, as if it were away.
            assert not trusted or lost or worker.away, "a stale token was trusted"
        if trusted:
            assert worker.now - worker.held._taken_at < AT_MOST.total_seconds()
            worker.slept &= bool(lost or worker.away)
        if trusted and not stale and not worker.away:
            assert self.look()[worker.name] == Entry(worker.owner, FULL), "it was not renewed"

    @rule()
    def check_all(self):
        trusted = Counter(
            worker.name for worker in self.workers if worker.held and not worker.uninformed and worker.trusts()
        )
        assert set(trusted.values()) <= {1}, "two trusted holders"

    @rule(who=who, lost=lost, crash=st.booleans())
    def leave(self, who, lost, crash):
        worker = self.pick(who, holding=True)
        if worker is None:
            return
        before = self.look()
        entry = before.get(worker.name)
        ours = entry is not None and entry.owner == worker.owner
        away, worker.away = worker.away, worker.away or crash
        with worker.without_replies(lost):
            worker.stack.close()
        worker.away = away
        if ours and not away and not crash:
            del before[worker.name]
        assert self.look() == before, "it was not given back, or was another's"
        worker.held = worker.name = None

    @rule(who=who, holding=st.booleans())
    def part(self, who, holding):
        """Cut a worker off, or let it come back."""
        worker = self.pick(who, holding=holding) or self.workers[who]
        worker.away = not worker.away
        worker.uninformed = (
            worker.away and worker.held is not None and (worker.slept or not self.owns(worker, self.look()))
        )

    @rule(hours=hours, who=st.sampled_from([None, None, None, *WORKERS]))
    def wait(self, hours, who):
        """Let time pass; where it is said who, that one's clock does not show it."""
        asleep = None if who is None else self.workers[who]
        if asleep:
            asleep.slept = True
            asleep.uninformed = asleep.away
        self.pass_time(hours, [worker for worker in self.workers if worker is not asleep])

    @rule(name=st.sampled_from([*NAMES, None]))
    def take_away(self, name):
        """Break a lease, or flush all of them."""
        before = self.look()
        if name is None:
            self.server.flushdb()
            before = {}
        else:
            entry = before.pop(name, None)
            assert break_lease(self.server, name) == (entry is not None)
        assert self.look() == before
        for worker in self.workers:
            worker.uninformed |= worker.away and name in {None, worker.name}

    @rule(who=who, which=st.integers(0, 99))
    def echo(self, who, which):
        """Deliver something that a worker has sent again, late."""
        worker = self.workers[who]
        if worker.sent and not worker.away:
            command = worker.sent[which % len(worker.sent)]
            key, owner = command[3], command[-1]
            name = key.removeprefix(LEASE_KEY_PREFIX)
            before = self.look().get(name)
            worker.execute_command(*command)
            if before and before.owner != owner.encode():
                assert self.look().get(name) == before, "a stale token changed something"

    @invariant()
    def at_most_one_is_trusted(self):
        """Asking would renew: of a worker who is not away, what Redis has stands for the answer."""
        seen = self.look()
        trusted = Counter(
            worker.name
            for worker in self.workers
            if worker.held and not worker.uninformed and (worker.trusts() if worker.away else self.owns(worker, seen))
        )
        assert set(trusted.values()) <= {1}, "two trusted holders"

    def teardown(self):
        for worker in self.workers:
            worker.away = True
            worker.stack.close()
            worker.reset()
        self.pass_time(4, [])
        assert list_leases(self.server) == []
        for worker, name in zip(self.workers, NAMES, strict=False):
            with hold_lease(worker, name, ttl=TTL, holder="after all") as held:
                held.check()
        assert self.server.keys() == []

    def pass_time(self, hours, clocks):
        seconds = hours * 3600
        for name in self.look():
            self.server.pexpire(LEASE_KEY_PREFIX + name, self.server.pttl(LEASE_KEY_PREFIX + name) - seconds * 1_000)
        for worker in clocks:
            worker.now += seconds

    def look(self):
        """Read what Redis has, by name."""
        with self.server.pipeline(transaction=False) as pipe:
            for name in NAMES:
                pipe.get(LEASE_KEY_PREFIX + name).pttl(LEASE_KEY_PREFIX + name)
            read = pipe.execute()
        seen = zip(NAMES, read[::2], read[1::2], strict=True)
        return {name: Entry(owner, round(left / HALF_AN_HOUR)) for name, owner, left in seen if owner is not None}

    def owns(self, worker, seen):
        """Say whether the worker's lease is its own and has not expired."""
        entry = seen.get(worker.name)
        return entry is not None and entry.owner == worker.owner

    def pick(self, which, *, holding):
        able = [worker for worker in self.workers if (worker.held is not None) == holding]
        return able[which % len(able)] if able else None


@pytest.fixture
def workers(urls):
    with redis.BlockingConnectionPool.from_url(urls.redis, retry=Retry(NoBackoff(), 0)) as pool:
        yield [Worker(connection_pool=pool) for _ in WORKERS]


@whole_only
def test_no_sequence_of_events_makes_two_trusted_holders_or_lets_a_stale_token_change_anything(workers, monkeypatch):
    server = redis.Redis(connection_pool=workers[0].connection_pool)
    monkeypatch.setattr(Sequences, "workers", workers)
    monkeypatch.setattr(Sequences, "server", server)
    monkeypatch.setattr(Sequences, "examples", 0)

    run_state_machine_as_test(Sequences, settings=machine_settings(800, steps=25))

    assert Sequences.examples >= examples(800)
