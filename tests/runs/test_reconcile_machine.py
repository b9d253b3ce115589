"""A state machine tries to break the ledger: no order of faults doubles a run or stops a batch."""

import logging
from contextlib import contextmanager
from urllib.parse import quote

import pytest
import structlog
from hypothesis import configuration
from hypothesis.stateful import run_state_machine_as_test

from forgekeeper import database as db
from forgekeeper.connections import Limits, client, connect
from tests.harness import logs
from tests.harness.ledger_machine import Machine
from tests.harness.settings import settings_with
from tests.harness.stalling import stall_at_every_question
from tests.harness.thorough import sequences

FAKE_CLOCK = """
    drop schema if exists fake cascade;
    create schema fake;
    create unlogged table fake.clock (at timestamptz);
    insert into fake.clock values ('2026-03-01');
    create function fake.clock_timestamp() returns timestamptz language sql volatile as 'select at from fake.clock';
"""


@pytest.fixture
def ledger(_migrated, urls, tmp_path):
    """The models' connections, all of which see the machine's clock before the real one."""
    own = quote("-c search_path=fake,public,pg_catalog")
    url = urls.database + ("&" if "?" in urls.database else "?") + f"options={own}"
    with connected(urls.database, urls.redis):
        db.database.execute_sql(FAKE_CLOCK)
    configuration.set_hypothesis_home_dir(tmp_path)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with connected(url, urls.redis), pytest.MonkeyPatch.context() as patch:
        stall_at_every_question(patch)
        yield
    logs.plain()
    with connected(urls.database, urls.redis):
        db.database.execute_sql("drop schema fake cascade")


@contextmanager
def connected(url, redis_url):
    settings = settings_with(database_url=url, redis_url=redis_url)
    connect(settings, Limits.of_worker(settings), name="machine", connections=10)
    with db.database.connection_context():
        yield
    db.database.close_all()
    client.connection_pool.disconnect()


@pytest.mark.timeout(900)
def test_no_order_of_faults_doubles_a_run_or_stops_a_batch(ledger):
    run_state_machine_as_test(Machine, settings=sequences(500, steps=25))


@pytest.mark.parametrize("questions", range(8))
def test_a_scheduler_that_was_held_up_sets_no_tick_aside_whose_time_has_come_meanwhile(ledger, questions):
    machine = Machine()
    machine.begin(schedule="* * * * *", catch_up="once")
    machine.somebody_pauses(minutes=1)
    machine.a_scheduler_fires_and_stalls(drift=None, questions=questions)
    machine.a_tick_comes(drift=None, take=False)
    machine.the_ledger_is_sound()

    for process in machine.stalled:
        process.go_on(-1)

    machine.the_ledger_is_sound()
