"""What any delivery has to promise: every message is in exactly one place, whatever its worker does, and when.

The tests know a delivery by its broker, by `enqueue_unique`, `enqueue_many` and `dead_letters`, and by what is in `Ours`
of how its processes live and die.  Another implementation passes when its class is among `IMPLEMENTATIONS`.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import dramatiq
import pytest
import redis
from dramatiq.common import current_millis, iter_queue
from dramatiq.errors import ConnectionClosed
from dramatiq.middleware import Middleware, SkipMessage
from dramatiq.worker import _WorkQueueItem

from forgekeeper import shutdown
from forgekeeper.delivery import dead_letters
from forgekeeper.delivery.broker import Broker
from forgekeeper.delivery.deliveries import MAX_DEATHS
from forgekeeper.delivery.enqueue_many import CHUNK, enqueue_many
from forgekeeper.delivery.enqueue_unique import enqueue_unique, forget_dead, is_dead
from forgekeeper.delivery.queues import depth
from forgekeeper.delivery.sizes import LARGEST, MessageTooLarge
from forgekeeper.process.middleware import Holding

QUEUE = "q"
LIMIT = 10
LONG_AGO = timedelta(minutes=1)


class Child(Middleware):
    """Lets an actor be declared as a child; nothing is worked on here."""

    actor_options = {"child", "document"}  # noqa: RUF012, Dramatiq's name


class Witness(Middleware):
    def __init__(self):
        self.hooks = []

    def before_enqueue(self, _broker, message, delay):
        self.hooks.append(("before", message.message_id, delay))

    def after_enqueue(self, _broker, message, delay):
        self.hooks.append(("after", message.message_id, delay))


class Ours:
    """Our delivery, in Redis."""

    def __init__(self, url):
        self.client = redis.Redis(connection_pool=redis.BlockingConnectionPool.from_url(url))
        self.empty()

    def process(self, *middleware):
        """Return the broker of another process, with an actor of its own."""
        holding = [Holding([QUEUE]), Child(), *middleware]
        broker = Broker(client=self.client, namespace="contract", middleware=holding)
        dramatiq.actor(lambda *_: None, actor_name="act", queue_name=QUEUE, broker=broker, child=True)
        return broker

    def places(self):
        """Count the messages of the queue by where they are."""
        return {place: count for place, count in depth(self.client, "contract", QUEUE).items() if count}

    def heartbeat(self, broker):
        """Let the process say that it lives."""
        broker.deliveries.heartbeat()

    def expire(self, broker):
        """Let the process have said nothing for long."""
        self.client.zadd("contract:__heartbeats__", {broker.broker_id: 0})

    def reclaim(self, broker):
        """Let a process take the messages of expired ones; return the ids that are poison."""
        return [id_ for one in broker.deliveries.reclaim([QUEUE], dead_after=LONG_AGO) for id_ in one.poison]

    def empty(self):
        """Forget everything, as a server that has lost its disk."""
        self.client.flushdb()

    def close(self):
        self.client.connection_pool.disconnect()


IMPLEMENTATIONS = [Ours]


@pytest.fixture(params=IMPLEMENTATIONS)
def delivery(request, urls):
    delivery = request.param(urls.redis)
    yield delivery
    delivery.close()


@pytest.fixture
def broker(delivery):
    return delivery.process()


@pytest.fixture
def drains():
    yield shutdown.requested.set
    shutdown.requested.clear()


# How messages are put in: each takes ids, and returns for each whether it was accepted.


def message(message_id, *args):
    return dramatiq.Message(QUEUE, "act", args, {}, {}, message_id)


def one_by_one(broker, *ids, args=()):
    return [enqueue_unique(broker, message(message_id, *args)) for message_id in ids]


def many_at_once(broker, *ids, args=()):
    done = enqueue_many(broker, broker.get_actor("act"), [(message_id, args) for message_id in ids])
    assert done.enqueued + done.deduplicated == len(ids)
    return [True] * done.enqueued + [False] * done.deduplicated


def by_dramatiq(broker, *ids, args=()):
    before = sum(depth(broker.client, broker.namespace, QUEUE).values())
    for message_id in ids:
        broker.enqueue(message(message_id, *args))
    count = sum(depth(broker.client, broker.namespace, QUEUE).values()) - before
    return [True] * count + [False] * (len(ids) - count)


enqueues = pytest.mark.parametrize("enqueue", [one_by_one, many_at_once, by_dramatiq])


def handed_out(consumer):
    """All messages that the consumer hands out before it idles."""
    found = []
    while (one := next(consumer)) is not None:
        found.append(one)
    return found


def consumer_of(broker, *, queue=QUEUE, prefetch=100):
    return broker.consume(queue, prefetch=prefetch, timeout=1)


def fetched(broker, **how):
    """A consumer, and all that it hands out."""
    consumer = consumer_of(broker, **how)
    return consumer, handed_out(consumer)


def ids(messages):
    return [one.message_id for one in messages]


def start(broker, delivered):
    """Start on a message, as Dramatiq does."""
    broker.emit_before("process_message", delivered)


def dead_lettered(broker, message_id, *, args=()):
    enqueue_unique(broker, message(message_id, *args))
    consumer, (delivered,) = fetched(broker)
    delivered.stuff_exception(ValueError("no"))
    consumer.nack(delivered)


# Enqueue


@enqueues
def test_messages_are_handed_out_as_they_were_enqueued_and_in_that_order(broker, enqueue):
    accepted = enqueue(broker, "3", "1", "2", args=(7, "größer ☃", None))

    _, found = fetched(broker)

    assert accepted == [True] * 3
    assert [(one.message_id, one.args, one.actor_name) for one in found] == [
        (message_id, (7, "größer ☃", None), "act") for message_id in "312"
    ]


def ready(broker, consumer):
    """It lies there."""


def in_hand(broker, consumer):
    handed_out(consumer)


def delayed(broker, consumer):
    (delivered,) = handed_out(consumer)
    broker.enqueue(delivered, delay=60_000)
    consumer.ack(delivered)


@enqueues
@pytest.mark.parametrize("place", [ready, in_hand, delayed])
def test_an_id_that_is_on_its_way_is_refused_and_the_first_message_stays(delivery, broker, enqueue, place):
    enqueue_unique(broker, message("7", "first"))
    place(broker, consumer_of(broker))
    before = delivery.places()

    accepted = enqueue(broker, "7", args=("second",))

    assert (accepted, delivery.places()) == ([False], before)
    # What is in hand comes again when its process is gone.
    delivery.expire(broker)
    delivery.reclaim(delivery.process())
    found = [one for queue in (QUEUE, f"{QUEUE}.DQ") for one in fetched(delivery.process(), queue=queue)[1]]
    assert [one.args for one in found] == [("first",)]


@enqueues
@pytest.mark.parametrize("end", ["ack", "nack"])
def test_an_id_that_has_ended_is_accepted_again(broker, enqueue, end):
    enqueue(broker, "7")
    consumer, (delivered,) = fetched(broker)
    getattr(consumer, end)(delivered)

    assert enqueue(broker, "7") == [True]
    assert ids(handed_out(consumer)) == ["7"]


@enqueues
def test_an_id_that_was_lost_with_everything_else_is_accepted_again(delivery, broker, enqueue):
    enqueue(broker, "7")
    fetched(broker)
    delivery.empty()

    assert enqueue(broker, "7") == [True]


@pytest.mark.parametrize(("enqueue", "count"), [(one_by_one, 50), (many_at_once, 5 * CHUNK)])
def test_of_concurrent_enqueues_of_an_id_one_is_accepted(delivery, enqueue, count):
    all_ids, together = [str(number) for number in range(count)], threading.Barrier(4, timeout=30)

    def enqueue_all(broker):
        together.wait()
        return enqueue(broker, *all_ids)

    with ThreadPoolExecutor(4) as pool:
        accepted = list(pool.map(enqueue_all, [delivery.process() for _ in range(4)]))

    assert sum(map(sum, accepted)) == count
    assert sorted(ids(fetched(delivery.process(), prefetch=2 * count)[1])) == sorted(all_ids)


@enqueues
def test_a_message_that_is_too_large_is_refused(delivery, broker, enqueue):
    with pytest.raises(MessageTooLarge):
        enqueue(broker, "7", args=("x" * LARGEST,))

    assert delivery.places() == {}


@enqueues
def test_the_hooks_of_an_enqueue_are_called_and_the_last_only_for_what_was_accepted(delivery, enqueue):
    witness = Witness()
    broker = delivery.process(witness)
    enqueue(broker, "7")
    enqueue(broker, "7")

    assert witness.hooks == [("before", "7", None), ("after", "7", None), ("before", "7", None)]


# Delayed


def test_a_delayed_message_waits_for_its_time_and_comes_then(delivery, broker):
    broker.enqueue(message("7"), delay=60_000)
    waits = delivery.places()
    consumer, (waiting,) = fetched(broker, queue=f"{QUEUE}.DQ")
    eta = waiting.options["eta"]

    # As Dramatiq does when the time has come.
    due = waiting.copy(queue_name=QUEUE)
    del due.options["eta"]
    broker.enqueue(due)
    still_waits = delivery.places()
    consumer.ack(waiting)

    assert (waits, 50_000 < eta - current_millis() <= 60_000) == ({"delayed": 1}, True)
    assert (still_waits, delivery.places()) == ({"delayed": 1}, {"ready": 1})
    (again,) = fetched(broker)[1]
    assert (again.message_id, again.queue_name, "eta" in again.options) == ("7", QUEUE, False)


def test_a_retry_waits_from_the_acknowledgement_on_and_until_then_the_message_is_in_hand(delivery, broker):
    one_by_one(broker, "7")
    consumer, (delivered,) = fetched(broker)

    broker.enqueue(delivered, delay=60_000)
    before = delivery.places()
    consumer.ack(delivered)

    assert (before, delivery.places()) == ({"in_flight": 1}, {"delayed": 1})


# Consume, and each end


def test_no_more_is_handed_out_than_may_be_prefetched_until_one_has_ended(broker):
    one_by_one(broker, "1", "2", "3")
    consumer, (first, second) = fetched(broker, prefetch=2)

    consumer.ack(first)

    assert (ids([first, second]), ids(handed_out(consumer))) == (["1", "2"], ["3"])


def test_a_message_that_is_acknowledged_is_nowhere(delivery, broker):
    one_by_one(broker, "7")
    consumer, (delivered,) = fetched(broker)
    during = delivery.places()

    consumer.ack(delivered)

    assert (during, delivery.places()) == ({"in_flight": 1}, {})


def test_a_message_that_is_refused_is_a_dead_letter_with_its_reason(delivery, broker):
    dead_lettered(broker, "7")

    letter = dead_letters.find(broker, [QUEUE], "7")

    assert (delivery.places(), letter.reason, letter.message.message_id) == ({"dead": 1}, "ValueError: no", "7")
    assert is_dead(broker, message("7"))


def test_messages_that_are_requeued_are_at_the_head_of_the_queue_in_their_order(delivery, broker):
    one_by_one(broker, "1", "2", "3")
    consumer, found = fetched(broker, prefetch=2)

    consumer.requeue(found)

    assert ids(fetched(delivery.process())[1]) == ["1", "2", "3"]


def test_a_process_that_drains_hands_out_nothing_starts_nothing_and_requeues_what_it_has_not_started(
    delivery, broker, drains
):
    one_by_one(broker, "1", "2", "3", "4")
    consumer, (first, second, _third) = fetched(broker, prefetch=3)
    start(broker, first)
    drains()

    with pytest.raises(SkipMessage):
        start(broker, second)
    consumer.ack(second)
    assert next(consumer) is None
    shutdown.requested.clear()
    other, found = fetched(delivery.process())
    consumer.ack(first)
    for one in found:
        other.ack(one)

    assert (sorted(ids(found)), delivery.places()) == (["2", "3", "4"], {})


# A thread that ends a message has its next one already


def waiting(broker, *delivered):
    """Let these wait for a thread, as Dramatiq's consumers do."""
    for one in delivered:
        broker.work_queue.put(_WorkQueueItem(0, one))


