"""Messages that are too large: not put in, not fetched, and in nobody's way."""

import tracemalloc
from datetime import timedelta

import dramatiq
import pytest
import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

from forgekeeper.delivery import dead_letters, queues
from forgekeeper.delivery.deliveries import Deliveries, Fetched, Refused
from forgekeeper.delivery.enqueue_many import enqueue_many
from forgekeeper.delivery.enqueue_unique import enqueue_unique
from forgekeeper.delivery.queues import depth
from forgekeeper.delivery.sizes import AT_ONCE, LARGEST, LARGEST_FETCHED, MessageTooLarge, groups

NAMESPACE, QUEUE, LINE = "sizes", "q", "q.DQ"
KEY = f"{NAMESPACE}:{QUEUE}"


@pytest.fixture
def client(urls):
    with redis.Redis.from_url(urls.redis) as client:
        client.flushdb()
        yield client


@pytest.fixture
def broker(client):
    return RedisBroker(client=client, namespace=NAMESPACE, middleware=[])


@pytest.fixture
def worker(client):
    return Deliveries(client, NAMESPACE, "worker")


def message(size, message_id="7"):
    """A message whose body has so many bytes."""
    empty = Message(QUEUE, "act", ("",), {}, {"redis_message_id": message_id}, message_id, 0)
    return empty.copy(args=("x" * (size - len(empty.encode())),))


def put(client, size, message_id="7", queue=QUEUE):
    """Let another program put a message in."""
    client.hset(f"{NAMESPACE}:{queue}.msgs", message_id, b"x" * size)
    client.rpush(f"{NAMESPACE}:{queue}", message_id)


def bury(client, size, message_id="7"):
    client.zadd(f"{KEY}.XQ", {message_id: 1})
    client.hset(f"{KEY}.XQ.msgs", message_id, b"x" * size)


def reasons(client):
    return {key.decode(): value.decode() for key, value in client.hgetall(f"{KEY}.XQ.reasons").items()}


# Putting in


def test_a_message_may_have_a_megabyte(broker):
    assert enqueue_unique(broker, message(LARGEST))


def test_a_larger_one_is_refused_with_a_sentence_and_nothing_is_put_in(broker, client):
    with pytest.raises(MessageTooLarge, match=r"message 7 of act has 1,000,001 bytes, and may have 1,000,000: keep"):
        enqueue_unique(broker, message(LARGEST + 1))

    assert client.keys() == []


def test_of_a_fan_out_with_such_a_message_nothing_is_put_in(broker, client):
    act = dramatiq.actor(lambda *_: None, actor_name="act", queue_name=QUEUE, broker=broker)

    with pytest.raises(MessageTooLarge, match="message 2 of act"):
        enqueue_many(broker, act, [("1", ("x",)), ("2", ("x" * LARGEST,))])

    assert client.keys(f"{KEY}*") == []


# Fetching


def test_what_is_as_large_as_can_be_put_in_is_fetched_with_what_it_gathers_on_its_way(worker, client):
    put(client, LARGEST_FETCHED - len("7"))

    (fetched,) = worker.fetch(QUEUE, limit=1)

    assert isinstance(fetched, Fetched)


@pytest.mark.parametrize("line", [QUEUE, LINE])
def test_what_is_larger_becomes_a_dead_letter_and_the_next_is_fetched(worker, client, line):
    put(client, LARGEST_FETCHED, "7", line)
    put(client, 10, "8", line)

    refused, fetched = worker.fetch(line, limit=2)

    assert (refused, fetched) == (Refused(b"7", LARGEST_FETCHED + 1), Fetched(b"8", b"x" * 10))
    assert (reasons(client), client.hstrlen(f"{KEY}.XQ.msgs", "7")) == ({"7": "too_large"}, LARGEST_FETCHED)
    assert client.hkeys(f"{NAMESPACE}:{line}.msgs") == [b"8"]
    assert client.smembers(f"{NAMESPACE}:__acks__.worker.{line}") == {b"8"}
    assert depth(client, NAMESPACE, QUEUE)["dead"] == 1


def test_an_id_counts_and_only_its_beginning_is_told(worker, client):
    put(client, 1, "7" * LARGEST_FETCHED)

    assert worker.fetch(QUEUE, limit=1) == [Refused(b"7" * 200, LARGEST_FETCHED + 1)]


def test_fifty_megabytes_stay_where_they_are(worker, client):
    put(client, 50_000_000)
    tracemalloc.start()
    try:
        (refused,) = worker.fetch(QUEUE, limit=1)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (refused.size, most < 1_000_000) == (50_000_001, True)


def test_poison_that_is_too_large_is_given_up_without_its_body(worker, client):
    client.hset(f"{KEY}.msgs", "7", b"x" * (LARGEST_FETCHED + 1))
    client.hset(f"{KEY}.starts", "7", 3)
    for kind in ("acks", "started"):
        client.sadd(f"{NAMESPACE}:__{kind}__.worker.{QUEUE}", "7")
    client.zadd(f"{NAMESPACE}:__heartbeats__", {"worker": 0})

    (reclaimed,) = Deliveries(client, NAMESPACE, "other").reclaim([QUEUE], dead_after=timedelta(minutes=1))

    assert (reclaimed.poison, reclaimed.bodies) == (["7"], [b""])


# Looking


def test_a_dead_letter_that_is_too_large_says_so_and_is_not_read(broker, client):
    bury(client, LARGEST_FETCHED + 1)

    letter = dead_letters.find(broker, [QUEUE], "7")

    assert (letter.body, letter.fault) == (None, "it is too large to be read (1,100,001 bytes)")


def test_it_can_be_removed(broker, client):
    bury(client, LARGEST_FETCHED + 1)

    assert dead_letters.remove(broker, dead_letters.find(broker, [QUEUE], "7"))
    assert client.keys(f"{KEY}*") == []


def test_one_that_is_no_longer_what_was_seen_is_not_removed(broker, client):
    bury(client, LARGEST_FETCHED + 1)
    letter = dead_letters.find(broker, [QUEUE], "7")
    bury(client, LARGEST_FETCHED + 2)

    assert not dead_letters.remove(broker, letter)


def test_many_large_letters_are_read_some_at_a_time(broker, client):
    for number in range(30):
        bury(client, LARGEST, str(number))

    read = dead_letters.read(broker, dead_letters.addresses(broker, [QUEUE]))
    tracemalloc.start()
    try:
        sizes = [len(letter.body) for letter in read]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (sizes, most < 3 * AT_ONCE) == ([LARGEST] * 30, True)


def test_bodies_are_grouped_in_their_order_whatever_their_sizes():
    large, huge = AT_ONCE // 10, AT_ONCE * 5

    found = list(groups([1, huge, *[large] * 15, huge]))

    assert [number for group in found for number in group] == list(range(18))
    assert len(found) == 2
    assert list(groups([])) == []


def test_the_oldest_message_of_a_queue_is_not_read_when_it_is_too_large(client):
    put(client, LARGEST_FETCHED + 1)

    assert queues.due_since(client, NAMESPACE, QUEUE) is None


def test_dead_letters_that_are_too_large_are_counted_as_nobody_s(broker, client):
    bury(client, LARGEST_FETCHED + 1)
    client.zadd(f"{KEY}.XQ", {"8": 2})
    client.hset(f"{KEY}.XQ.msgs", "8", message(200, "8").encode())

    assert queues.dead_by_actor(client, NAMESPACE, QUEUE, limit=100) == {"": 1, "act": 1}
