"""The audit of deletions: rows beside what is deleted, intents and their outcomes, and that nobody changes them."""

from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import peewee as pw
import psycopg2
import pytest
from psycopg2.extensions import make_dsn

from forgekeeper.audit import acts
from forgekeeper.audit.acts import Act
from forgekeeper.audit.deletions import ITEMS, UNCLOSED_FOR, Audit, Deletion, Ended, hashed
from tests.harness.every import every

NAMES = ["refs/heads/a", "", "ümlaut/日本語", "a b\n", "x" * 5_000, "🦊"]
TICK = datetime(2026, 11, 20, 8, 30, tzinfo=UTC)
BOTH = (Act, Deletion)
PARENTS = [model._meta.table_name for model in BOTH]

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def audit():
    return Audit("prune", on=True, run=7, tick=TICK, child="clean:1")


def of_another_attempt():
    return Audit("prune", on=True, run=6)


def rows():
    return list(Deletion.select().order_by(Deletion.id))


def only():
    (row,) = rows()
    return row


def ended(database, audit, gone, values, **columns):
    """Run a statement that has *gone* (id, path) as what it deletes, with the clause of the audit."""
    clause = audit.clause("object", "gone", id="id", name="path", **columns)
    statement = f"with gone (id, path) as ({gone}){clause} select count(*) from gone"
    return database.execute_sql(statement, values | audit.values).fetchone()[0]


# The clause


def test_a_statement_s_clause_writes_one_row_of_all_it_deletes(database, audit):
    gone = "select * from unnest(%(ids)s, %(paths)s)"

    assert (
        ended(database, audit, gone, {"ids": [30, 10, 20], "paths": ["c", "a", "b"]}, path="path", twice="id * 2") == 3
    )

    row = only()
    assert (row.phase, row.record, row.intent, row.scope) == ("done", "object", None, None)
    assert list(row.ids) == [30, 10, 20]
    assert row.detail == {"path": ["c", "a", "b"], "twice": [60, 20, 40]}


def test_a_row_names_the_batch_and_the_run_and_its_tick_and_child(database, audit):
    ended(database, audit, "values (1, 'a')", {})

    row = only()
    assert (row.batch, row.run, row.tick, row.child) == ("prune", 7, TICK, "clean:1")


def test_names_have_the_same_hash_in_python_and_in_postgresql(database, audit):
    gone = "select * from unnest(%(ids)s, %(paths)s)"

    ended(database, audit, gone, {"ids": [*range(len(NAMES))], "paths": NAMES})

    assert list(only().hashes) == [hashed(name) for name in NAMES]


def test_the_row_goes_with_the_statement_s_transaction(database, audit):
    with database.atomic() as transaction:
        ended(database, audit, "values (1, 'a')", {})
        transaction.rollback()

    assert rows() == []


# Intents and outcomes


def test_an_intent_says_what_is_about_to_go_and_an_outcome_what_is_gone(audit):
    (number,) = audit.intent("ref", ids=[1, 2], names=["refs/a", "refs/b"], scope="5", oid=["0a", "0b"], project_id=5)
    audit.outcomes("ref", [Ended(number, [2], ["refs/b"], {"state": "deleted"})])

    intent, outcome = rows()
    assert (intent.phase, intent.id, intent.scope) == ("intent", number, "5")
    assert intent.detail == {"oid": ["0a", "0b"], "project_id": 5}
    assert (outcome.phase, outcome.intent, list(outcome.ids)) == ("outcome", number, [2])
    assert (outcome.detail, list(outcome.hashes)) == ({"state": "deleted"}, [hashed("refs/b")])


@pytest.mark.parametrize(("number", "sizes"), [(0, [0]), (ITEMS, [ITEMS]), (2 * ITEMS + 1, [ITEMS, ITEMS, 1])])
def test_so_many_records_are_in_a_row_at_most(audit, number, sizes):
    names = [f"refs/{id_}" for id_ in range(number)]

    made = audit.intent("ref", ids=range(number), names=names, oid=names)

    assert [row.id for row in rows()] == made
    assert [len(row.ids) for row in rows()] == [len(row.hashes) for row in rows()] == sizes
    assert [name for row in rows() for name in row.detail["oid"]] == names


def test_an_intent_without_an_outcome_is_found_by_the_next_attempt(audit):
    (number,) = audit.intent("ref", ids=[1, 2], scope="5", oid=["0a", "0b"], project_id=5)

    (found,) = of_another_attempt().unclosed("ref", scope="5")

    assert (found.id, list(found.ids)) == (number, [1, 2])
    assert (found.column("oid"), found.column("project_id")) == (["0a", "0b"], [5, 5])


def test_an_intent_with_an_outcome_is_closed_also_where_nothing_was_deleted(audit):
    (number,) = audit.intent("ref", ids=[1])
    audit.outcomes("ref", [Ended(number, [], [], {})])

    assert of_another_attempt().unclosed("ref") == []


@every(
    "batch, record, scope",
    [("delete_objects", "ref", "5"), ("prune", "object", "5"), ("prune", "ref", "6"), ("prune", "ref", None)],
)
def test_another_s_intent_is_not_ours_to_close(audit, batch, record, scope):
    audit.intent("ref", ids=[1], scope="5")

    assert Audit(batch, on=True).unclosed(record, scope=scope) == []


