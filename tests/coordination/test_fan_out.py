import json
from contextlib import contextmanager

import dramatiq
import pytest
import redis
from dramatiq import Worker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Middleware, MiddlewareError, SkipMessage

from forgekeeper.delivery.enqueue_many import CHUNK, enqueue_many
from forgekeeper.delivery.enqueue_unique import enqueue_unique
from forgekeeper.fan_out import Enqueued

QUEUE = "git"


@pytest.fixture
def client(urls):
    with redis.BlockingConnectionPool.from_url(urls.redis) as pool:
        client = redis.Redis(connection_pool=pool)
        client.flushdb()
        yield client


@pytest.fixture
def broker(client):
    return RedisBroker(client=client, namespace="fan_out", middleware=[])


@pytest.fixture
def done():
    return []


@pytest.fixture
def clean(broker, done):
    return dramatiq.actor(lambda *args: done.append(args), actor_name="clean", queue_name=QUEUE, broker=broker)


def keyed(count, first=0):
    return [(f"clean:{i}", (i,)) for i in range(first, first + count)]


def ready(broker):
    return [message_id.decode() for message_id in broker.client.lrange(f"{broker.namespace}:{QUEUE}", 0, -1)]


def bodies(broker):
    return broker.client.hgetall(f"{broker.namespace}:{QUEUE}.msgs")


def left(broker):
    """All keys but Dramatiq's list of heartbeats, in which every sender of its own leaves an entry."""
    keys = set(broker.client.scan_iter()) - {f"{broker.namespace}:__heartbeats__".encode()}
    return {key: broker.client.type(key) for key in keys}


@contextmanager
def fetched(broker):
    """All messages that are ready, in the hands of a worker."""
    consumer = broker.consume(QUEUE, prefetch=10_000, timeout=1)
    messages = [next(consumer) for _ in ready(broker)]
    yield consumer, messages
    consumer.close()


# What is left in Redis


@pytest.mark.parametrize("args", [(), (7,), (2**70,), (7, "größer ☃", None, 1.5, True, [1, {"a": 2}])])
def test_it_leaves_what_send_leaves(broker, clean, args):
    clean.send(*args)
    sent_keys, (sent_id,), sent_bodies = left(broker), ready(broker), bodies(broker)
    broker.client.flushdb()

    enqueue_many(broker, clean, [("clean:7", args)])

    assert left(broker) == sent_keys
    assert ready(broker) == ["clean:7"]
    sent, ours = json.loads(sent_bodies[sent_id.encode()]), json.loads(bodies(broker)[b"clean:7"])
    assert list(ours) == list(sent)
    assert ours["message_id"] == "clean:7"
    assert (sent["options"], ours["options"]) == ({"redis_message_id": sent_id}, {"redis_message_id": "clean:7"})
    assert 0 <= ours["message_timestamp"] - sent["message_timestamp"] < 10_000
    varying = {"message_id", "message_timestamp", "options"}
    assert {k: v for k, v in ours.items() if k not in varying} == {k: v for k, v in sent.items() if k not in varying}


def test_it_leaves_what_enqueue_unique_leaves(broker, clean):
    enqueue_many(broker, clean, [("clean:7", (7,))])
    ours = left(broker), ready(broker), bodies(broker)[b"clean:7"]
    broker.client.flushdb()

    enqueue_unique(broker, dramatiq.Message.decode(ours[2]))

    assert ours == (left(broker), ready(broker), bodies(broker)[b"clean:7"])


def test_the_encoder_is_dramatiqs(broker, clean):
    dramatiq.set_encoder(dramatiq.PickleEncoder())
    try:
        enqueue_many(broker, clean, keyed(1))

        (body,) = bodies(broker).values()
        assert dramatiq.Message.decode(body).args == (0,)
        assert body == dramatiq.Message.decode(body).encode()
    finally:
        dramatiq.set_encoder(dramatiq.JSONEncoder())


def test_messages_are_ready_in_the_order_given(broker, clean):
    pairs = keyed(2 * CHUNK + 1)

    result = enqueue_many(broker, clean, iter(pairs))

    assert result == Enqueued(enqueued=2 * CHUNK + 1, deduplicated=0, queue_full=False)
    assert ready(broker) == [message_id for message_id, _ in pairs]
    assert len(bodies(broker)) == 2 * CHUNK + 1


def test_nothing_to_send_leaves_nothing(broker, clean):
    assert enqueue_many(broker, clean, [], limit_depth=0) == Enqueued(0, 0, queue_full=False)
    assert left(broker) == {}


def test_a_server_that_forgot_the_script_is_taught_it_again(broker, clean):
    enqueue_many(broker, clean, keyed(1))
    broker.client.script_flush()

    result = enqueue_many(broker, clean, keyed(2))

    assert result == Enqueued(1, 1)


# Once


def test_an_id_given_twice_is_sent_once_with_its_first_arguments(broker, clean):
    result = enqueue_many(broker, clean, [("clean:1", (1,)), ("clean:2", (2,)), ("clean:1", (3,))])

    assert result == Enqueued(enqueued=2, deduplicated=1)
    assert ready(broker) == ["clean:1", "clean:2"]
    assert json.loads(bodies(broker)[b"clean:1"])["args"] == [1]