def starts(delivery):
    return {id_.decode(): int(count) for id_, count in delivery.client.hgetall(f"contract:{QUEUE}.starts").items()}


def upcoming(broker):
    """The message that this thread works on next."""
    return broker.work_queue.get(block=False).message


def test_the_end_of_a_message_is_the_start_of_the_one_that_its_thread_works_on_next(delivery, broker):
    one_by_one(broker, "1", "2", "3")
    consumer, (first, second, third) = fetched(broker)
    start(broker, first)
    waiting(broker, second, third)

    consumer.ack(first)
    noted = starts(delivery)
    start(broker, upcoming(broker))

    assert (noted, starts(delivery)) == ({"2": 1}, {"2": 1})
    assert delivery.places() == {"in_flight": 2}


def test_a_message_that_was_taken_from_us_is_not_started_with_the_end_of_another(delivery, broker):
    one_by_one(broker, "1", "2")
    consumer, (first, second) = fetched(broker)
    waiting(broker, second)
    broker.deliveries.requeue(QUEUE, ["2"])

    consumer.ack(first)

    assert starts(delivery) == {}
    with pytest.raises(SkipMessage):
        start(broker, upcoming(broker))


@pytest.fixture
def failed(delivery, broker):
    """Let the end of a message fail, and with it the start of another; return their consumer and both."""
    one_by_one(broker, "1", "2")
    consumer, (first, second) = fetched(broker)
    waiting(broker, second)
    key = f"contract:{QUEUE}.starts"
    delivery.client.set(key, "not ours")
    with pytest.raises(ConnectionClosed):
        consumer.ack(first)
    delivery.client.delete(key)
    return consumer, first, second


