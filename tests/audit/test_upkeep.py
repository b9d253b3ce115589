"""The audit is kept up by prune: months ahead, none that is past for long; and nobody else changes anything in it."""

from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import peewee as pw
import psycopg2
import pytest
from psycopg2.errors import InsufficientPrivilege
from psycopg2.extensions import make_dsn
from structlog.testing import capture_logs

from forgekeeper.audit import partitions
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now
from tests.harness.every import every
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from workers.prune import prune

DAY = timedelta(days=1)
TABLES = ("audit_acts", "audit_deletions")
PARTS = "select inhrelid::regclass::text from pg_inherits"
LINE = """
    insert into audit_deletions (at, batch, record, phase, ids, hashes, detail)
    values (%s, 'a', 'b', 'done', '{1}', '{}', '{}')
"""
CALLS = ["select audit_partitions(clock_timestamp())", "select audit_drop('2020-03-01 0:0Z')"]

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def old_month(database):
    """A month of long ago, with a deletion in it; it may be gone by the end."""
    month = "partition of {0} for values from ('2020-02-01 0:0Z') to ('2020-03-01 0:0Z')"
    for table in TABLES:
        database.execute_sql(f"create table {table}_2020_02 {month.format(table)}")
    database.execute_sql(LINE, ("2020-02-10Z",))
    yield {f"{table}_2020_02" for table in TABLES}
    for table in TABLES:
        database.execute_sql(f"drop table if exists {table}_2020_02")


@pytest.fixture
def session(urls, database):
    """Ask the database as a role of its own, with these grants."""
    made = []

    @contextmanager
    def open_as(grants=""):
        name = f"test_{uuid4().hex}"
        made.append(name)
        database.execute_sql(f"create role {name} login password 'x'")
        database.execute_sql(f"grant usage on schema public, forgekeeper to {name}; {grants.format(name)}")
        with closing(psycopg2.connect(make_dsn(urls.database, user=name, password="x"))) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                yield cursor

    yield open_as
    for name in made:
        database.execute_sql(f"drop owned by {name}; drop role {name}")


def parts():
    return {name for (name,) in db.execute_sql(PARTS).fetchall()}


def test_a_month_that_is_past_is_dropped_whole(old_month):
    outcome = perform(prune, settings=settings_with(audit_keep=400))

    assert (outcome.audit_months, parts() & old_month) == (2, set())


def test_a_month_stays_while_a_day_of_it_may_be_young(old_month):
    keep = (now() - datetime(2020, 3, 1, tzinfo=UTC)).days + 1

    outcome = perform(prune, settings=settings_with(audit_keep=keep))

    assert (outcome.audit_months, parts() & old_month) == (0, old_month)


def test_a_worker_s_role_drops_nothing_that_the_installation_keeps(session, old_month):
    partitions.store_retention_days(36_500)
    try:
        with session("grant select, insert on audit_deletions to {}") as worker:
            worker.execute("select audit_drop(clock_timestamp() - interval '30 days')")
    finally:
        db.execute_sql("update installation set audit_keep = null")

    assert parts() >= old_month


@every("days", [29, 0, -400])
def test_the_last_thirty_days_are_never_dropped(days):
    before = parts()

    with pytest.raises(pw.ProgrammingError, match="last thirty days"):
        db.execute_sql("select audit_drop(clock_timestamp() - %s)", (timedelta(days=days),))

    assert parts() == before


def test_a_month_whose_first_lines_are_elsewhere_stays_there_and_the_others_are_made():
    at = now() + 180 * DAY
    for table in TABLES:
        db.execute_sql(f"drop table {table}_{at:%Y_%m}")
    db.execute_sql(LINE, (at,))

    perform(prune)

    made = parts()
    db.execute_sql("set session_replication_role = replica; delete from audit_deletions_other")
    db.execute_sql("set session_replication_role = default")
    perform(prune)
    assert {f"audit_deletions_{at:%Y_%m}", f"audit_acts_{at:%Y_%m}"} & made == {f"audit_acts_{at:%Y_%m}"}


def test_an_audit_that_is_locked_is_left_for_the_next_hour(old_month, other):
    other.execute("lock table audit_acts in share mode")

    with capture_logs() as lines:
        first = perform(prune)
    other.connection.rollback()
    second = perform(prune)

    assert (first.audit_months, second.audit_months) == (0, 2)
    assert [line["log_level"] for line in lines if "audit partitions locked" in line["event"]] == ["warning"]


@every("statement", CALLS)
def test_who_may_not_write_to_the_audit_may_not_have_its_partitions_changed(session, old_month, statement):
    with session() as cursor, pytest.raises(InsufficientPrivilege, match="only who may write"):
        cursor.execute(statement)

    assert parts() >= old_month


@every("statement", CALLS)
def test_who_may_write_to_the_audit_needs_not_own_it_to_have_its_partitions_changed(session, old_month, statement):
    with session("grant insert on audit_deletions to {}") as cursor:
        cursor.execute(statement)


def test_who_may_write_to_the_audit_may_neither_read_nor_change_it(session):
    with session("grant insert on audit_deletions to {}") as cursor:
        for statement in ("select from audit_deletions", "delete from audit_deletions", "drop table audit_acts"):
            with pytest.raises(InsufficientPrivilege):
                cursor.execute(statement)
