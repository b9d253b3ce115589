"""A ledger with a clock that the test sets, and steps of one batch: reconcile, fetch, start, acknowledge."""

from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import pytest
from dramatiq import Message

from forgekeeper.api.batches import BATCHES
from forgekeeper.delivery.broker import broker
from forgekeeper.delivery.messages import enqueue_run
from forgekeeper.ledger import reconcile as runs
from forgekeeper.ledger.holds import Batch
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform import database as db
from forgekeeper.platform.connections import ServerTimeouts, client, configure_clients
from tests.harness.performing import start_run
from tests.harness.settings import settings_with

NAME = "user_status_cleanup"
BATCH = BATCHES[NAME]
QUEUE = f"{broker.namespace}:{BATCH.queue}"
DAWN = datetime(2026, 3, 1, 11, 59, 30, tzinfo=UTC)
NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DEAD_AFTER = timedelta(seconds=15)
LIMIT = 60.0

FAKE_CLOCK = """
    drop schema if exists fake cascade;
    create schema fake;
    create unlogged table fake.clock (at timestamptz);
    insert into fake.clock values ('2026-03-01 11:59:30+00');
    create function fake.clock_timestamp() returns timestamptz language sql volatile as 'select at from fake.clock';
"""


@pytest.fixture
def ledger(_migrated, urls):
    """An empty ledger in which the batch is registered since `DAWN`, with the clock of the test."""
    with connected(urls, search_path="public"):
        db.database.execute_sql("truncate job_runs, batches, holds restart identity")
        db.database.execute_sql(FAKE_CLOCK)
        client.flushdb()
    with connected(urls, search_path="fake,public,pg_catalog") as settings:
        Batch.insert(name=NAME, registered_at=DAWN).execute()
        yield settings
    with connected(urls, search_path="public"):
        db.database.execute_sql("drop schema fake cascade")


@contextmanager
def connected(urls, search_path):
    url = urls.database + ("&" if "?" in urls.database else "?") + "options=" + quote(f"-c search_path={search_path}")
    settings = settings_with(database_url=url, redis_url=urls.redis)
    configure_clients(settings, ServerTimeouts.for_worker(settings), name="tests", connections=20)
    db.database.connect()
    yield settings
    db.database.close_all()
    client.connection_pool.disconnect()


def clock_is(instant):
    db.database.execute_sql("update fake.clock set at = %s", (instant,))


def time_passes(duration):
    clock_is(db.now() + duration)


def reconcile(by="A", due_hint=None, **settings):
    runs.reconcile_batch(NAME, settings_with(**settings), enqueue_run, by=by, due_hint=due_hint)


def reconcile_at(instant, by="A", **settings):
    clock_is(instant)
    reconcile(by, **settings)


def row(tick=NOON):
    return JobRun.get(JobRun.tick == tick)


def rows(state):
    return {run.tick for run in JobRun.select().where(JobRun.state == state)}


def list_sent_runs():
    """Return the ids of the runs whose messages wait."""
    bodies = [client.hget(f"{QUEUE}.msgs", name) for name in client.lrange(QUEUE, 0, -1)]
    return [int(Message.decode(body).message_id) for body in bodies]


def fetch():
    """Fetch the next message as Dramatiq does."""
    (body,) = broker.do_fetch(BATCH.queue, 1)
    return Message.decode(body)


def acknowledge(message):
    broker.do_ack(BATCH.queue, message.options["redis_message_id"])


def start(tick=NOON):
    return start_run(NAME, row(tick).id, by="worker")


def execute_tick(tick=NOON):
    """Execute the run of the tick, from its message to the acknowledgement."""
    message = fetch()
    assert JobRun.succeed(start(tick), {})
    acknowledge(message)


def fail_tick(tick=NOON, delay=MINUTE * 30):
    """Let the first attempt of the tick fail; its retry waits."""
    message = fetch()
    assert JobRun.fail(start(tick), "Oops", delay=delay) == "enqueued"
    acknowledge(message)
