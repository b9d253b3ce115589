"""The consumer that Dramatiq's threads are given: what it hands out, and how it ends what comes back."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import dramatiq
import pytest
import redis
from dramatiq import Message, Worker
from dramatiq.common import current_millis
from dramatiq.errors import ConnectionClosed
from dramatiq.middleware import Middleware
from redis.backoff import NoBackoff
from redis.retry import Retry
from structlog.testing import capture_logs

from forgekeeper import shutdown
from forgekeeper.delivery import consumer as consumers
from forgekeeper.delivery.broker import Broker
from forgekeeper.delivery.consumer import CannotEnd
from forgekeeper.delivery.deliveries import Deliveries
from forgekeeper.delivery.queues import depth
from forgekeeper.delivery.sizes import LARGEST, LARGEST_FETCHED
from forgekeeper.delivery.worker_heartbeat import WorkerHeartbeat
from forgekeeper.process.attempts import ChildRetries
from forgekeeper.process.middleware import Holding
from metrics.redaction import LONGEST
from tests.harness.waiting import wait_until

QUEUE, LINE = "q", "q.DQ"
NAMESPACE = "consumer"
LIMIT = 60.0


@pytest.fixture
def client(urls):
    with redis.BlockingConnectionPool.from_url(urls.redis) as pool:
        client = redis.Redis(connection_pool=pool)
        client.flushdb()
        yield client


class Options(Middleware):
    """Lets actors be children without working on them as such."""

    @property
    def actor_options(self):
        return {"child", "document"}


@pytest.fixture
def broker(client):
    return Broker(client=client, namespace=NAMESPACE, middleware=[Options()])


@pytest.fixture
def done():
    return []


@pytest.fixture(autouse=True)
def act(broker, done):
    return dramatiq.actor(
        lambda *args: done.append(args), actor_name="act", queue_name=QUEUE, broker=broker, child=True
    )


@pytest.fixture
def consume(broker):
    return lambda queue=QUEUE, prefetch=10: broker.consume(queue, prefetch=prefetch, timeout=1)


@pytest.fixture
def draining():
    shutdown.requested.set()
    yield
    shutdown.requested.clear()


def put(broker, message_id, queue=QUEUE, **options):
    broker.do_enqueue(queue, message_id, Message(queue, "act", (), {}, options, message_id).encode())


def ready(client, queue=QUEUE):
    return [message_id.decode() for message_id in client.lrange(f"{NAMESPACE}:{queue}", 0, -1)]


def where(client):
    return {name: count for name, count in depth(client, NAMESPACE, QUEUE).items() if count}


def drain_out(consumer):
    """All messages that the consumer hands out before it idles."""
    found = []
    while (message := next(consumer)) is not None:
        found.append(message)
    return found


def cut_off(broker, monkeypatch):
    """Let the broker's commands end in a server that is not there."""
    nowhere = redis.Redis(unix_socket_path="/nonexistent/redis.sock", retry=Retry(NoBackoff(), 0))
    monkeypatch.setattr(broker, "deliveries", type(broker.deliveries)(nowhere, NAMESPACE, broker.broker_id))


# What it hands out


def test_a_time_in_a_message_that_does_not_wait_is_no_reason_to_let_it_wait(broker, consume):
    put(broker, "1", eta=current_millis() + 10_000)

    (message,) = drain_out(consume())

    assert "eta" not in message.options


@pytest.mark.parametrize("eta", [{}, {"eta": None}, {"eta": "soon"}])
def test_a_delayed_message_without_a_time_is_due(broker, consume, eta):
    put(broker, "1", queue=LINE, **eta)

    (message,) = drain_out(consume(LINE))

    assert message.options["eta"] == 0


# What is in hand


def test_what_is_in_hand_stays_there_when_the_consumer_is_replaced(broker, client, consume):
    put(broker, "1")
    (message,) = drain_out(consume())

    second = consume(prefetch=1)

    assert (drain_out(second), ready(client)) == ([], [])
    second.ack(message)
    assert where(client) == {}


def test_what_a_lost_reply_brought_is_handed_out_by_the_next_consumer(broker, client, consume):
    put(broker, "1")
    broker.deliveries.fetch(QUEUE, limit=1)

    assert [message.message_id for message in drain_out(consume())] == ["1"]


def test_what_a_lost_reply_brought_is_found_without_a_new_consumer_too(broker, consume, monkeypatch):
    monkeypatch.setattr(consumers, "LOOK_FOR_LOST_EVERY", consumers.LOOK_FOR_LOST_EVERY * 0)
    consumer = consume()
    assert next(consumer) is None
    put(broker, "1")
    broker.deliveries.fetch(QUEUE, limit=1)

    assert [message.message_id for message in drain_out(consumer)] == ["1"]


