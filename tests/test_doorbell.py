"""The doorbell: who is rung for when, and what becomes of a message whose ring nobody heard."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import Empty
from types import SimpleNamespace

import dramatiq
import pytest
import redis
from dramatiq import Message
from dramatiq.common import current_millis
from dramatiq.middleware import Middleware
from structlog.testing import capture_logs

from forgekeeper.delivery import doorbell as doorbells
from forgekeeper.delivery import work_queue as waiting
from forgekeeper.delivery.broker import Broker
from forgekeeper.delivery.deliveries import Deliveries
from forgekeeper.delivery.doorbell import Doorbell
from forgekeeper.delivery.enqueue_many import enqueue_many
from forgekeeper.process.middleware import Holding
from tests.harness.waiting import wait_until

QUEUE, LINE = "q", "q.DQ"
NAMESPACE = "doorbell"
CHANNEL = f"{NAMESPACE}:{QUEUE}"
LIMIT = 20.0
LONG = 60_000
"""Milliseconds for which a consumer would wait that nobody rings for."""


@pytest.fixture
def client(urls):
    with redis.BlockingConnectionPool.from_url(urls.redis, timeout=2, socket_timeout=2) as pool:
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
    made = Broker(client=client, namespace=NAMESPACE, middleware=[Options()])
    dramatiq.actor(lambda: None, actor_name="act", queue_name=QUEUE, broker=made, child=True)
    return made


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Let nobody idle for longer than it asks for."""
    monkeypatch.setattr(waiting, "IDLE", 0)


@pytest.fixture
def seldom(monkeypatch):
    """Let nobody look who was not rung for."""
    monkeypatch.setattr(doorbells, "LOOK_EVERY", timedelta(seconds=LONG))


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(doorbells, "LOOK_EVERY", timedelta(seconds=0.05))


@pytest.fixture
def listening(broker):
    """Begin to listen; the thread ends with the test."""
    threads = []

    def listen():
        threads.append(broker.doorbell.listen([QUEUE, LINE]))
        assert wait_until(lambda: broker.doorbell.listens, LIMIT)

    yield listen
    broker.doorbell.stop()
    # What wakes a thread that would wait for long.
    broker.client.publish(CHANNEL, "")
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()


def put(broker, message_id, queue=QUEUE):
    broker.do_enqueue(queue, message_id, Message(queue, "act", (), {}, {}, message_id).encode())


def idle(broker, timeout=LONG):
    """Return a consumer that has found nothing, and waits when it is asked again."""
    consumer = broker.consume(QUEUE, prefetch=10, timeout=1)
    while next(consumer) is not None or consumer._bell._rung.is_set():
        pass
    consumer._timeout = timeout
    return consumer


def found_by(consumer):
    """Return the id of the next message, as a thread of Dramatiq's would find it."""
    found = []

    def look():
        while not found:
            if (message := next(consumer)) is not None:
                found.append(message.message_id)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(LIMIT)
    return found


def asked(client):
    """Count the scripts that were run."""
    return client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]


def test_an_idle_consumer_is_woken_by_a_message(broker, listening, seldom):
    listening()
    consumer = idle(broker)
    threading.Timer(0.2, put, (broker, "1")).start()

    assert found_by(consumer) == ["1"]


def test_an_idle_consumer_asks_nothing_while_nobody_rings(broker, client, listening, seldom):
    listening()
    consumer = idle(broker, timeout=1)
    before = asked(client)

    for _ in range(20):
        assert next(consumer) is None

    assert asked(client) == before


def test_a_consumer_for_which_nobody_listens_asks_each_time(broker, client):
    consumer = broker.consume(QUEUE, prefetch=10, timeout=1)
    assert next(consumer) is None
    before = asked(client)

    for _ in range(5):
        assert next(consumer) is None

    assert asked(client) == before + 5


def test_a_message_whose_ring_was_lost_is_found_by_the_next_look(broker, client, listening, often):
    listening()
    consumer = idle(broker, timeout=100)
    # As a bare Dramatiq puts it in.
    client.hset(f"{CHANNEL}.msgs", "1", Message(QUEUE, "act", (), {}, {}, "1").encode())
    client.rpush(CHANNEL, "1")

    assert found_by(consumer) == ["1"]


