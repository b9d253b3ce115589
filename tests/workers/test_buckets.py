import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import redis

from tests.harness.buckets import MINUTE, Lossy
from workers.expired_job_artifacts import buckets
from workers.expired_job_artifacts.buckets import OCCUPIED, Counts, Hold


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


def test_a_bucket_occupied_without_a_token_has_its_ten_minutes_too(client):
    client.zadd(OCCUPIED, {3: time.time()})

    buckets.tidy(client, 5)
    during = buckets.available(client)
    pass_time(client, 11 * MINUTE)
    buckets.tidy(client, 5)

    assert during == [0, 1, 2, 4]
    assert buckets.available(client) == [0, 1, 2, 3, 4]


# Claiming


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


def test_an_owner_learns_that_his_bucket_was_scaled_away(client):
    buckets.tidy(client, 10)
    high, low = sorted((buckets.claim(client, 10) for _ in range(10)), key=lambda bucket: -bucket.number)[::9]

    buckets.tidy(client, 5)

    assert buckets.renew(client, high) is Hold.SCALED_DOWN
    assert buckets.renew(client, low) is Hold.OURS


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


# Any order of events.  An implementation's operations are generators: it is suspended at each
# yield, between two commands, and others act.


def test_a_bucket_has_one_owner_and_when_all_have_one_there_is_none(client):
    buckets.tidy(client, 5)

    claims = [buckets.claim(client, 5) for _ in range(7)]

    assert sorted(bucket.number for bucket in claims[:5]) == [0, 1, 2, 3, 4]
    assert claims[5:] == [None, None]
