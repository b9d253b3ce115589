"""Which rows a batch deletes: those of the relation that its model names."""

from datetime import timedelta

import pytest
from peewee import BigIntegerField
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper import Rows, Table, batch
from forgekeeper.cli.check import findings
from forgekeeper.database import database as db
from forgekeeper.database import now
from forgekeeper.runs.previewing import preview
from tests.harness.performing import recorded
from tests.harness.settings import settings_with
from tests.harness.toys import declaring

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
    with declaring():
        yield lambda *statements: [db.execute_sql(one) for one in statements]
    db.execute_sql("reset role; reset search_path; drop schema toys, archive cascade")


def declare(model=Event, **facts):
    def sweep_events(now):
        """Sweep old events."""
        return Rows(model, model.at < now - DAY, since=model.at, **facts)

    return batch(cron="* * * * *", budget=timedelta(minutes=1))(sweep_events)


def run(spec, **limits):
    return recorded(spec, settings_with(**{f"{name}_{NAME}": value for name, value in limits.items()})).result


def count(table):
    return db.execute_sql(f"select count(*) from {table}").fetchone()[0]


def errors():
    return [one.message for one in findings(settings_with()) if one.level == "error" and NAME in one.message]


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
    db.execute_sql("alter table archive.events drop size")

    (part,) = preview(spec, settings_with()).parts
    stake = spec.stake(now())

    assert (part.records, spec.due(now()).records, stake.due(100), stake.of(100)) == (10, 10, 10, 10)
    assert errors() == [
        f"{NAME}: column archive.events.size is missing: `forgekeeper contract --batch {NAME}` says what it expects"
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
