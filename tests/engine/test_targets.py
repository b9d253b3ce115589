"""Which rows a batch deletes: those of the relation that its model names, no more than it claims, and none in word only."""

from datetime import timedelta

import pytest
from peewee import SQL, BigIntegerField, DatabaseError
from playhouse.postgres_ext import DateTimeTZField
from structlog.testing import capture_logs

from forgekeeper import Rows, Table, batch
from forgekeeper.audit.deletions import Deletion
from forgekeeper.cli.check import collect_findings
from forgekeeper.engine.previewing import preview_batch
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now
from forgekeeper.platform.database.sessions import WritesByItself
from tests.harness.performing import run_as_worker
from tests.harness.settings import settings_with
from tests.harness.tables import before_each
from tests.harness.toys import forget_declarations

NAME, DAY = "sweep_events", timedelta(days=1)
ADD = "insert into {} (id, at) select n, now() - interval '2 days' + n * interval '1 second' from generate_series({}) as n"
TABLE = "create table {} (id bigint primary key, at timestamptz not null, size bigint)"


class Event(Table):
    """An event, which is due after a day."""

    id = BigIntegerField(primary_key=True)
    at = DateTimeTZField()
    size = BigIntegerField(null=True)

    class Meta:
        table_name = "events"


class Archived(Event):
    """An event in a schema that no `search_path` names."""

    class Meta:
        table_name = "events"
        schema = "archive"


class Twin(Event):
    """An event in a table whose name SQL reads differently without quotes."""

    class Meta:
        table_name = "Twins"


@pytest.fixture
def execute(database):
    """Execute SQL of the owner, in a schema that is gone after the test."""
    db.execute_sql("create schema toys; create schema archive; set search_path = toys, forgekeeper, public")
    with forget_declarations():
        yield lambda *statements: [db.execute_sql(one) for one in statements]
    db.execute_sql("reset role; reset search_path; drop schema toys, archive cascade")


def declare(model=Event, where=None, **facts):
    def sweep_events(now):
        """Sweep old events."""
        return Rows(model, where or model.at < now - DAY, since=model.at, **facts)

    return batch(cron="* * * * *", budget=timedelta(minutes=1))(sweep_events)


def run(spec, **limits):
    return run_as_worker(spec, settings_with(**{f"{name}_{NAME}": value for name, value in limits.items()})).result


def count(table):
    return db.execute_sql(f"select count(*) from {table}").fetchone()[0]


def errors():
    return [one.message for one in collect_findings(settings_with()) if one.level == "error" and NAME in one.message]


# The relation that the model names


@pytest.fixture
def archive(execute):
    """Seven due rows of a table that the `search_path` finds, and ten of the one that the model names."""
    execute(TABLE.format("events"), TABLE.format("archive.events"))
    execute(ADD.format("events", "1, 7"), ADD.format("archive.events", "1, 10"))


@pytest.mark.usefixtures("archive")
def test_a_model_that_names_its_schema_deletes_from_that_schema_and_from_no_other():
    result = run(declare(Archived))

    assert (result["deleted"], count("archive.events"), count("toys.events")) == (10, 0, 7)


@pytest.mark.usefixtures("archive")
def test_preview_backlog_breaker_and_check_look_at_the_schema_that_the_model_names():
    spec = declare(Archived)

    (part,) = preview_batch(spec, settings_with()).parts
    stake = spec.stake(now())
    db.execute_sql("alter table archive.events drop size")

    assert (part.records, spec.sum_backlogs(now()).records, stake.due(100), stake.total(100)) == (10, 10, 10, 10)
    assert errors() == [
        f"{NAME}: column archive.events.size is missing: `forgekeeper contract --batch {NAME}` shows what the batch needs"
    ]


def test_a_name_is_taken_as_it_is_written_beside_one_that_differs_by_case(execute):
    execute(TABLE.format('"Twins"'), TABLE.format("twins"), 'create table heir () inherits ("Twins")')
    execute(ADD.format("twins", "1, 20"), ADD.format('"Twins"', "1, 20"), ADD.format("heir", "3601, 3620"))

    result = run(declare(Twin), max_per_run=10)

    assert (result["deleted"], count('"Twins"'), count("twins")) == (10, 30, 20)


