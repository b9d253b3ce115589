from collections import Counter

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.harness.buckets import MINUTE, Lossy
from tests.harness.thorough import examples, sequences
from workers.expired_job_artifacts import buckets
from workers.expired_job_artifacts.buckets import AVAILABLE, OCCUPIED, OWNERS, Hold


@pytest.fixture
def client(urls):
    with redis.BlockingConnectionPool.from_url(urls.redis) as pool:
        client = Lossy(connection_pool=pool)
        client.flushdb()
        yield client


def pass_time(client, duration):
    """What the scripts see of time is how far the scores lie back."""
    with client.pipeline(transaction=False) as pipe:
        for member in client.zrange(OCCUPIED, 0, -1):
            pipe.zincrby(OCCUPIED, -duration.total_seconds(), member)
        pipe.execute()


def occupied(client):
    return [bucket.number for bucket in buckets.held(client)]


# Tidying


# What others left in the keys


# Claiming


# Renewing


# Releasing


# Looking


# Any order of events.  An implementation's operations are generators: it is suspended at each
# yield, between two commands, and others act.


class Ours:
    def __init__(self, client):
        self.client = client

    def claim(self, limit):
        free = [number for number in buckets.available(self.client) if number < limit]
        bucket = buckets.claim(self.client, limit)
        assert (bucket is None) == (not free)
        return bucket
        yield

    def renew(self, bucket):
        return buckets.renew(self.client, bucket)
        yield

    def release(self, bucket):
        return buckets.release(self.client, bucket)
        yield

    def tidy(self, limit):
        buckets.tidy(self.client, limit)
        return
        yield


class Worker:
    """What one worker believes."""

    bucket = None
    silent = 0  # minutes since Redis last heard of it


WORKERS = range(7)
PARENT = -1


class World:
    """Workers and a parent in front of one Redis, and what is wrong with the state they brought it into."""

    def __init__(self, client, implementation, limits=(5, 10)):
        client.flushdb()
        client.sent.clear()
        self.client = client
        self.implementation = implementation(client)
        self.workers = [Worker() for _ in WORKERS]
        self.suspended = {}
        self.limits = limits
        self.limit = self.tidied = limits[0]
        self.faults = Counter()
        self.tidy()
        while self.suspended:
            self.tidy()

    def claim(self, who, lost=0):
        who = self._pick(who, holding=False)
        if who is None:
            return
        worker = self.workers[who]

        def claimed(bucket):
            worker.bucket, worker.silent = bucket, 0

        self._go(who, lambda: self.implementation.claim(self.limit), claimed, lost)

    def renew(self, who, lost=0):
        who = self._pick(who, holding=True)
        if who is None:
            return
        worker = self.workers[who]

        def renewed(hold):
            if hold is None:
                return
            if hold is Hold.LOST:
                self._note(worker.silent < 10, "a live owner lost his bucket")
                worker.bucket = None
                return
            self._note((hold is Hold.SCALED_DOWN) != (worker.bucket.number >= self.tidied), "wrong about the scale")
            worker.silent = 0

        self._go(who, lambda: self.implementation.renew(worker.bucket), renewed, lost)

    def release(self, who, lost=0):
        who = self._pick(who, holding=True)
        if who is None:
            return
        worker = self.workers[who]
        bucket, worker.bucket = worker.bucket, None
        alive = worker.silent < 10

        def released(was_ours):
            self._note(alive and not was_ours and not lost, "a live owner could not release")

        self._go(who, lambda: self.implementation.release(bucket), released, lost)

    def proceed(self, which):
        """Let somebody go on who was suspended between two commands."""
        if self.suspended:
            self._go(list(self.suspended)[which % len(self.suspended)])

    def crash(self, who):
        self.suspended.pop(who, None)
        self.workers[who].bucket = None

    def tidy(self):
        def tidied(_):
            self.tidied = self.limit
            available, occupied, _ = self._state()
            self._note(
                available | {number for number in occupied if number < self.limit} != set(range(self.limit)), "lost"
            )
            self._note(any(number >= self.limit for number in available), "kept after a scale-down")

        self._go(PARENT, lambda: self.implementation.tidy(self.limit), tidied)

    def scale(self):
        if PARENT not in self.suspended:
            self.limit = sum(self.limits) - self.limit

    def wait(self, minutes):
        pass_time(self.client, minutes * MINUTE)
        for worker in self.workers:
            worker.silent += minutes

    def echo(self, which):
        """Run a worker's earlier script again: a network that delivers late, and twice."""
        sent = [command for command in self.client.sent if isinstance(command[-1], str)]  # with a token: a worker's
        if sent:
            self.client.execute_command(*sent[which % len(sent)])

    def settle(self):
        """Let everybody go, and see whether everything is back."""
        for who in WORKERS:
            self.crash(who)
        while self.suspended:
            self.tidy()
        self.wait(12)
        self.tidy()
        while self.suspended:
            self.tidy()
        available, occupied, _ = self._state()
        self._note((available, occupied) != (set(range(self.limit)), set()), "not back in the end")

    def check(self):
        available, occupied, owners = self._state()
        live = [worker.bucket for worker in self.workers if worker.bucket is not None and worker.silent < 10]
        numbers = Counter(bucket.number for bucket in live)
        self._note(any(count > 1 for count in numbers.values()), "two live owners")
        self._note(bool(available & occupied), "available and occupied")
        if isinstance(self.implementation, Ours):
            self._note(any(number >= self.tidied for number in available), "given back after a scale-down")
            self._note(owners.keys() != occupied, "token without bucket, or bucket without token")
            self._note(
                any(owners.get(bucket.number) != bucket.token for bucket in live), "a live owner without his bucket"
            )

    def _pick(self, which, *, holding):
        """Choose among those who have a bucket, or have none; leave those in the middle of something to `proceed`."""
        able = [
            who for who in WORKERS if (self.workers[who].bucket is not None) == holding and who not in self.suspended
        ]
        return able[which % len(able)] if able else None

    def _go(self, who, start=None, done=None, lost=0):
        """Begin *who*'s operation, or go on with the one that he is in the middle of."""
        operation, done = self.suspended.pop(who, None) or (start(), done)
        self.client.lose = lost if isinstance(self.implementation, Ours) else 0
        try:
            next(operation)
            self.suspended[who] = operation, done
        except StopIteration as end:
            done(end.value)
        except redis.TimeoutError:
            pass  # a claim nobody knows of, a sign of life nobody counts on, a release that was made
        finally:
            self.client.lose = 0

    def _state(self):
        with self.client.pipeline(transaction=False) as pipe:
            pipe.smembers(AVAILABLE)
            pipe.zrange(OCCUPIED, 0, -1)
            pipe.hgetall(OWNERS)
            available, occupied, owners = pipe.execute()
        return (
            set(map(int, available)),
            set(map(int, occupied)),
            {int(n): token.decode() for n, token in owners.items()},
        )

    def _note(self, wrong, fault):
        if wrong:
            self.faults[fault] += 1