def test_a_message_whose_start_failed_with_the_end_of_another_is_worked_on_by_any_thread(delivery, broker, failed):
    consumer, first, second = failed

    with ThreadPoolExecutor() as other:
        found = other.submit(broker.work_queue.get, timeout=LIMIT).result().message
    start(broker, found)
    # The reply alone may have been lost: noted once more it would be two deaths.
    noted = starts(delivery)
    consumer.ack(first)
    consumer.ack(found)

    assert (found, noted, delivery.places()) == (second, {}, {})


@pytest.mark.usefixtures("failed")
def test_a_message_whose_start_failed_with_the_end_of_another_is_skipped_once_it_was_taken_from_us(broker):
    broker.deliveries.requeue(QUEUE, ["2"])

    with pytest.raises(SkipMessage):
        start(broker, upcoming(broker))


def test_a_process_that_drains_starts_no_message_with_the_end_of_another(delivery, broker, drains):
    one_by_one(broker, "1", "2")
    consumer, (first, second) = fetched(broker)
    waiting(broker, second)
    drains()

    consumer.ack(first)

    assert starts(delivery) == {}


def test_a_message_that_was_started_with_the_end_of_another_goes_back_where_the_process_drains_then(
    delivery, broker, drains
):
    one_by_one(broker, "1", "2")
    consumer, (first, second) = fetched(broker)
    waiting(broker, second)
    consumer.ack(first)
    drains()

    found = upcoming(broker)
    with pytest.raises(SkipMessage):
        start(broker, found)
    consumer.ack(found)

    assert (delivery.places(), starts(delivery)) == ({"ready": 1}, {})


