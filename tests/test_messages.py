"""Messages in a real Redis, beside what Dramatiq itself leaves there and does with them."""

import time
from datetime import timedelta

import pytest
import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Middleware

from forgekeeper.connections import client
from forgekeeper.delivery.enqueue_unique import DEAD_MESSAGE_TTL, TOKEN, enqueue_unique, forget_dead, is_dead
from forgekeeper.delivery.queues import depth
from forgekeeper.process.broker import NAMESPACE, broker

ACTOR = broker.actors["user_status_cleanup"]
QUEUE = "cron"
KEY = f"{NAMESPACE}:{QUEUE}"
DAY = timedelta(days=1)

pytestmark = pytest.mark.usefixtures("database")


class Witness(Middleware):
    """Writes down which hooks were called for which message."""

    def __init__(self):
        self.hooks = []

    def before_enqueue(self, _broker, message, delay):
        self.hooks.append(("before_enqueue", type(message), set(message.options), delay))

    def after_enqueue(self, _broker, message, delay):
        self.hooks.append(("after_enqueue", type(message), set(message.options), delay))


@pytest.fixture
def witness():
    return Witness()


@pytest.fixture
def witnessed(witness):
    """A broker like ours whose hooks are witnessed."""
    return RedisBroker(client=client, namespace=NAMESPACE, middleware=[witness])


def message(message_id="7"):
    return ACTOR.message().copy(message_id=message_id)


def push(message_id="7"):
    return enqueue_unique(broker, message(message_id))


def fetch():
    (body,) = broker.do_fetch(QUEUE, 1)
    return Message.decode(body)


def die(message_id, *, age=timedelta(0)):
    """Put a message among the dead letters as Dramatiq does, but *age* ago."""
    died = round((time.time() - age.total_seconds()) * 1000)
    client.zadd(f"{KEY}.XQ", {message_id: died})
    client.hset(f"{KEY}.XQ.msgs", message_id, message(message_id).encode())


def dead_letters():
    """The ids in the sorted set, and the ids that have a body."""
    return set(client.zrange(f"{KEY}.XQ", 0, -1)), set(client.hkeys(f"{KEY}.XQ.msgs"))


def left_behind():
    """What lies in the queue: each key's type, the ids by what they are called, the body without what must differ."""
    (redis_id,) = client.lrange(KEY, 0, -1)
    ((hash_id, body),) = client.hgetall(f"{KEY}.msgs").items()
    decoded = Message.decode(body).asdict()
    options = dict(decoded["options"])
    assert options["redis_message_id"].encode() == redis_id == hash_id
    # A producer among the heartbeats, as Dramatiq's own script leaves it, is of no use to anybody.
    keys = {key: client.type(key) for key in client.scan_iter() if not key.endswith(b":__heartbeats__")}
    same = {name: value for name, value in decoded.items() if name not in {"message_id", "message_timestamp"}}
    return keys, same | {"options": set(options)}, {name: type(value) for name, value in decoded.items()}


def test_a_pushed_message_leaves_what_a_sent_one_leaves():
    broker.enqueue(ACTOR.message())
    sent = left_behind()
    client.flushdb()

    push()

    assert left_behind() == sent


def test_a_push_calls_the_hooks_that_a_send_calls(witnessed, witness):
    witnessed.declare_queue(QUEUE)
    witnessed.enqueue(message())
    by_send = witness.hooks.copy()
    client.flushdb()
    witness.hooks.clear()

    enqueue_unique(witnessed, message())

    assert witness.hooks == by_send


def test_a_server_that_has_forgotten_the_scripts_is_taught_them_again():
    push("7")
    client.script_flush()

    assert push("8")


def test_a_server_that_has_become_read_only_is_left_for_whoever_is_master_now():
    before = client.client_id()
    client.replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(redis.ResponseError, match=r"(?i)read.?only"):
            push("7")
    finally:
        client.replicaof("no", "one")

    assert client.client_id() != before


def test_a_message_of_the_same_id_for_another_run_is_not_dead():
    push()
    broker.do_nack(QUEUE, fetch().options["redis_message_id"])

    assert not is_dead(broker, message().copy(options={TOKEN: "another"}))


def test_a_dead_letter_that_is_no_message_is_nobodys():
    push()
    broker.do_nack(QUEUE, fetch().options["redis_message_id"])
    client.hset(f"{broker.namespace}:{QUEUE}.XQ.msgs", "7", b"[]")

    assert not is_dead(broker, message())


@pytest.mark.parametrize("step", [push, lambda: (push(), fetch()), lambda: die("8")])
def test_a_message_elsewhere_is_not_dead(step):
    step()

    assert not is_dead(broker, message())


def test_dead_letters_older_than_their_time_to_live_are_forgotten():
    die("old", age=DAY + timedelta(minutes=1))
    die("young", age=DAY - timedelta(minutes=1))

    forgotten = forget_dead(broker, QUEUE, ttl=DAY, limit=10)

    assert (forgotten, dead_letters()) == (1, ({b"young"}, {b"young"}))


def test_dead_letters_live_for_seven_days_by_default():
    die("old", age=DEAD_MESSAGE_TTL + timedelta(minutes=1))
    die("young", age=timedelta(days=7) - timedelta(minutes=1))

    forget_dead(broker, QUEUE, limit=10)

    assert dead_letters() == ({b"young"}, {b"young"})


def test_not_more_dead_letters_are_forgotten_than_the_limit_the_oldest_first():
    for days in range(2, 8):
        die(str(days), age=DAY * days)

    forgotten = forget_dead(broker, QUEUE, ttl=DAY, limit=4)

    assert (forgotten, dead_letters()) == (4, ({b"2", b"3"}, {b"2", b"3"}))


def test_without_dead_letters_there_is_nothing_to_forget():
    assert forget_dead(broker, QUEUE, limit=10) == 0


def test_a_dead_letter_of_another_queue_is_not_forgotten():
    die("old", age=2 * DAY)

    forget_dead(broker, "git", ttl=DAY, limit=10)

    assert is_dead(broker, message("old"))


def test_an_empty_queue_has_no_depth():
    assert depth(client, NAMESPACE, QUEUE) == {"ready": 0, "in_flight": 0, "delayed": 0, "dead": 0}


def test_the_depth_of_a_delayed_queue_counts_each_message_once():
    broker.do_enqueue(f"{QUEUE}.DQ", "later", message("later").encode())

    assert depth(client, NAMESPACE, f"{QUEUE}.DQ") == {"ready": 1, "in_flight": 0, "delayed": 0, "dead": 0}


def test_depth_counts_each_message_where_it_is():
    for message_id in ("dead", "flying", "in flight", "done", "a", "b", "c", "d"):
        push(message_id)
    broker.do_nack(QUEUE, fetch().options["redis_message_id"])
    fetch()
    fetch()
    broker.do_ack(QUEUE, fetch().options["redis_message_id"])
    for message_id in ("later", "much later", "never"):
        broker.do_enqueue(f"{QUEUE}.DQ", message_id, message(message_id).encode())

    counts = depth(client, NAMESPACE, QUEUE)

    assert counts == {"ready": 4, "in_flight": 2, "delayed": 3, "dead": 1}