def test_a_schema_that_the_role_may_not_use_blocks_the_batch_and_says_what_to_grant(archive, execute):
    spec = declare(Archived)
    execute("create role stranger; grant all on all tables in schema toys, forgekeeper to stranger")
    execute("grant usage on schema toys, forgekeeper to stranger; set role stranger")
    try:
        result = run(spec)
    finally:
        execute("reset role; drop owned by stranger; drop role stranger")

    assert result["blocked"] == "stranger may not use schema archive: `grant usage on schema archive to stranger`"


# No more than is claimed

PARTED = """
    create table events (id bigint, at timestamptz not null, size bigint, part int, primary key (id, part))
        partition by list (part);
    create table events_1 partition of events for values in (1);
    create table events_2 partition of events for values in (2);
    create table events_3 partition of events for values in (3);
    insert into events select n, now() - interval '2 days', 1, part from generate_series(1, 20) as n, generate_series(1, 3) as part;
"""
VIEW = "create view events as select * from kept, generate_series(1, 3) as part"
DELETES = """
    create or replace function act() returns trigger language plpgsql as $$
        begin {} return old; end $$;
    create trigger act instead of delete on events for each row execute function act()
"""


SHOWS_PLACES = "alter table events rename to kept; create view events as select tableoid, ctid, * from kept"


@pytest.mark.parametrize(
    ("relation", "table"),
    [("select", "events"), (SHOWS_PLACES, "kept")],
    ids=["of the table", "of a view that shows the places of its rows"],
)
@pytest.mark.parametrize("tries", [0, 1], ids=["in one chunk", "one by one"])
def test_a_key_of_several_partitions_takes_the_claimed_rows_alone(execute, tries, relation, table):
    execute(PARTED, "create sequence tries", relation)

    with before_each("delete", table, f"if nextval('toys.tries') <= {tries} then raise 'not yet'; end if"):
        result = run(declare(), max_per_run=10)

    assert (result["deleted"], count("events")) == (10, 50)


def test_a_view_with_several_rows_of_one_key_loses_none_and_its_batch_is_blocked(execute):
    execute(
        TABLE.format("kept"), ADD.format("kept", "1, 20"), VIEW, DELETES.format("delete from kept where id = old.id;")
    )

    result = run(declare(), max_per_run=10)

    assert (result["skipped"], count("kept")) == ("schema", 20)
    assert result["blocked"].startswith(
        "several rows of events have the same id, so a statement on one row affects all"
    )
    assert [(total.records, total.reserved) for total in RunTotal.select()] == [(0, 0)]


# What is reported as deleted is gone


def test_a_trigger_that_deletes_nothing_is_named_and_nothing_is_counted_or_audited(execute):
    execute(TABLE.format("kept"), ADD.format("kept", "1, 20"), "create view events as select * from kept")
    execute(DELETES.format("if old.id < 20 then delete from kept where id = old.id; end if;"))

    result = run(declare(), max_per_run=100)

    assert (result["skipped"], result["deleted"], count("kept"), Deletion.select().count()) == ("schema", 0, 20, 0)
    assert (
        "for example the key 20: correct trigger act of events, which acts in place of PostgreSQL" in result["blocked"]
    )
    assert [(total.records, total.reserved) for total in RunTotal.select()] == [(0, 0)]


def test_a_rule_that_keeps_the_rows_is_named(execute):
    execute(TABLE.format("kept"), ADD.format("kept", "1, 20"), "create view events as select * from kept")
    execute(
        "create rule keep as on delete to events do instead update kept set size = 0 where id = old.id returning kept.*"
    )

    result = run(declare())

    assert (result["skipped"], count("kept where size is null")) == ("schema", 20)
    assert "correct rule keep of events" in result["blocked"]


KEEPS = """
    create function keep() returns trigger language plpgsql as $$ begin return case when {} then null else old end; end $$;
    create trigger keep before delete on events for each row execute function keep()
"""


@pytest.mark.parametrize("limits", [{}, {"max_per_run": 100}], ids=["no limit", "a limit"])
def test_a_trigger_of_the_table_that_keeps_all_rows_blocks_the_batch(execute, limits):
    execute(TABLE.format("events"), ADD.format("events", "1, 250"), KEEPS.format("true"))

    result = run(declare(), **limits)

    assert (result["skipped"], result["deleted"], count("events")) == ("schema", 0, 250)
    assert result["blocked"].startswith("PostgreSQL does not delete due rows of events: a trigger")
    assert [(total.records, total.reserved) for total in RunTotal.select()] == ([(0, 0)] if limits else [])


