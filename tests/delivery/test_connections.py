"""The connection that a message finds, whatever was done to it before."""

from concurrent.futures import ThreadPoolExecutor

import dramatiq
import pytest
from dramatiq import Message, MessageProxy, Worker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Middleware
from structlog.testing import capture_logs

from forgekeeper.api.batches import BATCHES, CHILDREN, FeatureFlag
from forgekeeper.delivery.broker import broker
from forgekeeper.delivery.children import build_child_message
from forgekeeper.delivery.process import MessageNotReady, ProcessMiddleware
from forgekeeper.delivery.queues import STARTED_CHILDREN_KEY
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database, release_connection
from tests.harness.artifacts import without_table
from tests.harness.performing import runner_of
from tests.harness.programs import LIMIT

NAME = "user_status_cleanup"


class Connections(ProcessMiddleware):
    """A worker process's, for actors of a test."""

    def before_declare_actor(self, broker, actor):
        """Take any actor."""

    after_process_boot = after_worker_boot = before_worker_shutdown = after_worker_shutdown = Middleware.after_ack


def leave_an_unknown_transaction_open():
    # What an interrupt between a block's last statement and its end leaves.
    database.execute_sql("begin")
    FeatureFlag.create(name="first")


def fail_in_a_transaction():
    database.atomic().__enter__()
    FeatureFlag.create(name="first")
    database.execute_sql("select 1 / 0")


@pytest.mark.parametrize("first", [leave_an_unknown_transaction_open, fail_in_a_transaction])
@pytest.mark.usefixtures("database")
def test_a_message_finds_a_clean_connection_whatever_the_one_before_left(first):
    own = RedisBroker(client=client, namespace="tests", middleware=[Connections(None)])
    messy = dramatiq.actor(first, broker=own, queue_name="q")
    tidy = dramatiq.actor(
        lambda: FeatureFlag.create(name="second") and None, broker=own, actor_name="tidy", queue_name="q"
    )
    worker = Worker(own, worker_threads=1, worker_timeout=50)
    messy.send()
    tidy.send()

    worker.start()
    own.join("q", timeout=round(LIMIT * 1000))
    worker.stop()

    assert {flag.name for flag in FeatureFlag.select()} == {"second"}


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize(
    ("error", "state"), [(None, "succeeded"), (ValueError("no"), "enqueued")], ids=["ends well", "fails"]
)
def test_a_run_whose_session_has_ended_while_it_did_not_need_it_says_all_the_same_how_it_ended(
    settings, other, error, state
):
    run_id = JobRun.claim_manual(NAME, by="test")

    def run():
        database.connect()
        with runner_of(settings) as runner:
            attempt = runner.create_attempt(
                BATCHES[NAME], JobRun.start(NAME, run_id, token=JobRun.get_by_id(run_id).token, by="test")
            ).__enter__()
        session = database.execute_sql("select pg_backend_pid()").fetchone()
        other.execute("select pg_terminate_backend(%s, 10000)", session)
        try:
            attempt.close(error)
        finally:
            release_connection()
        return attempt.state

    with ThreadPoolExecutor(1) as thread:
        closed = thread.submit(run).result()

    assert (closed, JobRun.get_by_id(run_id).state) == (state, state)


@pytest.mark.usefixtures("database")
def test_a_child_is_not_started_while_it_cannot_be_put_into_quarantine_and_a_line_says_so():
    child = CHILDREN["clean_project_refs"]
    message = MessageProxy(build_child_message(child, [("clean_project_refs:1", (1,))], 7, has_failed=False))
    client.hset(STARTED_CHILDREN_KEY, message.message_id, 99)

    def start():
        with pytest.raises(MessageNotReady) as refused:
            broker.emit_before("process_message", message)
        broker.emit_after("process_message", message, exception=refused.value)
        release_connection()
        return str(refused.value)

    with without_table("quarantine"), capture_logs() as lines, ThreadPoolExecutor(1) as thread:
        said = thread.submit(start).result()

    assert said.startswith("child clean_project_refs:1 cannot be started: ")
    (line,) = [line for line in lines if line["event"] == "message not started"]
    assert (line["actor"], line["message_id"]) == (child.name, message.message_id)


@pytest.mark.usefixtures("database")
def test_a_message_that_nothing_can_read_is_not_rejected_while_it_cannot_be_put_into_quarantine():
    bad = MessageProxy(Message("objects", "nobody", (), {}, {"redis_message_id": "1"}))
    with without_table("quarantine"), ThreadPoolExecutor(1) as thread, pytest.raises(MessageNotReady):
        thread.submit(broker.emit_before, "nack", bad).result()