def test_a_message_whose_ring_was_lost_is_found_however_often_others_ring(broker, client, listening, monkeypatch):
    monkeypatch.setattr(doorbells, "LOOK_EVERY", timedelta(seconds=0.5))
    listening()
    consumer, done = idle(broker, timeout=100), threading.Event()

    def ring_for_others():
        while not done.wait(0.005):
            client.publish(f"{NAMESPACE}:{LINE}", "")

    with ThreadPoolExecutor() as threads:
        threads.submit(ring_for_others)
        try:
            client.hset(f"{CHANNEL}.msgs", "1", Message(QUEUE, "act", (), {}, {}, "1").encode())
            client.rpush(CHANNEL, "1")

            assert found_by(consumer) == ["1"]
        finally:
            done.set()


def test_it_is_looked_every_three_seconds(broker, listening, monkeypatch):
    asked_for, get = [], redis.client.PubSub.get_message

    def get_message(self, **options):
        asked_for.append(options["timeout"])
        return get(self, **options)

    monkeypatch.setattr(redis.client.PubSub, "get_message", get_message)

    listening()

    # Each wait is for what is left until the next look.
    assert 2 < asked_for[0] <= 3


def test_that_nothing_is_heard_is_said_once_a_minute(broker, monkeypatch):
    clock = SimpleNamespace(instant=100.0)
    monkeypatch.setattr(doorbells, "time", SimpleNamespace(monotonic=lambda: clock.instant))

    with capture_logs() as lines:
        said = []
        for seconds in (0, 59, 1, 59, 1):
            clock.instant += seconds
            broker.doorbell._tell(redis.TimeoutError("away"))
            said.append(len(lines))

    assert said == [1, 1, 2, 2, 3]


def test_what_came_before_anybody_listened_is_found(broker, listening, seldom):
    consumer = broker.consume(QUEUE, prefetch=10, timeout=LONG)
    put(broker, "1")

    listening()

    assert found_by(consumer) == ["1"]


def test_a_consumer_without_room_finds_the_next_message_when_it_has_some(broker, listening, seldom):
    listening()
    put(broker, "1")
    put(broker, "2")
    consumer = broker.consume(QUEUE, prefetch=1, timeout=10)
    first = next(consumer)
    assert next(consumer) is None

    consumer.ack(first)

    assert found_by(consumer) == ["2"]


def test_a_line_that_is_cut_is_made_anew(broker, client, listening, often):
    listening()
    heard = threading.Event()
    bell = broker.doorbell.bell(QUEUE)
    bell.ring = heard.set

    client.client_kill_filter(_type="pubsub")
    # It is told when the line is lost, and when there is another.
    assert heard.wait(LIMIT)

    assert wait_until(lambda: broker.doorbell.listens and client.pubsub_numsub(CHANNEL)[0][1] == 1, LIMIT)


def test_a_line_on_which_nothing_comes_back_is_given_up(broker, listening, often, monkeypatch):
    monkeypatch.setattr(redis.client.PubSub, "ping", lambda _self: True)
    closed = threading.Event()
    close = redis.client.PubSub.close
    monkeypatch.setattr(redis.client.PubSub, "close", lambda self: (closed.set(), close(self)))

    listening()

    assert closed.wait(LIMIT)


def test_a_line_that_answers_is_kept_though_nobody_rings(broker, client, listening, monkeypatch):
    monkeypatch.setattr(doorbells, "LOOK_EVERY", timedelta(seconds=1))
    listening()

    def looks():
        return client.info("commandstats").get("cmdstat_exists", {"calls": 0})["calls"]

    lines, before = client.client_list(_type="pubsub"), looks()
    assert wait_until(lambda: looks() >= before + 3, LIMIT)

    assert [one["id"] for one in client.client_list(_type="pubsub")] == [one["id"] for one in lines]
    assert broker.doorbell.listens


def test_a_consumer_that_has_delayed_messages_idles_no_longer_than_it_may(broker, listening, seldom, monkeypatch):
    monkeypatch.setattr(waiting, "IDLE", LONG)
    listening()
    delayed = Message(LINE, "act", (), {}, {"eta": current_millis() + LONG}, "1")
    broker.do_enqueue(LINE, "1", delayed.encode())
    consumer = broker.consume(LINE, prefetch=10, timeout=1)
    in_hand = next(consumer)

    found = []
    thread = threading.Thread(target=lambda: found.extend(next(consumer) for _ in range(3)), daemon=True)
    thread.start()
    thread.join(LIMIT)

    assert (in_hand.message_id, found) == ("1", [None] * 3)