def test_rows_that_a_trigger_of_the_table_keeps_are_said_and_the_others_go(execute):
    execute(TABLE.format("events"), ADD.format("events", "1, 250"), KEEPS.format("old.id <= 20"))

    with capture_logs() as logs:
        result = run(declare())

    assert (result["deleted"], result["stopped"], count("events")) == (230, "drained", 20)
    assert [(one["record"], one["rows"]) for one in logs if one["event"] == "rows kept"] == [("event", 20)]


def test_a_rule_that_does_nothing_instead_fails_the_run_with_what_postgresql_says(execute):
    execute(TABLE.format("events"), ADD.format("events", "1, 20"))
    execute("create rule keep as on delete to events do instead nothing")

    with pytest.raises(DatabaseError, match="cannot perform DELETE RETURNING on relation"):
        run(declare())


def test_a_trigger_that_deletes_is_believed_once_the_rows_are_gone(execute):
    execute(TABLE.format("kept"), ADD.format("kept", "1, 250"), "create view events as select * from kept")
    execute(DELETES.format("delete from kept where id = old.id;"))

    assert (run(declare())["deleted"], count("kept"), sum(len(one.ids) for one in Deletion.select())) == (250, 0, 250)


# Sizes


@pytest.fixture
def sized(execute):
    """Twenty rows: one of minus 90,000 bytes first, and one of 5,000 behind it, the others of 100."""
    execute(TABLE.format("events"), ADD.format("events", "1, 20"), "update events set size = 100")
    execute("update events set size = case id when 1 then -90000 else 5000 end where id in (1, 2)")


@pytest.mark.usefixtures("sized")
def test_a_negative_size_gives_no_bytes_back():
    spec = declare(size=Event.size, counted_bytes="bytes")

    result = run(spec, max_bytes_per_day=6_000)

    # The first has 0 bytes, and ten of a hundred fit beside the large one.
    assert (result["deleted"], result["bytes"], count("events")) == (12, 6_000, 8)
    assert [total.bytes for total in RunTotal.select()] == [6_000]


@pytest.mark.usefixtures("sized")
def test_a_preview_counts_a_negative_size_as_nothing():
    (part,) = preview_batch(declare(size=Event.size, counted_bytes="bytes"), settings_with()).parts

    assert part.bytes == 5_000 + 18 * 100


@pytest.mark.usefixtures("sized")
def test_a_row_beyond_the_limit_of_bytes_goes_into_quarantine_and_the_run_goes_on_behind_it():
    spec = declare(size=Event.size, counted_bytes="bytes")

    results = [run(spec, max_bytes_per_run=1_000) for _ in range(2)]

    assert [(one["deleted"], one["bytes"]) for one in results] == [(11, 1_000), (8, 800)]
    (row,) = Quarantined.select()
    assert (row.key, row.failures) == ("2", 2)
    assert row.error == (
        "its deletion counts as 5,000 bytes, and FORGEKEEPER_MAX_BYTES_PER_RUN_SWEEP_EVENTS is 1,000: raise the setting"
    )


@pytest.mark.usefixtures("sized")
def test_nothing_that_a_condition_writes_is_kept_unless_it_is_the_chunk_s(execute):
    execute(
        "create table asked (id bigint)",
        "create function ask(bigint) returns boolean volatile language sql as"
        " 'insert into toys.asked values ($1) returning true'",
    )
    due = SQL("ask(id)") & (Event.size > 1_000)
    spec = declare(where=due, size=Event.size, counted_bytes="bytes")

    # The run ends when it looks which bad records are still due.
    with pytest.raises(WritesByItself):
        run(spec, max_bytes_per_run=1_000)

    # The row is too large, so no chunk has claimed it.
    assert (count("events"), count("asked")) == (20, 0)


@pytest.mark.usefixtures("sized")
def test_a_row_that_was_too_large_is_deleted_once_the_limit_allows_it():
    spec = declare(size=Event.size, counted_bytes="bytes")
    run(spec, max_bytes_per_run=2_000)

    run(spec, max_bytes_per_run=10_000)

    assert (count("events"), Quarantined.select().count()) == (0, 0)
