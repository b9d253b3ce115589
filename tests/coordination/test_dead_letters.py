"""Dead letters in a real Redis, made by Dramatiq's own nack: found, replayed once, removed."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import dramatiq
import orjson
import pytest
import redis
from dramatiq import Message, Worker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Retries

from forgekeeper.delivery import dead_letters
from forgekeeper.delivery.dead_letters import Malformed
from forgekeeper.delivery.enqueue_unique import enqueue_unique, forget_dead
from forgekeeper.delivery.queues import depth
from tests.harness.waiting import wait_until

QUEUE, OTHER = "git", "objects"
QUEUES = (QUEUE, OTHER)
NAMESPACE = "dead_letters"
LIMIT = 60.0
KEY = f"{NAMESPACE}:{QUEUE}"
NOTHING = {"ready": 0, "in_flight": 0, "delayed": 0, "dead": 0}
PAST = {"retries": 3, "traceback": "Traceback\n  ...\nOSError: gone", "eta": 5, "requeue_timestamp": 7}


@pytest.fixture
def client(urls):
    with redis.BlockingConnectionPool.from_url(urls.redis) as pool:
        client = redis.Redis(connection_pool=pool)
        client.flushdb()
        yield client


@pytest.fixture
def broker(client):
    broker = RedisBroker(client=client, namespace=NAMESPACE, middleware=[])
    for queue in QUEUES:
        broker.declare_queue(queue)
    return broker


@pytest.fixture
def die(broker):
    """Let messages die as they do in a worker: sent, fetched, refused."""

    def die(*ids, queue=QUEUE, **options):
        for message_id in ids:
            enqueue_unique(broker, Message(queue, "clean", (1, "a"), {"deep": True}, options, message_id))
            broker.do_fetch(queue, 1)
            broker.do_nack(queue, message_id)

    return die


@pytest.fixture
def letter(broker):
    """Read the dead letter with an id, as it is now."""
    return lambda message_id: dead_letters.find(broker, QUEUES, message_id)


@pytest.fixture
def listed(broker):
    def listed(**how):
        return [one.id for one in dead_letters.read(broker, dead_letters.addresses(broker, QUEUES, **how))]

    return listed


@pytest.fixture
def keys(client):
    """List the ids in the set of the dead, in the hash of their bodies and in the hash of their reasons."""
    return lambda: tuple(
        {key.decode() for key in found}
        for found in (
            client.zrange(f"{KEY}.XQ", 0, -1),
            client.hkeys(f"{KEY}.XQ.msgs"),
            client.hkeys(f"{KEY}.XQ.reasons"),
        )
    )


def push(broker, message_id):
    return enqueue_unique(broker, Message(QUEUE, "clean", (), {}, {}, message_id))


def note(client, message_id, reason):
    client.hset(f"{KEY}.XQ.reasons", message_id, reason)


def spoil(client, message_id, body):
    client.hset(f"{KEY}.XQ.msgs", message_id, body)


def test_a_dead_letter_is_found_with_all_that_it_said(die, letter):
    die("7", retries=2)

    found = letter("7")

    assert (found.queue, found.id, found.options["retries"]) == (QUEUE, "7", 2)
    assert (found.message.actor_name, found.message.args, found.message.kwargs) == ("clean", (1, "a"), {"deep": True})
    assert abs(found.since - datetime.now(UTC)) < timedelta(minutes=1)


def test_what_is_not_dead_is_not_found(broker, letter):
    push(broker, "7")

    assert (letter("7"), letter("8")) == (None, None)


def test_a_dead_letter_of_any_queue_is_found(die, letter):
    die("7", queue=OTHER)

    assert letter("7").queue == OTHER


def test_dead_letters_of_all_queues_are_listed_in_the_order_of_their_deaths(client, die, listed):
    ids = ["c", "a", "d", "b"]
    for number, message_id in enumerate(ids):
        queue = QUEUES[number % 2]
        die(message_id, queue=queue)
        client.zadd(f"{NAMESPACE}:{queue}.XQ", {message_id: 1_000 * number})

    assert (listed(), listed(oldest_first=False)) == (ids, ids[::-1])


@pytest.mark.parametrize(("oldest_first", "first"), [(True, ["a", "b"]), (False, ["d", "c"])])
def test_not_more_are_listed_than_asked_for(client, die, listed, oldest_first, first):
    for number, message_id in enumerate("abcd"):
        queue = QUEUES[number // 2]
        die(message_id, queue=queue)
        client.zadd(f"{NAMESPACE}:{queue}.XQ", {message_id: 1_000 * number})

    assert listed(limit=2, oldest_first=oldest_first) == first


def test_more_than_a_page_of_dead_letters_is_read(client, listed):
    ids = {f"{number:05}": number for number in range(dead_letters.PAGE + 1)}
    client.zadd(f"{KEY}.XQ", ids)

    assert listed() == list(ids)


def test_a_letter_that_is_removed_after_it_was_listed_is_left_out(broker, die, letter):
    die("7", "8")
    found = dead_letters.addresses(broker, QUEUES)

    dead_letters.remove(broker, letter("7"))

    assert [one.id for one in dead_letters.read(broker, found)] == ["8"]


def test_a_letter_that_has_died_anew_since_it_was_listed_is_left_out(client, broker, die):
    die("7")
    client.zincrby(f"{KEY}.XQ", -1000, "7")
    found = dead_letters.addresses(broker, QUEUES)

    die("7")

    assert list(dead_letters.read(broker, found)) == []


def test_the_dead_letters_of_all_queues_are_counted(broker, die):
    die("7", "8")
    die("7", queue=OTHER)

    assert dead_letters.count(broker, QUEUES) == 3


# Why it was given up


def test_the_reason_is_what_was_noted(client, die, letter):
    die("7", **PAST)
    note(client, "7", "poison")

    assert letter("7").reason == "poison"


def test_without_a_note_the_reason_is_the_last_line_of_the_last_error(die, letter):
    die("7", **PAST)

    assert letter("7").reason == "OSError: gone"


@pytest.mark.parametrize("options", [{}, {"traceback": ""}, {"traceback": None}])
def test_a_letter_of_which_nobody_knows_the_reason_has_none(die, letter, options):
    die("7", **options)

    assert letter("7").reason == ""


# Bodies that are no messages


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b'{"queue_name": 1}',
        orjson.dumps(
            {"queue_name": QUEUE, "actor_name": 5, "args": [], "kwargs": {}, "options": {}, "message_id": "7"}
        ),
        orjson.dumps(
            {"queue_name": QUEUE, "actor_name": "a", "args": [], "kwargs": {}, "options": [], "message_id": "7"}
        ),
        b"[" * 100_000,
    ],
    ids=["empty", "no text", "null", "list", "nothing in it", "parts missing", "actor", "options", "deep"],
)
def test_a_body_that_is_no_message_can_be_read_and_says_so(client, die, letter, body):
    die("7")
    spoil(client, "7", body)

    found = letter("7")

    assert (found.body, found.reason, found.options) == (body, "", {})
    assert found.fault.startswith("its body is no message")
    with pytest.raises(Malformed):
        _ = found.message


def test_a_letter_without_a_body_says_so(client, letter):
    client.zadd(f"{KEY}.XQ", {"7": 1})

    assert letter("7").fault == "its body is gone"


def test_an_id_that_is_no_text_can_be_found_and_removed(broker, client, letter):
    client.zadd(f"{KEY}.XQ", {b"\xff": 1})
    (address,) = dead_letters.addresses(broker, QUEUES)

    assert dead_letters.remove(broker, letter(address.id))
    assert client.zcard(f"{KEY}.XQ") == 0


# Replay


def test_a_replayed_letter_is_back_in_its_queue_under_its_id_with_all_its_retries(broker, client, die, letter, keys):
    die("7", max_retries=9, **PAST)
    note(client, "7", "poison")

    became = dead_letters.replay(broker, letter("7"))

    assert (became, keys()) == ("replayed", (set(), set(), set()))
    (body,) = broker.do_fetch(QUEUE, 1)
    message = Message.decode(body)
    assert (message.message_id, message.queue_name, message.args) == ("7", QUEUE, (1, "a"))
    assert message.options == {"redis_message_id": "7", "max_retries": 9}


def test_a_letter_that_died_while_it_waited_goes_back_into_the_queue_proper(broker, client, die, letter):
    die("7")
    body = orjson.loads(client.hget(f"{KEY}.XQ.msgs", "7"))
    spoil(client, "7", orjson.dumps(body | {"queue_name": f"{QUEUE}.DQ"}))

    dead_letters.replay(broker, letter("7"))

    (body,) = broker.do_fetch(QUEUE, 1)
    assert Message.decode(body).queue_name == QUEUE


def test_a_letter_whose_id_is_nowhere_else_is_not_on_its_way(broker, die, letter):
    die("7")

    assert not dead_letters.is_on_its_way(broker, letter("7"))


def test_a_letter_that_has_been_replaced_meanwhile_is_not_replayed_as_it_was(broker, die, letter, keys):
    die("7")
    seen = letter("7")
    dead_letters.remove(broker, seen)
    die("7", retries=1)

    assert dead_letters.replay(broker, seen) == "gone"
    assert keys()[0] == {"7"}


def test_of_many_who_replay_the_same_letters_one_does(broker, client, die, letter):
    ids = [str(number) for number in range(20)]
    die(*ids)
    seen = [letter(message_id) for message_id in ids]

    with ThreadPoolExecutor(6) as pool:
        became = list(pool.map(lambda one: dead_letters.replay(broker, one), seen * 6))

    assert (became.count("replayed"), depth(client, NAMESPACE, QUEUE)["ready"]) == (len(ids), len(ids))


def test_a_letter_of_another_id_in_redis_goes_back_under_the_message_s_own(broker, client, die, letter, keys):
    # Dramatiq gives each try an id of its own in Redis; ours does not, but letters may be older.
    die("7")
    body = client.hget(f"{KEY}.XQ.msgs", "7")
    client.zadd(f"{KEY}.XQ", {"try 2": 1})
    client.hset(f"{KEY}.XQ.msgs", "try 2", body)

    became = dead_letters.replay(broker, letter("try 2"))

    assert (became, keys()[0], client.lrange(KEY, 0, -1)) == ("replayed", {"7"}, [b"7"])


def test_a_letter_that_a_worker_gave_up_is_worked_on_after_its_replay(client, urls):
    broker = RedisBroker(
        client=client, namespace=NAMESPACE, middleware=[Retries(max_retries=1, min_backoff=1, max_backoff=1)]
    )
    tries = []

    @dramatiq.actor(broker=broker, queue_name=QUEUE)
    def clean(number):
        tries.append(number)
        if len(tries) <= 2:
            raise OSError("away")

    clean.send(5)
    worker = Worker(broker, worker_timeout=10, worker_threads=1)
    worker.start()
    try:
        assert wait_until(lambda: dead_letters.count(broker, QUEUES) == 1, LIMIT)
        (found,) = dead_letters.read(broker, dead_letters.addresses(broker, QUEUES))
        assert (found.reason, found.options["retries"]) == ("OSError: away", 1)

        became = dead_letters.replay(broker, found)

        assert wait_until(lambda: len(tries) == 3, LIMIT)
        broker.join(QUEUE, timeout=round(LIMIT * 1000))
    finally:
        worker.stop()
    assert (became, tries, dead_letters.count(broker, QUEUES)) == ("replayed", [5, 5, 5], 0)


# Removal


def test_a_removed_letter_leaves_nothing(broker, client, die, letter, keys):
    die("7", "8")
    for message_id in "78":
        note(client, message_id, "poison")

    removed = dead_letters.remove(broker, letter("7"))

    assert (removed, keys()) == (True, ({"8"}, {"8"}, {"8"}))


def test_a_forgotten_letter_takes_its_reason_along(broker, client, die, keys):
    die("old", "young")
    client.zadd(f"{KEY}.XQ", {"old": 1})
    for message_id in ("old", "young"):
        note(client, message_id, "poison")

    forgotten = forget_dead(broker, QUEUE, ttl=timedelta(days=1), limit=10)

    assert (forgotten, keys()) == (1, ({"young"}, {"young"}, {"young"}))


def test_a_reason_whose_letter_dramatiq_has_forgotten_is_forgotten(broker, client, die, keys):
    die("young")
    note(client, "old", "poison")
    note(client, "young", "poison")

    forgotten = forget_dead(broker, QUEUE, ttl=timedelta(days=1), limit=10)

    assert (forgotten, keys()[2]) == (0, {"young"})