class Sequences(RuleBasedStateMachine):
    client = world = None
    examples = 0

    # With few buckets, owners early and late meet at the same one all the time.
    @initialize(limits=st.sampled_from([(2, 1), (4, 2), (10, 5)]))
    def begin(self, limits):
        type(self).examples += 1
        self.world = World(self.client, Ours, limits)

    who = st.sampled_from(WORKERS)
    lost = st.sampled_from([0, 0, 0, 1, 2])

    @rule(who=who, lost=lost)
    def claim(self, who, lost):
        self.world.claim(who, lost)
        self.check()

    @rule(who=who, lost=lost)
    def renew(self, who, lost):
        self.world.renew(who, lost)
        self.check()

    @rule(who=who, lost=lost)
    def release(self, who, lost):
        self.world.release(who, lost)
        self.check()

    @rule(who=who)
    def crash(self, who):
        self.world.crash(who)

    @rule()
    def tidy(self):
        self.world.tidy()
        self.check()

    @rule()
    def scale(self):
        self.world.scale()

    @rule(minutes=st.sampled_from([4, 8, 12]))
    def wait(self, minutes):
        self.world.wait(minutes)

    @rule(which=st.integers(0, 99))
    def echo(self, which):
        self.world.echo(which)
        self.check()

    def check(self):
        self.world.check()
        assert not self.world.faults

    def teardown(self):
        if self.world:
            self.world.settle()
            assert not self.world.faults


def test_no_sequence_of_events_loses_a_bucket_or_gives_it_two_owners(client, monkeypatch):
    monkeypatch.setattr(Sequences, "client", client)
    monkeypatch.setattr(Sequences, "examples", 0)

    run_state_machine_as_test(Sequences, settings=sequences(2000, steps=25))

    assert Sequences.examples >= examples(2000)
