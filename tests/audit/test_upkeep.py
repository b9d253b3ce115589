"""The audit is kept up by prune: months ahead, none that is past for long; and nobody else changes anything in it."""

from contextlib import closing
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg2
import pytest
from structlog.testing import capture_logs

from forgekeeper.audit import upkeep
from forgekeeper.audit.deletions import Audit, Deletion
from forgekeeper.database import database as db
from forgekeeper.database import now
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.totals import LAST, RunTotal
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from workers.prune import prune

pytestmark = pytest.mark.usefixtures("database")

DAY = timedelta(days=1)
PARTS = """
    select relname from pg_inherits join pg_class on pg_class.oid = inhrelid
    where inhparent in ('audit_acts'::regclass, 'audit_deletions'::regclass)
"""


@pytest.fixture
def old_month(database):
    """A month of long ago, with a deletion in it; it may be gone by the end."""
    for table in ("audit_acts", "audit_deletions"):
        database.execute_sql(
            f"create table {table}_2020_02 partition of {table} for values from ('2020-02-01Z') to ('2020-03-01Z')"
        )
    database.execute_sql(
        "insert into audit_deletions (at, batch, record, phase, ids, hashes, detail)"
        " values ('2020-02-10Z', 'a', 'b', 'done', '{1}', '{}', '{}')"
    )
    yield
    for table in ("audit_acts", "audit_deletions"):
        database.execute_sql(f"drop table if exists {table}_2020_02")


def parts():
    return {name for (name,) in db.execute_sql(PARTS).fetchall()}


def months_old(instant):
    """Return a number of days to keep, after which that instant is just past."""
    return (now() - instant).days


@pytest.mark.usefixtures("old_month")
def test_a_month_that_is_past_is_dropped_whole():
    outcome = perform(prune, settings=settings_with(audit_keep=400))

    assert (outcome.audit_months, Deletion.select().count()) == (2, 0)
    assert not {name for name in parts() if name.endswith("2020_02")}


@pytest.mark.usefixtures("old_month")
def test_a_month_stays_while_a_day_of_it_may_be_young():
    keep = months_old(datetime(2020, 3, 1, tzinfo=UTC)) + 1

    outcome = perform(prune, settings=settings_with(audit_keep=keep))

    assert (outcome.audit_months, Deletion.select().count()) == (0, 1)


@pytest.fixture
def keep(database):
    """Say, as the owner of the tables does with `migrate`, how long the audit is kept; nobody has by the end."""
    yield upkeep.keep
    database.execute_sql("update installation set audit_keep = null")


@pytest.mark.usefixtures("old_month")
def test_a_worker_s_role_drops_nothing_that_the_installation_keeps(keep, worker):
    keep(36_500)

    worker.execute("select audit_drop(clock_timestamp() - interval '30 days')")

    assert worker.fetchone() == (0,)


def test_a_worker_s_role_may_not_change_how_long_the_audit_is_kept(worker):
    db.execute_sql(f"grant select on installation to {worker.connection.info.user}")

    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        worker.execute("update installation set audit_keep = 31")


def test_the_audit_is_kept_for_four_hundred_days_unless_said_and_a_month_at_least():
    assert settings_with().audit_keep == 400
    with pytest.raises(ValueError, match="audit_keep"):
        settings_with(audit_keep=30)


LOCKED = """
    select distinct relname from pg_locks join pg_class on pg_class.oid = relation
    where pid = pg_backend_pid() and relname like 'audit_deletions_2%%' and relkind = 'r'
"""


def locked_by(ask):
    """Return which months of the audit a look locks."""
    with db.atomic():
        ask()
        return {name for (name,) in db.execute_sql(LOCKED).fetchall()}


@pytest.mark.usefixtures("old_month")
def test_a_look_for_unclosed_intents_locks_no_month_that_is_past():
    locked = locked_by(lambda: Audit("a", on=True).unclosed("b"))

    assert "audit_deletions_2020_02" not in locked
    assert f"audit_deletions_{now():%Y_%m}" in locked


@pytest.fixture
def missing_month(database):
    """Let the month in half a year be missing, as it is when nothing has kept the audit up."""
    month = f"{now() + 180 * DAY:%Y_%m}"
    for table in ("audit_acts", "audit_deletions"):
        db.execute_sql(f"drop table {table}_{month}")
    yield month
    upkeep.make_partitions(now() + 365 * DAY)


def test_a_month_whose_first_lines_are_elsewhere_stays_there_and_the_others_are_made(missing_month):
    at = now() + 180 * DAY
    db.execute_sql(
        "insert into audit_deletions (at, batch, record, phase, ids, hashes, detail)"
        " values (%s, 'a', 'b', 'done', '{1}', '{}', '{}')", (at,)
    )  # fmt: skip

    perform(prune)

    made = parts()
    db.execute_sql("set session_replication_role = replica; delete from audit_deletions_other")
    db.execute_sql("set session_replication_role = default")
    assert f"audit_deletions_{missing_month}" not in made
    assert f"audit_acts_{missing_month}" in made


@pytest.mark.usefixtures("old_month")
def test_an_audit_that_is_locked_is_left_for_the_next_hour(other):
    other.execute("lock table audit_acts in share mode")

    with capture_logs() as lines:
        first = perform(prune)
    other.connection.rollback()
    second = perform(prune)

    assert (first.audit_months, second.audit_months) == (0, 2)
    assert [line["log_level"] for line in lines if "audit not kept up" in line["event"]] == ["warning"]


# Totals of runs


def total(run, *, days, batch="prune"):
    db.execute_sql(
        "insert into run_totals (batch, run, day, records) values (%s, %s, current_date - %s, 5)", (batch, run, days)
    )


def kept(batch="prune"):
    return sorted(row.run for row in RunTotal.select().where(RunTotal.batch == batch))


def test_totals_go_after_sixty_days_but_the_last_hundred_runs(settings):
    Batch.register(["prune"])
    for run in range(1, LAST + 11):
        total(run, days=61)
    total(LAST + 11, days=1)

    outcome = perform(prune)

    assert (outcome.run_totals, kept()) == (11, list(range(12, LAST + 12)))


# The role of a worker


@pytest.fixture
def worker(database, urls):
    """A session of a role that may do with the audit what a worker may."""
    name = f"r{uuid4().hex}"
    db.execute_sql(f"create role {name} login password 'x'; grant usage on schema public to {name}")
    db.execute_sql(f"grant select, insert on audit_deletions to {name}")
    with closing(psycopg2.connect(urls.database, user=name, password="x")) as session, session.cursor() as cursor:
        session.autocommit = True
        yield cursor
    db.execute_sql(f"drop owned by {name}; drop role {name}")