def test_a_message_of_another_queue_is_not_started_with_the_end_of_one(delivery, broker):
    dramatiq.actor(lambda *_: None, actor_name="other", queue_name="other", broker=broker, child=True)
    one_by_one(broker, "1")
    enqueue_unique(broker, dramatiq.Message("other", "other", (), {}, {}, "2"))
    consumer, (first,) = fetched(broker)
    _, (second,) = fetched(broker, queue="other")
    waiting(broker, second)

    consumer.ack(first)

    assert delivery.client.hgetall("contract:other.starts") == {}
    start(broker, upcoming(broker))
    assert delivery.client.hgetall("contract:other.starts") == {b"2": b"1"}


def test_what_a_thread_has_taken_before_it_ends_is_there_for_whoever_empties_the_queue(broker):
    one_by_one(broker, "1", "2", "3")
    consumer, (first, second, third) = fetched(broker)
    waiting(broker, second, third)

    with ThreadPoolExecutor() as thread:
        thread.submit(consumer.ack, first).result()
        found = [item.message for item in iter_queue(broker.work_queue)]

    assert found == [third, second]


# Processes that die


def test_what_an_expired_process_had_in_hand_is_first_in_the_queue_again_and_what_it_does_then_changes_nothing(
    delivery, broker
):
    one_by_one(broker, "1", "2", "3")
    consumer, (first, second) = fetched(broker, prefetch=2)
    start(broker, first)
    delivery.expire(broker)
    successor = delivery.process()

    poison = delivery.reclaim(successor)
    taken_over, found = fetched(successor)
    consumer.ack(first)
    consumer.nack(second)
    consumer.requeue([first])

    assert (poison, sorted(ids(found)[:2]), ids(found)[2:]) == ([], ["1", "2"], ["3"])
    assert delivery.places() == {"in_flight": 3}
    for one in found:
        taken_over.ack(one)
    assert delivery.places() == {}


