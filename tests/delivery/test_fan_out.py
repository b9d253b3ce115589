"""Fan-out into a real Redis: which children get a message, and what a Dramatiq worker finds there."""

import pytest
from dramatiq import Message

from forgekeeper.api.answers import EnqueueCounts
from forgekeeper.api.batches import CHILDREN
from forgekeeper.delivery import queues
from forgekeeper.delivery.broker import broker
from forgekeeper.delivery.children import FAILED_OPTION, RUN_OPTION, send_children
from forgekeeper.ledger import quarantine
from forgekeeper.platform.connections import client

CHILD = CHILDREN["clean_project_refs"]
QUEUE = CHILD.queue

pytestmark = pytest.mark.usefixtures("database")


def send(*numbers, limit_depth=None):
    return send_children(broker, 1, CHILD, [(f"c:{number}", (number,)) for number in numbers], limit_depth=limit_depth)


def fetch():
    return [Message.decode(body) for body in broker.do_fetch(QUEUE, 100)]


def acknowledge(message):
    broker.do_ack(QUEUE, message.options["redis_message_id"])


def test_children_are_messages_of_dramatiq_in_the_order_given():
    send(3, 1, 2)

    messages = fetch()
    assert [(one.actor_name, one.args, one.message_id) for one in messages] == [
        (CHILD.name, (number,), f"c:{number}") for number in (3, 1, 2)
    ]
    assert {one.options[RUN_OPTION] for one in messages} == {1}
    for message in messages:
        acknowledge(message)
    assert queues.count_messages(client, QUEUE) == {"ready": 0, "in_flight": 0, "delayed": 0}


def test_a_child_whose_message_waits_or_is_in_flight_gets_no_other():
    send(1)
    fetch()
    send(2)

    assert send(1, 2, 3) == EnqueueCounts(1, 2)
    assert len(fetch()) == 2


def test_a_child_whose_message_was_acknowledged_is_sent_again():
    send(1)
    acknowledge(*fetch())

    assert send(1) == EnqueueCounts(1, 0)


def test_an_emptied_redis_forgets_children_and_their_entries_together():
    send(1)
    client.flushdb()

    assert send(1) == EnqueueCounts(1, 0)


def test_a_child_in_quarantine_is_left_out(database):
    for _ in range(2):
        quarantine.record_failure(CHILD.batch.name, CHILD.name, "c:1", "it failed", reason="child_failed")

    assert send(1, 2) == EnqueueCounts(1, 1)


def test_a_message_says_whether_its_child_has_failed(database):
    quarantine.record_failure(CHILD.batch.name, CHILD.name, "c:1", "it failed", reason="child_failed")
    send(1, 2)

    assert [one.options[FAILED_OPTION] for one in fetch()] == [True, False]


def test_a_full_queue_gets_nothing():
    send(1, 2)

    assert send(3, limit_depth=2) == EnqueueCounts(queue_full=True)
    assert send(3, limit_depth=3) == EnqueueCounts(1, 0)
