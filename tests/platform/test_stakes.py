"""How many rows a table has: those that live, whatever was done to it, and never far off."""

from random import Random

import peewee as pw
import pytest

from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import queries
from forgekeeper.platform.database.queries import AffectedShare
from tests.harness.thorough import examples

TABLE = "create table weighed (id bigint not null, filler text) with (autovacuum_enabled = off)"
FILL = "insert into weighed select n, repeat('x', 500) from generate_series(1, %s) as n"
SAMPLED_PAGES = 1_000
CHANGES = ("update weighed set id = id", "delete from weighed where mod(id, 3) = 0", "analyze weighed")
FAR = 0.2
"""Of a thousand pages; five standard deviations where a third of them are empty."""


class Weighed(pw.Model):
    """A table that only these tests have."""

    class Meta:
        database = db
        table_name = "weighed"


@pytest.fixture
def table(database):
    """Return what makes the table, of so many rows."""

    def made(rows):
        db.execute_sql(TABLE)
        db.execute_sql(FILL, (rows,))

    yield made
    db.execute_sql("drop table weighed")


def weighed(bound=10**6):
    return AffectedShare.from_queries(Weighed.select()).total(bound)


def test_rows_that_were_updated_or_deleted_do_not_count_twice(table):
    table(1_000)
    db.execute_sql("analyze weighed; update weighed set id = -id; delete from weighed where id < -900")

    assert weighed() == 900


@pytest.mark.parametrize("seed", range(examples(8)))
def test_of_a_larger_table_the_rows_that_live_are_never_far_off(table, monkeypatch, seed):
    monkeypatch.setattr(queries, "MAX_SAMPLED_PAGES", SAMPLED_PAGES)
    dice = Random(seed)
    table(dice.randint(30_000, 60_000))
    for _ in range(dice.randint(1, 2)):
        db.execute_sql(dice.choice(CHANGES))
    (rows,) = db.execute_sql("select count(*) from weighed").fetchone()

    assert weighed() == pytest.approx(rows, rel=FAR)


def test_a_partitioned_table_has_the_rows_of_its_partitions(database, monkeypatch):
    monkeypatch.setattr(queries, "MAX_SAMPLED_PAGES", SAMPLED_PAGES)
    db.execute_sql("create table weighed (id bigint, filler text) partition by hash (id)")
    try:
        for part in range(3):
            db.execute_sql(
                f"create table weighed_{part} partition of weighed for values with (modulus 3, remainder {part})"
            )
        db.execute_sql(FILL, (40_000,))

        assert weighed() == pytest.approx(40_000, rel=FAR)
    finally:
        db.execute_sql("drop table weighed")


def test_a_view_is_counted_up_to_the_bound(database):
    db.execute_sql("create view weighed as select n::bigint as id from generate_series(1, 5000) as n")
    try:
        assert (weighed(), weighed(100)) == (5_000, 100)
    finally:
        db.execute_sql("drop view weighed")