def test_a_process_that_says_in_time_that_it_lives_keeps_its_messages(delivery, broker):
    one_by_one(broker, "7")
    fetched(broker)
    delivery.expire(broker)
    delivery.heartbeat(broker)

    delivery.reclaim(delivery.process())

    assert delivery.places() == {"in_flight": 1}


def test_a_message_that_has_taken_three_processes_down_is_a_dead_letter_and_its_neighbours_go_on(delivery):
    one_by_one(delivery.process(), "bad", "good")
    poison = []
    for _ in range(MAX_DEATHS):
        dying = delivery.process()
        _, found = fetched(dying)
        start(dying, next(one for one in found if one.message_id == "bad"))
        delivery.expire(dying)
        poison.append(delivery.reclaim(delivery.process()))

    reader = delivery.process()

    assert poison == [*[[]] * (MAX_DEATHS - 1), ["bad"]]
    assert (dead_letters.find(reader, [QUEUE], "bad").reason, ids(fetched(reader)[1])) == ("poison", ["good"])


# Dead letters


def test_a_dead_letter_is_replayed_once_under_its_id_with_all_its_retries(delivery, broker):
    dead_lettered(broker, "7", args=(1,))
    letter = dead_letters.find(broker, [QUEUE], "7")

    became = [dead_letters.replay(broker, letter) for _ in range(2)]

    _, (delivered,) = fetched(broker)
    assert (became, delivery.places()) == (["replayed", "gone"], {"in_flight": 1})
    assert (delivered.message_id, delivered.args, set(delivered.options)) == ("7", (1,), {"redis_message_id"})


@pytest.mark.parametrize("place", [ready, in_hand, delayed])
def test_a_dead_letter_stays_while_its_id_is_on_its_way(delivery, broker, place):
    dead_lettered(broker, "7")
    letter = dead_letters.find(broker, [QUEUE], "7")
    one_by_one(broker, "7")
    place(broker, consumer_of(broker))
    before = delivery.places()

    assert dead_letters.replay(broker, letter) == "on its way"
    assert (delivery.places(), dead_letters.is_on_its_way(broker, letter)) == (before, True)


def test_a_dead_letter_is_removed_once_and_not_when_another_has_taken_its_place(delivery, broker):
    dead_lettered(broker, "7", args=("first",))
    first = dead_letters.find(broker, [QUEUE], "7")
    dead_lettered(broker, "7", args=("second",))
    second = dead_letters.find(broker, [QUEUE], "7")

    removed = [dead_letters.remove(broker, letter) for letter in (first, second, second)]

    assert (removed, delivery.places()) == ([False, True, False], {})


def test_dead_letters_are_purged_when_they_are_old_and_not_more_than_asked_for(delivery, broker):
    for message_id in "123":
        dead_lettered(broker, message_id)

    forgotten = [forget_dead(broker, QUEUE, ttl=ttl, limit=2) for ttl in (timedelta(days=7), -LONG_AGO)]

    assert (forgotten, delivery.places()) == ([0, 2], {"dead": 1})
