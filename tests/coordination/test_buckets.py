import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.harness.thorough import examples, sequences
from workers.expired_job_artifacts import buckets
from workers.expired_job_artifacts.buckets import AVAILABLE, OCCUPIED, OWNERS, Counts, Hold

MINUTE = timedelta(minutes=1)


class Lossy(redis.Redis):
    """A client that gets no reply to its next *lose* scripts, though the server runs them."""

    lose = 0

    def __init__(self, **parameters):
        super().__init__(**parameters)
        self.sent = []

    def execute_command(self, *args, **options):
        reply = super().execute_command(*args, **options)
        if args[0] == "EVALSHA":
            self.sent.append(args)
            if self.lose:
                self.lose -= 1
                raise redis.TimeoutError("the reply was lost")
        return reply


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


def test_the_first_tidying_adds_every_bucket_and_counts_them_as_missing(client):
    counts = buckets.tidy(client, 5)

    assert counts == Counts(max_buckets=5, available_count=0, occupied_count=0, stale_count=0, missing_count=5)
    assert buckets.available(client) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("silent", "stale_count"), [(598, 0), (600, 1)])
def test_a_bucket_silent_for_ten_minutes_is_available_again(client, silent, stale_count):
    buckets.tidy(client, 5)
    bucket = buckets.claim(client, 5)
    pass_time(client, timedelta(seconds=silent))

    counts = buckets.tidy(client, 5)

    assert counts.stale_count == stale_count
    assert (bucket.number in buckets.available(client)) == bool(stale_count)


def test_an_owner_who_died_before_the_clock_was_set_back_is_not_waited_for_longer(client):
    buckets.tidy(client, 5)
    bucket = buckets.claim(client, 5)
    pass_time(client, -60 * MINUTE)
    buckets.tidy(client, 5)
    pass_time(client, 11 * MINUTE)

    buckets.tidy(client, 5)

    assert bucket.number in buckets.available(client)


# What others left in the keys


@pytest.mark.parametrize("member", ["", "-1", "5", "05", "1.0", "1e0", " 1", "nan", "bucket", b"\xff\0"])
def test_an_available_member_that_is_no_bucket_is_removed(client, member):
    client.sadd(AVAILABLE, member)

    buckets.tidy(client, 5)

    assert client.smembers(AVAILABLE) == {b"0", b"1", b"2", b"3", b"4"}


def test_a_bucket_both_available_and_occupied_is_its_owners(client):
    buckets.tidy(client, 5)
    bucket = buckets.claim(client, 5)
    client.sadd(AVAILABLE, bucket.number)

    buckets.tidy(client, 5)

    assert bucket.number not in buckets.available(client)
    assert buckets.renew(client, bucket) is Hold.OURS


def test_a_bucket_occupied_without_a_token_has_its_ten_minutes_too(client):
    client.zadd(OCCUPIED, {3: time.time()})

    buckets.tidy(client, 5)
    during = buckets.available(client)
    pass_time(client, 11 * MINUTE)
    buckets.tidy(client, 5)

    assert during == [0, 1, 2, 4]
    assert buckets.available(client) == [0, 1, 2, 3, 4]


# Claiming


def test_a_bucket_has_one_owner_and_when_all_have_one_there_is_none(client):
    buckets.tidy(client, 5)

    claims = [buckets.claim(client, 5) for _ in range(7)]

    assert sorted(bucket.number for bucket in claims[:5]) == [0, 1, 2, 3, 4]
    assert claims[5:] == [None, None]


def test_claimers_at_the_same_moment_get_different_buckets(client):
    buckets.tidy(client, 10)

    with ThreadPoolExecutor(16) as threads:
        claims = list(threads.map(lambda _: buckets.claim(client, 10), range(16)))

    assert sorted(bucket.number for bucket in claims if bucket) == list(range(10))


def test_a_bucket_given_back_is_not_the_next_to_be_claimed(client):
    buckets.tidy(client, 5)
    numbers = []

    for _ in range(5):
        bucket = buckets.claim(client, 5)
        numbers.append(bucket.number)
        buckets.release(client, bucket)

    assert sorted(numbers) == [0, 1, 2, 3, 4]


def test_a_claim_stays_below_its_maximum_before_a_scale_down_is_tidied(client):
    buckets.tidy(client, 10)

    claims = [buckets.claim(client, 5) for _ in range(6)]

    assert sorted(bucket.number for bucket in claims[:5]) == [0, 1, 2, 3, 4]
    assert claims[5] is None


def test_the_modulus_is_the_maximum_at_the_claim(client):
    buckets.tidy(client, 5)
    bucket = buckets.claim(client, 5)

    buckets.tidy(client, 10)

    assert bucket.modulus == 5
    assert buckets.claim(client, 10).modulus == 10
    assert buckets.renew(client, bucket) is Hold.OURS


def test_a_claim_that_nobody_knows_of_ends_after_ten_minutes(client):
    buckets.tidy(client, 5)
    client.lose = 2
    with pytest.raises(redis.TimeoutError):
        buckets.claim(client, 5)
    pass_time(client, 11 * MINUTE)

    buckets.tidy(client, 5)

    assert buckets.available(client) == list(range(5))


# Renewing


def test_an_owner_learns_at_his_next_sign_of_life_that_his_bucket_is_anothers(client):
    buckets.tidy(client, 1)
    late = buckets.claim(client, 1)
    pass_time(client, 11 * MINUTE)
    buckets.tidy(client, 1)
    owner = buckets.claim(client, 1)
    pass_time(client, 9 * MINUTE)

    hold = buckets.renew(client, late)

    assert hold is Hold.LOST
    pass_time(client, 2 * MINUTE)
    assert buckets.tidy(client, 1).stale_count == 1, f"{late} renewed the bucket of {owner}"


def test_an_owner_learns_that_his_bucket_was_scaled_away(client):
    buckets.tidy(client, 10)
    high, low = sorted((buckets.claim(client, 10) for _ in range(10)), key=lambda bucket: -bucket.number)[::9]

    buckets.tidy(client, 5)

    assert buckets.renew(client, high) is Hold.SCALED_DOWN
    assert buckets.renew(client, low) is Hold.OURS


def test_a_bucket_scaled_away_and_back_under_its_owner_has_no_second_one(client):
    buckets.tidy(client, 10)
    claims = [buckets.claim(client, 10) for _ in range(10)]
    buckets.tidy(client, 5)

    buckets.tidy(client, 10)

    assert buckets.claim(client, 10) is None
    assert {buckets.renew(client, bucket) for bucket in claims} == {Hold.OURS}


# Releasing


def test_a_late_owner_frees_nothing(client):
    buckets.tidy(client, 1)
    late = buckets.claim(client, 1)
    pass_time(client, 11 * MINUTE)
    buckets.tidy(client, 1)
    owner = buckets.claim(client, 1)

    released = buckets.release(client, late)

    assert not released
    assert buckets.claim(client, 1) is None
    assert buckets.renew(client, owner) is Hold.OURS


# Looking


def test_held_buckets_are_listed_with_owner_and_last_sign_of_life(client):
    buckets.tidy(client, 5)
    bucket = buckets.claim(client, 5)
    client.zadd(OCCUPIED, {4: 0, "leftover": 0})

    foreign, ours = buckets.held(client)

    assert foreign == (4, datetime.fromtimestamp(0, UTC), None)
    assert (ours.number, ours.token) == (bucket.number, bucket.token)
    assert timedelta() <= datetime.now(UTC) - ours.since < timedelta(minutes=1)


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
