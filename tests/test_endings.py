"""However a message ends in a real worker: with a run or a child behind it, or as a dead letter with a line."""

from pathlib import Path

import dramatiq
import pytest
from dramatiq import Message

from forgekeeper.batches import BATCHES
from forgekeeper.connections import client
from forgekeeper.delivery.enqueue_unique import enqueue_unique
from forgekeeper.delivery.queues import depth
from forgekeeper.process.broker import broker
from forgekeeper.process.run_messages import RunMessages
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.reconcile import send
from tests.harness.programs import Program, eventually

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "harness" / "worker_with_broken_hooks.py"
NAME = "user_status_cleanup"
QUEUE = "cron"
EMPTY = {"ready": 0, "in_flight": 0, "delayed": 0}

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def start_worker(tmp_path):
    started = []

    def start(**settings):
        log = tmp_path / f"worker-{len(started)}.log"
        usual = {"redis_timeout": 1, "retry_after": 0.2}
        started.append(Program(log, PROGRAM, "--processes", 1, "--threads", 1, **(usual | settings)))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


def push(message_id, actor=NAME, queue=QUEUE):
    assert enqueue_unique(broker, Message(queue, actor, (), {}, {}, message_id))


def waiting(queue=QUEUE):
    counts = depth(client, broker.namespace, queue)
    return {state: counts[state] for state in EMPTY}


def dead(queue=QUEUE):
    letters = client.hgetall(f"{broker.namespace}:{queue}.XQ.reasons").items()
    return {key.decode(): reason.decode() for key, reason in letters}


@pytest.mark.parametrize("options", [{}, {"child": False}, {"child": True, "document": 48}], ids=str)
def test_an_actor_that_is_neither_a_batch_nor_a_child_is_refused_at_its_declaration(options):
    with pytest.raises(TypeError, match="neither a batch nor a child"):
        dramatiq.actor(lambda: None, actor_name="stray", broker=broker, queue_name=QUEUE, **options)


def test_an_actor_that_was_refused_is_not_known_to_the_broker():
    with pytest.raises(TypeError):
        dramatiq.actor(lambda: None, actor_name="stray", broker=broker, queue_name=QUEUE)

    assert "stray" not in broker.actors


@pytest.mark.parametrize("message_id", ["b1946ac9-2492", "0", "1_0", "٣", "99999999999999999999"])
def test_a_batchs_message_that_names_no_run_is_a_dead_letter_with_a_line(start_worker, message_id):
    push(message_id)
    worker = start_worker()

    eventually(dead)

    assert (list(dead()), waiting()) == ([message_id], EMPTY)
    assert f"{message_id!r} is no run's number" in dead()[message_id]
    eventually(lambda: worker.said("message dead-lettered"))
    (line,) = worker.said("message dead-lettered")
    assert (line["actor"], line["message_id"]) == (NAME, message_id)


def test_a_run_that_a_broken_hook_kept_from_beginning_is_a_dead_letter_with_a_line(start_worker):
    run_id = JobRun.claim_manual("broken_batch", by="test")
    push(str(run_id), "broken_batch")
    worker = start_worker()

    eventually(dead)

    assert (list(dead()), waiting()) == ([str(run_id)], EMPTY)
    eventually(lambda: worker.said("message dead-lettered"))
    assert [line["actor"] for line in worker.said("message failed")] == ["broken_batch"]


def test_a_batch_that_ends_though_no_run_was_begun_is_a_dead_letter(start_worker):
    push(str(JobRun.claim_manual("idle_batch", by="test")), "idle_batch")
    start_worker()

    eventually(dead)

    assert waiting() == EMPTY


def test_a_batch_that_nobody_has_declared_is_a_dead_letter_that_says_so(start_worker):
    push(str(JobRun.claim_manual("undeclared_batch", by="test")), "undeclared_batch")
    start_worker()

    eventually(dead)

    assert ("is no declared batch" in str(dead()), waiting()) == (True, EMPTY)


def test_a_child_that_ends_though_none_was_begun_is_a_dead_letter(start_worker):
    push("1", "idle_child")
    start_worker()

    eventually(dead)

    assert (dead(), waiting()) == ({"1": "failed"}, EMPTY)


def test_a_child_that_a_broken_hook_kept_from_beginning_is_tried_again_and_said_so(start_worker):
    push("1", "broken_child")
    worker = start_worker()

    eventually(lambda: worker.said("message failed"))

    eventually(lambda: waiting()["delayed"] + waiting()["in_flight"] == 1 and waiting()["ready"] == 0)
    assert dead() == {}


def test_a_run_that_cannot_start_while_the_database_is_away_is_said_and_sent_again_from_its_row(start_worker):
    run_id = JobRun.claim_manual(NAME, by="test")
    send(NAME, RunMessages(BATCHES[NAME]))
    without_database = start_worker(database_url="postgresql://127.0.0.1:1/nowhere")
    eventually(lambda: without_database.said("message failed"))
    eventually(lambda: waiting() == EMPTY)
    assert (dead(), JobRun.get_by_id(run_id).state) == ({}, "enqueued")
    without_database.kill()

    send(NAME, RunMessages(BATCHES[NAME]))
    start_worker()

    eventually(lambda: JobRun.get_by_id(run_id).state == "succeeded")