def test_what_no_thread_and_no_queue_has_any_more_is_handed_out_again(broker, consume, monkeypatch):
    monkeypatch.setattr(consumers, "LOOK_FOR_LOST_EVERY", consumers.LOOK_FOR_LOST_EVERY * 0)
    put(broker, "1")
    put(broker, "2")
    consumer = consume()
    kept, lost = drain_out(consumer)

    del lost

    assert [message.message_id for message in drain_out(consumer)] == ["2"]
    assert kept.message_id == "1"


def test_what_is_lost_leaves_room_for_others(broker, consume):
    for message_id in ("1", "2"):
        put(broker, message_id)
    consumer = consume(prefetch=1)

    drain_out(consumer)

    assert [message.message_id for message in drain_out(consumer)] == ["2"]


def test_delayed_messages_go_back_when_the_consumer_is_replaced(broker, client, consume):
    put(broker, "1", queue=LINE, eta=current_millis() + 10_000)
    drain_out(consume(LINE))

    assert [message.message_id for message in drain_out(consume(LINE))] == ["1"]


def test_a_message_that_was_taken_from_us_and_comes_again_is_not_handed_out_twice(broker, client, consume):
    put(broker, "1")
    consumer = consume()
    (message,) = drain_out(consumer)
    broker.deliveries.requeue(QUEUE, ["1"])  # as another does who finds us silent

    assert drain_out(consumer) == []

    consumer.ack(message)
    assert where(client) == {}


# How it ends them


def test_a_delayed_message_that_was_taken_from_us_does_not_come_back_when_its_time_comes(broker, client, consume):
    put(broker, "1", queue=LINE, eta=0)
    consumer = consume(LINE)
    (message,) = drain_out(consumer)
    broker.deliveries.requeue(LINE, ["1"])
    other = Deliveries(client, NAMESPACE, "other")
    other.due(QUEUE, *other.fetch(LINE, limit=1), b"")
    other.ack(QUEUE, *other.fetch(QUEUE, limit=1)[0])

    moved = message.copy(queue_name=QUEUE)
    del moved.options["eta"]
    broker.enqueue(moved)
    consumer.ack(message)

    assert where(client) == {}


def end_well(consumer, message):
    consumer.ack(message)


def give_up(consumer, message):
    message.fail()
    consumer.nack(message)


def hand_back(consumer, message):
    consumer.requeue([message])


@pytest.mark.parametrize("end", [end_well, give_up, hand_back])
def test_an_end_that_redis_refuses_is_a_closed_connection_and_can_be_repeated(broker, client, consume, end):
    put(broker, "1")
    consumer = consume()
    (message,) = drain_out(consumer)
    client.replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(ConnectionClosed):
            end(consumer, message)
    finally:
        client.replicaof("no", "one")

    end(consumer, message)

    assert "in_flight" not in where(client)


def test_a_fetch_from_a_redis_that_is_away_is_a_closed_connection(broker, consume, monkeypatch):
    cut_off(broker, monkeypatch)

    with pytest.raises(ConnectionClosed):
        next(consume())


class ShortOfMemory(Deliveries):
    """Takes no step: there is no memory for that."""

    def _call(self, *_):
        raise MemoryError

    _ask = _call


def run_short(broker, consumer, patch):
    short = ShortOfMemory(broker.client, NAMESPACE, broker.broker_id)
    patch.setattr(broker, "deliveries", short)
    patch.setattr(consumer, "_deliveries", short)


@pytest.mark.parametrize("end", [end_well, give_up, hand_back])
def test_an_end_that_fails_for_any_reason_is_a_closed_connection_and_can_be_repeated(
    broker, client, consume, monkeypatch, end
):
    put(broker, "1")
    consumer = consume()
    (message,) = drain_out(consumer)
    with monkeypatch.context() as patch:
        run_short(broker, consumer, patch)
        with pytest.raises(ConnectionClosed):
            end(consumer, message)

    end(consumer, message)

    assert "in_flight" not in where(client)


