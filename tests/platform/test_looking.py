"""A look changes nothing, whatever a batch's condition calls: PostgreSQL refuses it, and leaves no trace in the session."""

from contextlib import suppress
from datetime import timedelta

import pytest
from peewee import SQL

from forgekeeper import Rows, batch, exporter
from forgekeeper.cli import status
from forgekeeper.cli.check import collect_findings
from forgekeeper.cli.console.reading import PageReader
from forgekeeper.engine.previewing import preview_batch
from forgekeeper.guards import breaker
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now, survey
from forgekeeper.platform.database.read_only import ReadOnlyViolation, read_only_snapshot
from models import UserStatus
from tests.harness.many_rows import statuses
from tests.harness.settings import settings_with
from tests.harness.toys import forget_declarations

DAY, ROWS = timedelta(days=1), 20
READS_ONLY = "select current_setting('transaction_read_only'), current_setting('statement_timeout')"


@pytest.fixture
def greedy(database):
    """A batch whose condition deletes all rows when it is asked."""
    statuses(ROWS)
    db.execute_sql(
        "create function gone(bigint) returns boolean volatile language plpgsql as"
        " $$ begin delete from user_statuses where user_id <> $1; return true; end $$"
    )
    with forget_declarations():

        def sweep(now):
            """Sweep."""
            return Rows(UserStatus, SQL("gone(user_id)"), since=UserStatus.clear_status_at)

        yield batch(cron="* * * * *", budget=timedelta(minutes=1))(sweep)
    db.execute_sql("drop function gone")


LOOKS = {
    "backlog": lambda spec: spec.sum_backlogs(now()),
    "breaker": lambda spec: breaker.judge_run(
        spec, settings_with(breaker_share=0.1, breaker_least=1), 1, now(), released=False
    ),
    "preview": lambda spec: preview_batch(spec, settings_with()),
    "status": lambda _spec: status.gather_facts(settings_with()),
    "exporter": lambda _spec: [
        list(one.read(settings_with())) for one in exporter.all_collectors(settings_with()).values()
    ],
    "console": lambda spec: PageReader().ask("page", lambda: {"due": spec.sum_backlogs(now())}, timeout_seconds=60),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_no_look_writes_whatever_the_condition_calls(greedy, look):
    with suppress(ReadOnlyViolation):
        look(greedy)

    assert UserStatus.select().count() == ROWS


def test_status_names_the_batch_that_would_write_and_shows_the_others(greedy):
    found = status.gather_facts(settings_with())

    assert found["batches"]["sweep"]["backlog"] is None
    assert found["batches"]["user_status_cleanup"]["backlog"] == ROWS
    assert any(said.startswith("sweep tried to write during a read-only look") for said in found["warnings"])


def test_check_reads_a_view_that_would_write_and_names_its_batch(greedy):
    db.execute_sql(
        "alter table user_statuses rename to kept; create or replace function gone(bigint) returns boolean volatile"
        " language plpgsql as $$ begin delete from kept where user_id <> $1; return true; end $$;"
        "create view user_statuses as select * from kept where gone(user_id)"
    )
    try:
        errors = [one.message for one in collect_findings(settings_with()) if one.level == "error"]
        kept = db.execute_sql("select count(*) from kept").fetchone()[0]
    finally:
        db.execute_sql("drop view user_statuses; alter table kept rename to user_statuses")

    assert kept == ROWS
    assert any(
        "user_status_cleanup" in said and "no condition, view or function that it reads writes" in said
        for said in errors
    )


def test_a_look_leaves_nothing_behind_in_its_session_nor_in_the_transaction_around_it(database):
    before = db.execute_sql(READS_ONLY).fetchone()

    with read_only_snapshot():
        within = db.execute_sql(READS_ONLY).fetchone()
    with db.atomic():
        survey.answer_within(0, lambda: 1)
        after = db.execute_sql(READS_ONLY).fetchone()
        db.execute_sql("delete from user_statuses")

    assert (within[0], after, db.execute_sql(READS_ONLY).fetchone()) == ("on", before, before)


def test_what_fails_in_a_look_of_several_leaves_the_others_one_snapshot(database, other):
    with read_only_snapshot():
        with pytest.raises(Exception, match="does not exist"), read_only_snapshot():
            db.execute_sql("select from nowhere")
        other.execute("insert into user_statuses (user_id) values (1)")
        other.connection.commit()

        assert UserStatus.select().count() == 0
