"""Rows that a document's own statement changes: no more than were claimed, and none in word only."""

from datetime import timedelta

import pytest
from peewee import BigIntegerField
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper import Changes, Table, batch
from forgekeeper.audit.deletions import Deletion
from forgekeeper.platform.database import database as db
from tests.harness.performing import run_as_worker
from tests.harness.settings import settings_with
from tests.harness.toys import forget_declarations

DAY = timedelta(days=1)
TABLE = """
    create table kept (id bigint primary key, at timestamptz not null, state int not null default 0);
    insert into kept select n, now() - interval '2 days', 0 from generate_series(1, 20) as n
"""
INSTEAD = """
    create function act() returns trigger language plpgsql as $$ begin {} return new; end $$;
    create trigger act instead of update on events for each row execute function act()
"""
CHANGE = """
    with changed as (
        update events set state = 1 where id = any(%(ids)s) and {due} returning id
    ){recorded} select id from changed
"""


class Event(Table):
    """An event that is open for too long."""

    grants = "worker: select, update (state)"

    id = BigIntegerField(primary_key=True)
    at = DateTimeTZField()
    state = BigIntegerField()

    class Meta:
        table_name = "events"


@pytest.fixture
def run(database):
    """Close the events of a view that is made by some SQL; return the result."""
    db.execute_sql("create schema toys; set search_path = toys, forgekeeper, public")

    def run(*statements):
        for statement in (TABLE, *statements):
            db.execute_sql(statement)

        def close_events(now):
            """Close old events."""
            due = (Event.state == 0) & (Event.at < now - DAY)
            return Changes(Event, due, since=Event.at, statement=CHANGE, each=lambda _row: {}, counted="closed")

        spec = batch(cron="* * * * *", budget=timedelta(minutes=1))(close_events)
        return run_as_worker(spec, settings_with(max_per_run_close_events=100)).result

    with forget_declarations():
        yield run
    db.execute_sql("reset search_path; drop schema toys cascade")


def changed():
    return db.execute_sql("select count(*) from kept where state = 1").fetchone()[0], Deletion.select().count()


def test_rows_that_are_changed_are_counted(run):
    result = run("create view events as select * from kept")

    assert (result["closed"], changed()) == (20, (20, 1))


def test_a_trigger_that_changes_nothing_is_named_and_nothing_is_recorded(run):
    view = "create view events as select * from kept"

    result = run(view, INSTEAD.format("if new.id < 20 then update kept set state = 1 where id = new.id; end if;"))

    assert (result["skipped"], result["closed"], changed()) == ("schema", 0, (0, 0))
    assert "and are still due, for example the key 20: correct trigger act of events" in result["blocked"]


def test_several_rows_of_one_key_are_not_changed(run):
    view = "create view events as select kept.* from kept, generate_series(1, 2)"

    result = run(view, INSTEAD.format("update kept set state = 1 where id = new.id;"))

    assert (result["skipped"], changed()) == ("schema", (0, 0))
    assert result["blocked"].startswith("several rows of events have the same id")