@pytest.mark.parametrize("end", [end_well, give_up])
def test_an_end_that_keeps_failing_ends_its_thread_and_is_left_to_others(broker, consume, monkeypatch, end):
    monkeypatch.setattr(consumers, "END_WITHIN", consumers.END_WITHIN * 0)
    monkeypatch.setattr(consumers, "LOOK_FOR_LOST_EVERY", consumers.LOOK_FOR_LOST_EVERY * 0)
    put(broker, "1")
    consumer = consume()
    (message,) = drain_out(consumer)
    with monkeypatch.context() as patch:
        run_short(broker, consumer, patch)
        with pytest.raises(CannotEnd):
            end(consumer, message)

    assert [again.message_id for again in drain_out(consumer)] == [message.message_id]


def test_an_end_that_redis_keeps_refusing_ends_no_thread(broker, client, consume, monkeypatch):
    monkeypatch.setattr(consumers, "END_WITHIN", consumers.END_WITHIN * 0)
    put(broker, "1")
    consumer = consume()
    (message,) = drain_out(consumer)
    client.replicaof("127.0.0.1", "1")
    try:
        for _ in range(2):
            with pytest.raises(ConnectionClosed):
                consumer.ack(message)
    finally:
        client.replicaof("no", "one")


# A retry that cannot be made


def test_a_child_whose_retry_cannot_be_written_is_a_dead_letter(client):
    broker = Broker(client=client, namespace=NAMESPACE, middleware=[ChildRetries(), Options()])

    def spoil(given):
        given.append(object())
        raise ValueError("no")

    dramatiq.actor(spoil, actor_name="act", queue_name=QUEUE, broker=broker, child=True)
    broker.do_enqueue(QUEUE, "1", Message(QUEUE, "act", ([],), {}, {}, "1").encode())
    worker = Worker(broker, worker_threads=1, worker_timeout=10)
    worker.start()
    try:
        broker.join(QUEUE, timeout=round(LIMIT * 1000))
    finally:
        worker.stop()

    assert where(client) == {"dead": 1}


def test_a_child_whose_retry_cannot_even_be_prepared_is_a_dead_letter_and_never_acknowledged(client):
    broker = Broker(client=client, namespace=NAMESPACE, middleware=[ChildRetries(), Options()])

    def fail():
        raise ValueError("no")

    dramatiq.actor(fail, actor_name="act", queue_name=QUEUE, broker=broker, child=True)
    put(broker, "1", retries="many")
    worker = Worker(broker, worker_threads=1, worker_timeout=10)
    worker.start()
    try:
        broker.join(QUEUE, timeout=round(LIMIT * 1000))
    finally:
        worker.stop()

    assert where(client) == {"dead": 1}


# A message that starts


def test_a_message_that_was_taken_from_us_does_not_start(client, done):
    broker = Broker(client=client, namespace=NAMESPACE, middleware=[Options(), Holding([QUEUE])])
    dramatiq.actor(lambda: done.append("1"), actor_name="act", queue_name=QUEUE, broker=broker, child=True)
    put(broker, "1")
    (message,) = drain_out(broker.consume(QUEUE, prefetch=5, timeout=1))
    broker.deliveries.requeue(QUEUE, ["1"])

    with pytest.raises(dramatiq.middleware.SkipMessage):
        broker.emit_before("process_message", message)

    broker.consume(QUEUE).ack(message)
    assert ready(client) == ["1"]


@pytest.mark.parametrize(("options", "count"), [({"child": True}, b"1"), ({"document": 48}, None)])
def test_starts_of_children_are_counted_and_starts_of_runs_are_not(client, options, count):
    broker = Broker(client=client, namespace=NAMESPACE, middleware=[Options(), Holding([QUEUE])])
    dramatiq.actor(lambda: None, actor_name="act", queue_name=QUEUE, broker=broker, **options)
    put(broker, "1")
    (message,) = drain_out(broker.consume(QUEUE, prefetch=5, timeout=1))

    broker.emit_before("process_message", message)

    assert client.hget(f"{NAMESPACE}:{QUEUE}.starts", "1") == count


def test_a_message_whose_start_cannot_be_noted_starts_all_the_same(client, monkeypatch):
    broker = Broker(client=client, namespace=NAMESPACE, middleware=[Options(), Holding([QUEUE])])
    dramatiq.actor(lambda: None, actor_name="act", queue_name=QUEUE, broker=broker, child=True)
    put(broker, "1")
    consumer = broker.consume(QUEUE, prefetch=5, timeout=1)
    (message,) = drain_out(consumer)

    with monkeypatch.context() as away:
        cut_off(broker, away)
        broker.emit_before("process_message", message)

    consumer.ack(message)
    assert where(client) == {}


# A consumer with all in hand that it may have


