"""A state machine tries to break the ledger: no order of faults doubles a run or stops a batch."""

import logging

import pytest
import structlog
from hypothesis import configuration
from hypothesis.stateful import run_state_machine_as_test

from forgekeeper.platform import database as db
from tests.harness import logs
from tests.harness.ledger_machine import Machine
from tests.harness.stalling import stall_before_every_query
from tests.harness.thorough import machine_settings, whole_only
from tests.harness.ticks import FAKE_CLOCK, connected


@pytest.fixture
def ledger(_migrated, urls, tmp_path):
    """The models' connections, all of which see the machine's clock before the real one."""
    with connected(urls, search_path="public"):
        db.database.execute_sql(FAKE_CLOCK)
    configuration.set_hypothesis_home_dir(tmp_path)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with connected(urls, search_path="fake,public,pg_catalog"), pytest.MonkeyPatch.context() as patch:
        stall_before_every_query(patch)
        yield
    logs.use_plain_format()
    with connected(urls, search_path="public"):
        db.database.execute_sql("drop schema fake cascade")


@whole_only
@pytest.mark.timeout(900)
def test_no_order_of_faults_doubles_a_run_or_stops_a_batch(ledger):
    run_state_machine_as_test(Machine, settings=machine_settings(500, steps=25))


@pytest.mark.parametrize("queries", range(8))
def test_a_scheduler_that_was_held_up_sets_no_tick_aside_whose_time_has_come_meanwhile(ledger, queries):
    machine = Machine()
    machine.begin(schedule="* * * * *", catch_up="once")
    machine.somebody_pauses(minutes=1)
    machine.a_scheduler_fires_and_stalls(drift=None, queries=queries)
    machine.a_tick_comes(drift=None, take=False)
    machine.the_ledger_is_sound()

    for process in machine.stalled:
        process.resume(-1)

    machine.the_ledger_is_sound()