def test_a_stop_ends_every_wait(broker, listening, seldom):
    listening()
    consumer = idle(broker)
    thread = threading.Thread(target=next, args=(consumer,), daemon=True)
    thread.start()

    broker.doorbell.stop()

    thread.join(LIMIT)
    assert not thread.is_alive()


def test_a_worker_that_is_to_end_wakes_its_idle_threads(broker, listening, seldom, monkeypatch):
    listening()
    consumer = idle(broker)
    monkeypatch.setattr(waiting, "IDLE", LONG)
    with ThreadPoolExecutor() as threads:
        idles = [threads.submit(next, consumer), threads.submit(broker.work_queue.get, timeout=0)]
        assert wait_until(lambda: broker.work_queue.not_empty._waiters and consumer._bell._rung._cond._waiters, LIMIT)

        Holding().before_worker_shutdown(broker, None)

        assert idles[0].result(LIMIT) is None
        assert isinstance(idles[1].exception(LIMIT), Empty)


def test_whoever_may_not_publish_puts_messages_in_all_the_same(client, urls):
    rights = ["reset", "on", "nopass", "~*", "+@all", "-publish", "resetchannels"]
    client.execute_command("ACL", "SETUSER", "mute", *rights)
    try:
        with redis.Redis.from_url(urls.redis, username="mute", password="any") as muted:
            assert Deliveries(muted, NAMESPACE, "me").enqueue(QUEUE, "1", b"body")
    finally:
        client.execute_command("ACL", "DELUSER", "mute")

    assert client.lrange(CHANNEL, 0, -1) == [b"1"]


@pytest.fixture
def rings(client):
    """Return how often it has been rung on the channel of a queue since the last time."""
    with client.pubsub() as line:
        line.subscribe(CHANNEL, f"{CHANNEL}.DQ")
        for _ in range(2):
            assert line.get_message(timeout=LIMIT)["type"] == "subscribe"

        def heard():
            client.publish(CHANNEL, "end")
            channels = []
            while (said := line.get_message(timeout=LIMIT))["data"] != b"end":
                channels.append(said["channel"].decode())
            return channels

        yield heard


@pytest.mark.parametrize(
    ("step", "channel"),
    {
        "enqueue": (lambda broker, _one: put(broker, "2"), CHANNEL),
        "enqueue later": (lambda broker, _one: put(broker, "2", LINE), f"{CHANNEL}.DQ"),
        "enqueue many": (lambda broker, _one: enqueue_many(broker, broker.get_actor("act"), [("2", ())]), CHANNEL),
        "retry": (lambda broker, one: broker.deliveries.retry(QUEUE, one, b"later"), f"{CHANNEL}.DQ"),
        "requeue": (lambda broker, one: broker.deliveries.requeue(QUEUE, [one.id]), CHANNEL),
        "requeue lost": (lambda broker, _one: broker.deliveries.requeue_lost(QUEUE, []), CHANNEL),
        "requeue unstarted": (lambda broker, _one: broker.deliveries.requeue_unstarted(QUEUE), CHANNEL),
    }.values(),
)
def test_whatever_puts_a_message_into_a_queue_rings(broker, rings, step, channel):
    put(broker, "1")
    (one,) = broker.deliveries.fetch(QUEUE, limit=1)
    rings()

    step(broker, one)

    assert rings() == [channel]


def test_a_message_that_has_become_due_rings(broker, rings):
    put(broker, "1", LINE)
    (one,) = broker.deliveries.fetch(LINE, limit=1)
    rings()

    broker.deliveries.due(QUEUE, one, b"body")

    assert rings() == [CHANNEL]


def test_what_is_reclaimed_rings(broker, client, rings):
    put(broker, "1")
    Deliveries(client, NAMESPACE, "dead").fetch(QUEUE, limit=1)
    client.zadd(f"{NAMESPACE}:__heartbeats__", {"dead": 1})
    rings()

    broker.deliveries.reclaim([QUEUE], dead_after=timedelta(seconds=1))

    assert rings() == [CHANNEL]


def test_a_message_that_is_on_its_way_rings_for_nobody(broker, rings):
    put(broker, "1")
    rings()

    put(broker, "1")

    assert rings() == []


def test_bells_of_other_queues_are_not_rung(broker, client):
    doorbell = Doorbell(client, NAMESPACE)
    ours, other = doorbell.bell(QUEUE), doorbell.bell("other")
    ours.answer()
    other.answer()
    doorbell.listens = True

    doorbell._ring_for(CHANNEL)

    assert (ours.answer(), other.answer()) == (True, False)