def test_a_full_consumer_has_the_next_message_as_soon_as_there_is_room(broker, monkeypatch):
    monkeypatch.setattr(consumers, "FULL_FOR", LIMIT)
    consumer = broker.consume(QUEUE, prefetch=2, timeout=LIMIT * 1000)
    for message_id in "123":
        put(broker, message_id)
    first, _second = next(consumer), next(consumer)
    hands = broker._hands[QUEUE]
    acknowledges = threading.Thread(
        target=lambda: wait_until(lambda: hands._few >= 0, LIMIT) and consumer.ack(first), daemon=True
    )
    began = time.monotonic()
    acknowledges.start()

    third = next(consumer)

    assert (third.message_id, time.monotonic() - began < LIMIT / 2) == ("3", True)


# The worker heartbeat


@pytest.fixture
def heartbeat(broker):
    """The heartbeat of a process whose consumer is busy elsewhere: between two tries, say."""
    worker = SimpleNamespace(consumers={QUEUE: threading.current_thread()}, workers=[])
    heartbeat = WorkerHeartbeat(broker.deliveries, worker, queues=[QUEUE], dead_after=timedelta(seconds=0.3))
    heartbeat.start()
    yield heartbeat
    heartbeat.stop()
    heartbeat.join()


def test_a_drain_does_not_wait_for_a_consumer_that_is_busy(broker, client, consume, heartbeat):
    put(broker, "1")
    put(broker, "2")
    first, _second = drain_out(consume())
    broker.deliveries.start(QUEUE, first.message_id, counted=True)

    shutdown.requested.set()
    try:
        assert wait_until(lambda: ready(client) == ["2"], LIMIT)
    finally:
        shutdown.requested.clear()


def test_signs_of_life_go_on_through_a_drain(broker, client, heartbeat, draining):
    def beaten_since(score):
        return lambda: client.zscore(f"{NAMESPACE}:__heartbeats__", broker.broker_id) > score

    assert wait_until(lambda: client.zcard(f"{NAMESPACE}:__heartbeats__") == 1, LIMIT)
    for _ in range(3):
        assert wait_until(beaten_since(client.zscore(f"{NAMESPACE}:__heartbeats__", broker.broker_id)), LIMIT)


def test_whose_sign_of_life_an_outage_has_made_old_is_given_time_for_another(broker, client):
    # Its worker lives; while Redis was away it could not say so.
    put(broker, "1")
    drain_out(broker.consume(QUEUE, prefetch=1, timeout=1))
    client.zadd(f"{NAMESPACE}:__heartbeats__", {broker.broker_id: 0})
    new = Deliveries(client, NAMESPACE, "new")
    worker = SimpleNamespace(consumers={QUEUE: threading.current_thread()}, workers=[])
    heartbeat = WorkerHeartbeat(new, worker, queues=[QUEUE], dead_after=timedelta(seconds=6))
    heartbeat.start()
    assert wait_until(lambda: client.zscore(f"{NAMESPACE}:__heartbeats__", "new"), LIMIT)

    broker.deliveries.heartbeat()
    told = client.zscore(f"{NAMESPACE}:__heartbeats__", broker.broker_id)
    assert wait_until(lambda: client.zscore(f"{NAMESPACE}:__heartbeats__", "new") > told + 3_500, LIMIT)

    heartbeat.stop()
    heartbeat.join()
    assert ready(client) == []


# What is too large


def test_a_message_that_is_too_large_is_given_up_and_told_of(broker, client, consume):
    broker.client.hset(f"{NAMESPACE}:{QUEUE}.msgs", "large", b"x" * LARGEST_FETCHED)
    broker.client.rpush(f"{NAMESPACE}:{QUEUE}", "large")
    put(broker, "small")

    with capture_logs() as lines:
        (message,) = drain_out(consume())

    assert message.message_id == "small"
    assert [line["event"] for line in lines] == ["message dead-lettered"]
    assert (lines[0]["message_id"], lines[0]["reason"], lines[0]["bytes"]) == (
        "large",
        "too_large",
        LARGEST_FETCHED + 5,
    )
    assert where(client) == {"in_flight": 1, "dead": 1}


def test_the_trace_that_a_retry_carries_is_short(broker, client, consume):
    put(broker, "1")
    consumer = consume()
    (message,) = drain_out(consumer)
    message.options["traceback"] = "x" * LARGEST + " password=hunter2"

    broker.enqueue(message, delay=1)
    consumer.ack(message)

    later = Message.decode(client.hget(f"{NAMESPACE}:{LINE}.msgs", "1"))
    assert len(later.options["traceback"]) == LONGEST