def test_an_intent_of_long_ago_is_not_looked_for(audit):
    Deletion.insert(
        at=datetime.now(UTC) - UNCLOSED_FOR - timedelta(minutes=1),
        batch="prune",
        record="ref",
        phase="intent",
        ids=[1],
        hashes=[],
        detail={},
    ).execute()

    assert of_another_attempt().unclosed("ref") == []


# Append-only


@pytest.fixture
def lines(audit):
    """A line in each table, in a month's partition and in the one for all other times."""
    acts.record("run", "run 1")
    audit.done("ref", ids=[1])
    Act.insert(act="run", what="run 2", by_user="a", by_host="h", at=LONG_AGO).execute()
    Deletion.insert(batch="prune", record="r", phase="done", ids=[], hashes=[], detail={}, at=LONG_AGO).execute()


LONG_AGO = datetime(1999, 1, 1, tzinfo=UTC)
PARTITIONS = [*PARENTS, *(f"{name}_other" for name in PARENTS), *(f"{name}_{{month}}" for name in PARENTS)]
CHANGES = ["update {table} set batch = 'x'", "delete from {table}", "truncate {table}"]


def this_month():
    return datetime.now(UTC).strftime("%Y_%m")


@every("table, change", [(table, change) for table in PARTITIONS for change in CHANGES])
def test_no_line_is_changed_or_removed_not_even_by_the_owner(database, lines, table, change):
    with pytest.raises(pw.ProgrammingError, match="append-only"):
        database.execute_sql(change.format(table=table.format(month=this_month())))

    assert [model.select().count() for model in BOTH] == [2, 2]


def test_a_line_of_a_time_that_has_no_partition_is_kept_beside_them(database, lines):
    counts = [database.execute_sql(f"select count(*) from {name}_other").fetchone()[0] for name in PARENTS]

    assert counts == [1, 1]


# Partitions


@pytest.fixture
def old(database):
    """A month's partitions of six years ago, each with a line."""
    for name in PARENTS:
        database.execute_sql(
            f"create table {name}_2020_01 partition of {name} for values from ('2020-01-01 0:0Z') to ('2020-02-01 0:0Z')"
        )
    at = datetime(2020, 1, 31, 23, 59, tzinfo=UTC)
    Act.insert(act="run", what="run 1", by_user="a", by_host="h", at=at).execute()
    Deletion.insert(batch="prune", record="r", phase="done", ids=[], hashes=[], detail={}, at=at).execute()
    yield
    for name in PARENTS:
        database.execute_sql(f"drop table if exists {name}_2020_01")


@pytest.fixture
def session(urls, database):
    """Ask the database as a role of its own, with these grants."""
    made = []

    @contextmanager
    def open_as(grants=""):
        name = f"test_{uuid4().hex}"
        made.append(name)
        database.execute_sql(f"create role {name} login password 'x'")
        database.execute_sql(f"grant usage on schema public to {name}; {grants.format(name)}")
        with closing(psycopg2.connect(make_dsn(urls.database, user=name, password="x"))) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                yield cursor

    yield open_as
    for name in made:
        database.execute_sql(f"drop owned by {name}; drop role {name}")


def partitions(database):
    return {name for (name,) in database.execute_sql("select inhrelid::regclass::text from pg_inherits").fetchall()}


@every("days", [29, 0, -400])
def test_the_last_thirty_days_are_never_dropped(database, days):
    before = partitions(database)

    with pytest.raises(pw.ProgrammingError, match="last thirty days"):
        database.execute_sql("select audit_drop(clock_timestamp() - %s)", (timedelta(days=days),))

    assert partitions(database) == before


def test_a_new_month_s_partition_can_be_truncated_no_more_than_the_first(database):
    month = (datetime.now(UTC) + timedelta(days=180)).strftime("%Y_%m")
    with database.atomic() as transaction:
        database.execute_sql(f"drop table audit_acts_{month}")
        database.execute_sql("select audit_partitions(clock_timestamp() + interval '180 days')")

        with pytest.raises(pw.ProgrammingError, match="append-only"):
            database.execute_sql(f"truncate audit_acts_{month}")

        transaction.rollback()


CALLS = ["select audit_partitions(clock_timestamp())", "select audit_drop('2020-02-01 0:0Z')"]


@every("statement", CALLS)
def test_who_may_not_write_to_the_audit_may_not_have_its_partitions_changed(session, database, old, statement):
    with session() as cursor, pytest.raises(psycopg2.errors.InsufficientPrivilege, match="only who may write"):
        cursor.execute(statement)

    assert {f"{name}_2020_01" for name in PARENTS} <= partitions(database)


@every("statement", CALLS)
def test_who_may_write_to_the_audit_needs_not_own_it_to_have_its_partitions_changed(session, old, statement):
    with session("grant insert on audit_deletions to {}") as cursor:
        cursor.execute(statement)


def test_who_may_write_to_the_audit_may_neither_read_nor_change_it(session):
    with session("grant insert on audit_deletions to {}") as cursor:
        for statement in ("select from audit_deletions", "delete from audit_deletions", "drop table audit_acts"):
            with pytest.raises(psycopg2.errors.InsufficientPrivilege):
                cursor.execute(statement)
