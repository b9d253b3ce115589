"""A look changes nothing, whatever a batch's condition calls: PostgreSQL refuses it, and leaves no trace in the session."""

from contextlib import suppress
from datetime import timedelta

import pytest
from peewee import SQL

from forgekeeper import Rows, batch, exporter
from forgekeeper.cli import status
from forgekeeper.cli.check import findings
from forgekeeper.cli.console.reading import Reader
from forgekeeper.engine.previewing import preview
from forgekeeper.guards import breaker
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now, survey
from forgekeeper.platform.database.looking import WritesInLook, looking
from models import UserStatus
from tests.harness.many_rows import statuses
from tests.harness.settings import settings_with
from tests.harness.toys import declaring

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
    with declaring():

        def sweep(now):
            """Sweep."""
            return Rows(UserStatus, SQL("gone(user_id)"), since=UserStatus.clear_status_at)

        yield batch(cron="* * * * *", budget=timedelta(minutes=1))(sweep)
    db.execute_sql("drop function gone")


LOOKS = {
    "backlog": lambda spec: spec.due(now()),
    "breaker": lambda spec: breaker.judge(
        spec, settings_with(breaker_share=0.1, breaker_least=1), 1, now(), released=False
    ),
    "preview": lambda spec: preview(spec, settings_with()),
    "status": lambda _spec: status.gather(settings_with()),
    "exporter": lambda _spec: [
        list(one.look(settings_with())) for one in exporter.all_collectors(settings_with()).values()
    ],
    "console": lambda spec: Reader().ask("page", lambda: {"due": spec.due(now())}, patience=60),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_no_look_writes_whatever_the_condition_calls(greedy, look):
    with suppress(WritesInLook):
        look(greedy)

    assert UserStatus.select().count() == ROWS


def test_status_names_the_batch_that_would_write_and_shows_the_others(greedy):
    found = status.gather(settings_with())

    assert found["batches"]["sweep"]["backlog"] is None
    assert found["batches"]["user_status_cleanup"]["backlog"] == ROWS
    assert any(said.startswith("sweep writes, though it is only looked at") for said in found["warnings"])


def test_check_reads_a_view_that_would_write_and_names_its_batch(greedy):
    db.execute_sql(
        "alter table user_statuses rename to kept; create or replace function gone(bigint) returns boolean volatile"
        " language plpgsql as $$ begin delete from kept where user_id <> $1; return true; end $$;"
        "create view user_statuses as select * from kept where gone(user_id)"
    )
    try:
        errors = [one.message for one in findings(settings_with()) if one.level == "error"]
        kept = db.execute_sql("select count(*) from kept").fetchone()[0]
    finally:
        db.execute_sql("drop view user_statuses; alter table kept rename to user_statuses")

    assert kept == ROWS
    assert any("user_status_cleanup" in said and "a view or function that it reads writes" in said for said in errors)


def test_a_look_leaves_nothing_behind_in_its_session_nor_in_the_transaction_around_it(database):
    before = db.execute_sql(READS_ONLY).fetchone()

    with looking():
        within = db.execute_sql(READS_ONLY).fetchone()
    with db.atomic():
        survey.within(0, lambda: 1)
        after = db.execute_sql(READS_ONLY).fetchone()
        db.execute_sql("delete from user_statuses")

    assert (within[0], after, db.execute_sql(READS_ONLY).fetchone()) == ("on", before, before)


def test_what_fails_in_a_look_of_several_leaves_the_others_one_snapshot(database, other):
    with looking():
        with pytest.raises(Exception, match="does not exist"), looking():
            db.execute_sql("select from nowhere")
        other.execute("insert into user_statuses (user_id) values (1)")
        other.connection.commit()

        assert UserStatus.select().count() == 0