def test_an_id_given_in_two_chunks_is_sent_once(broker, clean):
    result = enqueue_many(broker, clean, [*keyed(CHUNK), *keyed(CHUNK)])

    assert result == Enqueued(enqueued=CHUNK, deduplicated=CHUNK)


def test_an_id_that_is_queued_is_not_sent_again(broker, clean):
    enqueue_many(broker, clean, keyed(3))

    result = enqueue_many(broker, clean, keyed(3, first=1))

    assert result == Enqueued(enqueued=1, deduplicated=2)
    assert ready(broker) == ["clean:0", "clean:1", "clean:2", "clean:3"]


# As many as fit


def test_a_full_queue_gets_nothing(broker, clean):
    enqueue_many(broker, clean, keyed(5))

    result = enqueue_many(broker, clean, keyed(5, first=5), limit_depth=5)

    assert result == Enqueued(0, 0, queue_full=True)
    assert len(ready(broker)) == 5


def test_a_queue_one_below_the_limit_gets_a_chunk(broker, clean):
    enqueue_many(broker, clean, keyed(5))

    result = enqueue_many(broker, clean, keyed(2 * CHUNK, first=5), limit_depth=6)

    assert result == Enqueued(CHUNK, 0, queue_full=True)


def test_a_queue_filled_by_the_last_message_was_not_too_full(broker, clean):
    assert enqueue_many(broker, clean, keyed(5), limit_depth=5) == Enqueued(5, 0, queue_full=False)


def test_messages_in_flight_do_not_make_a_queue_full(broker, clean):
    enqueue_many(broker, clean, keyed(5))

    with fetched(broker):
        result = enqueue_many(broker, clean, keyed(5, first=5), limit_depth=5)

    assert result == Enqueued(5, 0)


def test_salt_makes_each_body_differ_in_many_places(broker, clean):
    enqueue_many(broker, clean, keyed(2), options={"run": 1}, salt="grain")

    one, other = (json.loads(body)["options"] for body in bodies(broker).values())
    assert (one["run"], len(one["grain"]), len(other["grain"])) == (1, 32, 32)
    assert sum(a != b for a, b in zip(one["grain"], other["grain"], strict=True)) > 16


# Hooks


class Hooks(Middleware):
    def __init__(self):
        self.before, self.after = [], []

    def before_enqueue(self, _broker, message, _delay):
        if message.args == (1,):
            raise SkipMessage
        if message.args == (13,):
            raise MiddlewareError("refused")
        message.options["trace"] = message.message_id.upper()
        self.before.append(message.message_id)

    def after_enqueue(self, _broker, message, _delay):
        self.after.append(message.message_id)


@pytest.fixture
def hooks(broker):
    hooks = Hooks()
    broker.add_middleware(hooks)
    return hooks


def test_a_message_that_a_hook_skips_counts_as_deduplicated(broker, clean, hooks):
    result = enqueue_many(broker, clean, keyed(3))

    assert result == Enqueued(enqueued=2, deduplicated=1)
    assert ready(broker) == ["clean:0", "clean:2"]


def test_a_chunk_skipped_as_a_whole_sends_nothing(broker, clean, hooks):
    assert enqueue_many(broker, clean, keyed(1, first=1)) == Enqueued(0, 1)


def test_the_hook_before_may_add_options_and_the_hook_after_hears_of_what_was_sent(broker, clean, hooks):
    enqueue_many(broker, clean, keyed(1))

    enqueue_many(broker, clean, keyed(4))

    assert hooks.before == ["clean:0", "clean:0", "clean:2", "clean:3"]
    assert hooks.after == ["clean:0", "clean:2", "clean:3"]
    traces = {key: json.loads(body)["options"]["trace"] for key, body in bodies(broker).items()}
    assert traces == {b"clean:0": "CLEAN:0", b"clean:2": "CLEAN:2", b"clean:3": "CLEAN:3"}


def test_a_hook_that_refuses_stops_its_chunk_before_anything_of_it_is_sent(broker, clean, hooks):
    pairs = [*keyed(CHUNK, first=100), *keyed(3, first=12)]

    with pytest.raises(MiddlewareError):
        enqueue_many(broker, clean, pairs)

    assert len(ready(broker)) == CHUNK
    assert len(hooks.after) == CHUNK


# A worker


def test_a_worker_runs_them_and_then_the_same_ids_may_come_again(broker, clean, done):
    enqueue_many(broker, clean, keyed(100))
    worker = Worker(broker, worker_threads=2, worker_timeout=10)
    worker.start()
    try:
        broker.join(QUEUE, timeout=60_000, interval=10)
    finally:
        worker.stop()

    again = enqueue_many(broker, clean, keyed(100))

    assert sorted(done) == [(i,) for i in range(100)]
    assert again == Enqueued(enqueued=100, deduplicated=0)
