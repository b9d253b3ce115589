"""Buckets on a real Redis, in any order of events."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from forgekeeper.sources.buckets import Bucket
from tests.harness.artifacts import buckets
from tests.harness.thorough import machine_settings, whole_only

MINUTE = timedelta(minutes=1)
AVAILABLE, OCCUPIED, OWNERS = buckets.keys[:3]


@pytest.fixture
def client(urls):
    with redis.BlockingConnectionPool.from_url(urls.redis) as pool:
        client = redis.Redis(connection_pool=pool)
        client.flushdb()
        yield client


class Cut(redis.Redis):
    """A client that loses the reply to its next command."""

    lost = True

    def execute_command(self, *args, **options):
        answer = super().execute_command(*args, **options)
        if self.lost:
            self.lost = False
            raise redis.ConnectionError("connection reset by peer")
        return answer


def pass_time(client, duration):
    """What the scripts see of time is how far the scores lie back."""
    with client.pipeline(transaction=False) as pipe:
        for member in client.zrange(OCCUPIED, 0, -1):
            pipe.zincrby(OCCUPIED, -duration.total_seconds(), member)
        pipe.execute()


@pytest.mark.parametrize(("silent", "stale_count"), [(570, 0), (600, 1)])
def test_a_bucket_silent_for_ten_minutes_is_available_again(client, silent, stale_count):
    buckets.tidy(client, 5)
    bucket = buckets.claim(client, 5)
    pass_time(client, timedelta(seconds=silent))

    counts = buckets.tidy(client, 5)

    assert counts["stale_count"] == stale_count
    assert (bucket.number in buckets.list_available(client)) == bool(stale_count)


def test_a_connection_that_is_lost_once_ends_no_owner_and_keeps_no_bucket(client):
    buckets.tidy(client, 5)
    bucket = buckets.claim(client, 5)

    assert buckets.renew(Cut(connection_pool=client.connection_pool), bucket) is None
    buckets.release(Cut(connection_pool=client.connection_pool), bucket)
    assert buckets.tidy(Cut(connection_pool=client.connection_pool), 5)["available_count"] == 5


def test_an_owner_who_died_before_the_clock_was_set_back_is_not_waited_for_longer(client):
    buckets.tidy(client, 5)
    bucket = buckets.claim(client, 5)
    pass_time(client, -60 * MINUTE)
    buckets.tidy(client, 5)
    pass_time(client, 11 * MINUTE)

    buckets.tidy(client, 5)

    assert bucket.number in buckets.list_available(client)


def test_a_bucket_occupied_without_a_token_has_its_ten_minutes_too(client):
    client.zadd(OCCUPIED, {3: time.time()})

    buckets.tidy(client, 5)
    during = buckets.list_available(client)
    pass_time(client, 11 * MINUTE)
    buckets.tidy(client, 5)

    assert (during, buckets.list_available(client)) == ([0, 1, 2, 4], [0, 1, 2, 3, 4])


def test_a_bucket_has_one_owner_and_when_all_have_one_there_is_none(client):
    buckets.tidy(client, 10)

    with ThreadPoolExecutor(16) as threads:
        claims = list(threads.map(lambda _: buckets.claim(client, 10), range(16)))

    assert sorted(bucket.number for bucket in claims if bucket) == list(range(10))
    assert claims.count(None) == 6
    assert not buckets.release(client, Bucket(0, 10, "of an owner that was silent for too long"))
    buckets.tidy(client, 10)
    assert buckets.claim(client, 10) is None


# Any order of events


class Buckets(RuleBasedStateMachine):
    """Workers that claim, renew, release and crash while a parent tidies and scales: whatever they believe is so.

    With few buckets, owners early and late meet at the same one all the time.
    """

    client = None

    @initialize(limits=st.sampled_from([(2, 1), (4, 2), (10, 5)]))
    def begin(self, limits):
        self.client.flushdb()
        self.limits, self.limit, self.tidied = limits, limits[0], limits[0]
        self.silent = {}  # minutes since Redis last heard of each owner
        self.tidy()

    def live(self):
        return [bucket for bucket, minutes in self.silent.items() if minutes < 10]

    def owner(self, which):
        return list(self.silent)[which % len(self.silent)] if self.silent else None

    which = st.integers(0, 9)

    @rule(child=st.sampled_from([None, "child:1", "child:1 0"]))
    def claim(self, child):
        held = {one.number: one.token for one in buckets.list_occupied(self.client) if one.number < self.limit}
        mine = [number for number, token in held.items() if child and token[:-32] == f"{child} "]
        free = [number for number in buckets.list_available(self.client) if number < self.limit]
        bucket = buckets.claim(self.client, self.limit, child=child)
        assert (bucket is None) == (not mine and not free)
        if bucket:
            assert bucket.number in (mine or free)
            # To an earlier start of the child it is lost.
            self.silent |= {one: 10 for one in self.silent if bucket.number in mine and one.number == bucket.number}
            self.silent[bucket] = 0

    @rule(which=which)
    def renew(self, which):
        if bucket := self.owner(which):
            why, alive = buckets.renew(self.client, bucket), self.silent[bucket] < 10
            if why == "bucket_lost":
                assert not alive
                del self.silent[bucket]
            else:
                assert (why == "scale_down") == (bucket.number >= self.tidied)
                self.silent[bucket] = 0

    @rule(which=which, twice=st.booleans())
    def release(self, which, twice):
        if bucket := self.owner(which):
            alive = self.silent.pop(bucket) < 10
            assert buckets.release(self.client, bucket) or not alive
            assert not (twice and buckets.release(self.client, bucket))

    @rule(which=which)
    def crash(self, which):
        self.silent.pop(self.owner(which), None)

    @rule()
    def tidy(self):
        buckets.tidy(self.client, self.limit)
        self.tidied = self.limit
        numbers = {*buckets.list_available(self.client)} | {one.number for one in buckets.list_occupied(self.client)}
        assert {number for number in numbers if number < self.limit} == set(range(self.limit))

    @rule()
    def scale(self):
        self.limit = sum(self.limits) - self.limit

    @rule(minutes=st.sampled_from([4, 8, 12]))
    def wait(self, minutes):
        pass_time(self.client, minutes * MINUTE)
        self.silent = {bucket: silent + minutes for bucket, silent in self.silent.items()}

    @invariant()
    def each_is_in_one_place_and_has_one_owner(self):
        if self.client is None:
            return
        # This is asked after each step: all of it at once.
        with self.client.pipeline(transaction=False) as pipe:
            read = pipe.smembers(AVAILABLE).zrange(OCCUPIED, 0, -1).hgetall(OWNERS).execute()
        available, occupied = ({int(number) for number in numbers} for numbers in read[:2])
        held = {int(number): token.decode() for number, token in read[2].items()}
        assert not available & occupied
        assert held.keys() == occupied
        if hasattr(self, "silent"):
            assert all(number < self.tidied for number in available)
            assert max(Counter(bucket.number for bucket in self.live()).values(), default=1) == 1
            assert all(held[bucket.number] == bucket.token for bucket in self.live())

    def teardown(self):
        if hasattr(self, "silent"):
            self.silent = {}
            self.wait(12)
            self.tidy()
            assert (buckets.list_available(self.client), buckets.list_occupied(self.client)) == (
                [*range(self.limit)],
                [],
            )


@whole_only
def test_no_sequence_of_events_loses_a_bucket_or_gives_it_two_owners(client, monkeypatch):
    # One that has a connection of its own asks no pool for each command.
    monkeypatch.setattr(Buckets, "client", client.client())

    run_state_machine_as_test(Buckets, settings=machine_settings(2000, steps=25))
