"""The audit of deletions: rows beside what is deleted, intents and their outcomes, and that nobody changes them."""

from datetime import UTC, datetime

import peewee as pw
import pytest

from forgekeeper.audit import acts
from forgekeeper.audit.acts import Act
from forgekeeper.audit.deletions import MAX_RECORDS_PER_ROW, Audit, Deletion, hash_name
from forgekeeper.platform.database import now
from forgekeeper.platform.database.common_tables import append_tables
from tests.harness.audited import record_intent
from tests.harness.every import every
from tests.harness.thorough import whole_only

NAMES = ["refs/heads/a", "", "ümlaut/日本語", "a b\n", "x" * 5_000, "🦊"]
TICK = datetime(2026, 11, 20, 8, 30, tzinfo=UTC)
BOTH = (Act, Deletion)
PARENTS = [model._meta.table_name for model in BOTH]

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def audit():
    return Audit("prune", on=True, run=7, tick=TICK, child="clean:1")


def rows():
    return list(Deletion.select().order_by(Deletion.id))


# The clause


@whole_only
def test_names_have_the_same_hash_in_python_and_in_postgresql(database, audit):
    clause = append_tables(audit.build_clause("object", "gone", id="id", name="path"))
    statement = f"with gone (id, path) as (select * from unnest(%(ids)s, %(paths)s)){clause} select from gone"

    database.execute_sql(statement, {"ids": [*range(len(NAMES))], "paths": NAMES} | audit.values)

    assert list(Deletion.get().hashes) == [hash_name(name) for name in NAMES]


# Intents and outcomes


@pytest.mark.parametrize(
    ("number", "sizes"),
    [
        (0, [0]),
        (MAX_RECORDS_PER_ROW, [MAX_RECORDS_PER_ROW]),
        (2 * MAX_RECORDS_PER_ROW + 1, [MAX_RECORDS_PER_ROW, MAX_RECORDS_PER_ROW, 1]),
    ],
)
def test_so_many_records_are_in_a_row_at_most(audit, number, sizes):
    names = [f"refs/{id_}" for id_ in range(number)]

    made = record_intent(audit, "ref", ids=range(number), names=names, oid=names)

    assert [row.id for row in rows()] == made
    assert [len(row.ids) for row in rows()] == [len(row.hashes) for row in rows()] == sizes
    assert [name for row in rows() for name in row.detail["oid"]] == names


@every(
    "batch, record, scope",
    [("delete_objects", "ref", "5"), ("prune", "object", "5"), ("prune", "ref", "6"), ("prune", "ref", None)],
)
def test_another_s_intent_is_not_ours_to_close(audit, batch, record, scope):
    record_intent(audit, "ref", ids=[1], scope="5")

    assert Audit(batch, on=True).find_open_intents(record, now=now(), scope=scope) == []


# Append-only


@pytest.fixture
def lines(audit):
    """A line in each table, in a month's partition and in the one for all other times."""
    acts.record_act("run", "run 1")
    audit.record_deleted("ref", ids=[1])
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
