"""A batch of somebody else's whose children share its rows, and whose objects go into the outbox."""

from datetime import timedelta

import peewee as pw
import pytest
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper import Buckets, Children, Classes, Outbox, Rows, Table, Total, batch, child
from forgekeeper.api.answers import Mistake
from forgekeeper.api.batches import BATCHES, CHILDREN, FLAGS
from forgekeeper.engine.deleted_rows import (
    RestoreSelection,
    count_recoverable,
    list_restorable_kinds,
    read_recoverable_pages,
)
from forgekeeper.engine.previewing import preview_batch
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now
from forgekeeper.sources.buckets import BucketSet
from forgekeeper.sources.outbox import DeletedObject
from tests.harness.performing import perform, run_as_worker, run_child_as_worker
from tests.harness.settings import settings_with

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
MORE = "old_crates_faster"
BUCKETS = Buckets("old_crates", count=1, count_with={MORE: 2}, loop_limit=10)


class Shelf(Table):
    optional = True

    weight = pw.BigIntegerField()

    class Meta:
        table_name = "shelf"


class Crate(Table):
    stored_at = DateTimeTZField()
    shelf = pw.BigIntegerField()
    store = pw.IntegerField(default=2)
    path = pw.TextField()
    weight = pw.BigIntegerField()

    class Meta:
        table_name = "crate"


def crates(**facts):
    facts = {"older_than": DAY, "restorable": True, "chunk": 2, "project": Crate.shelf} | facts
    facts |= {"size": Crate.weight, "total": Total(Shelf.weight, of=Crate.shelf)}
    facts = {"outbox": Outbox(Crate.path, location=Crate.store), "classes": Classes("mod(id, 4)", 4)} | facts
    return Rows(Crate, since=Crate.stored_at, **facts)


@pytest.fixture
def declared():
    @batch(cron="off", budget=MINUTE, buckets=BUCKETS, flags={MORE: "Delete crates in two buckets."})
    def old_crates(now):
        """Delete crates that nobody has collected."""
        return Children(delete_crates, BUCKETS)

    @child(old_crates, queue="cron", budget=MINUTE)
    def delete_crates(now):
        """Delete the crates of a bucket."""
        return crates()

    yield delete_crates
    del BATCHES["old_crates"], CHILDREN["delete_crates"]
    FLAGS.pop(MORE, None)


@pytest.fixture
def stored(database):
    """Ten crates on a shelf of a hundred, of which eight are due."""
    db.create_tables([Shelf, Crate])
    Shelf.create(id=1, weight=100)
    for number in range(10):
        age = timedelta(hours=12 if number > 7 else 36)
        Crate.create(stored_at=now() - age, shelf=1, path=f"c/{number}", weight=number)
    client.delete(*BucketSet("old_crates").keys)
    yield lambda: db.execute_sql("select * from crate order by id").fetchall()
    db.drop_tables([Shelf, Crate])


def settings():
    return settings_with(breaker_share=1)


def test_parent_and_child_share_the_rows_and_the_child_returns_its_bucket(declared, stored):
    sent = run_as_worker(declared.batch, settings()).result

    outcome = perform(declared, settings=settings())

    assert (sent["max_buckets"], sent["missing_count"], sent["children_enqueued"]) == (1, 1, 1)
    assert (outcome.bucket, outcome.deleted, outcome.stopped, len(stored())) == (0, 8, "drained", 2)
    assert BucketSet("old_crates").read_states(client) == {"available": [0], "occupied": []}
    assert {row.path for row in DeletedObject.select()} == {f"c/{number}" for number in range(8)}
    assert Shelf.get().weight == 100 - sum(range(8))


def test_a_child_of_two_deletes_the_classes_of_its_bucket(declared, stored):
    BucketSet("old_crates").tidy(client, 2)
    BATCHES["old_crates"].buckets = Buckets("old_crates", count=2)

    assert perform(declared, settings=settings()).deleted == 4
    assert {row[0] % 2 for row in stored()[:4]} == {1}


def test_what_everybody_asks_about_it_follows_from_the_answer(declared, stored):
    parent, prefix = declared.batch, "old_crates_bucket"

    (part,) = preview_batch(parent, settings()).parts

    assert (part.records, parent.sum_backlogs(now()).records, parent.stake(now()).due(100)) == (8, 8, 8)
    assert now() - parent.sum_backlogs(now()).oldest < DAY
    assert {gauge.name for one in parent.collectors.values() for gauge in one.gauges} == {
        f"{prefix}s", f"{prefix}s_limit", f"{prefix}_oldest_occupied_timestamp_seconds",
    }  # fmt: skip
    assert {one.name for one in parent.counters} == {f"{prefix}s_recovered", f"{prefix}s_refilled"}
    assert (set(parent.tables), parent.deletes_records) == ({Crate, Shelf, DeletedObject}, True)
    assert declared.continues == ("deadline", "loop_limit")


def test_deleted_rows_come_back_with_all_columns_and_the_total(declared, stored):
    before = stored()
    BucketSet("old_crates").tidy(client, 1)
    run_child_as_worker(declared, settings(), run=7)

    (kind,) = [kind for kind, name in list_restorable_kinds() if name == "old_crates"]
    back = count_recoverable(kind, 7, float("inf"), settings())
    rows = [row for page, _ in read_recoverable_pages(kind, RestoreSelection(run=7), held=False) for row in page]
    for statement in kind.write_script(rows):
        db.execute_sql(statement.replace("%", "%%"))

    assert (back.recoverable, back.obstacle, stored(), Shelf.get().weight) == (8, None, before, 100)
    (subject,) = declared.batch.subjects
    assert (subject.restore, subject.is_there(1)) == ("forgekeeper objects hold --crate {id}", True)


def test_a_forge_without_the_total_has_its_rows_deleted_all_the_same(declared, stored):
    BucketSet("old_crates").tidy(client, 1)
    db.execute_sql("alter table shelf rename to gone")
    try:
        assert perform(declared, settings=settings()).deleted == 8
    finally:
        db.execute_sql("alter table gone rename to shelf")


def with_buckets(buckets=BUCKETS, rows=crates, **facts):
    """Declare a batch with its child, and forget both."""
    facts = {"flags": {MORE: "Delete crates in two buckets."}} | facts
    try:
        parent = batch(cron="off", budget=MINUTE, buckets=buckets, **facts)(named("many_crates"))
        child(parent, queue="cron", budget=MINUTE)(named("delete_many", rows))
    finally:
        BATCHES.pop("many_crates", None)
        CHILDREN.pop("delete_many", None)
        FLAGS.pop(MORE, None)


def named(name, answer=lambda: None):
    def function(now):
        """Delete crates."""
        return answer()

    function.__name__ = name
    return function


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: Buckets("", count=1), "the name is the hash tag of their keys"),
        (lambda: Buckets("{crates}", count=1), "write it without braces"),
        (lambda: Buckets("crates", count=1, count_with={MORE: 0}), "count has to be at least 1, not 0"),
        (lambda: Buckets("crates", count=1, loop_limit=0), "loop_limit has to be at least 1, not 0"),
        (lambda: crates(classes=Classes("0", 0)), "count has to be at least 1, not 0"),
        (lambda: crates(or_where=Crate.weight > 1), "or_where= adds to a condition; write the condition, too"),
        (lambda: Outbox(Crate.weight, location=Crate.store), "path has to be a text column"),
        (lambda: Outbox(Crate.path, location=Crate.path), "location has to be a column of Crate for whole numbers"),
        (lambda: Outbox(Crate.path, location=Crate.store, theirs=Shelf), "Shelf lacks the column project_id"),
        (lambda: Rows(Shelf, Shelf.weight > 1, since=Crate.stored_at, outbox=Outbox(Crate.path, location=Crate.store)),
         "since has to be a DateTimeTZField of Shelf"),
        (lambda: with_buckets(flags={}), "its buckets read the flag old_crates_faster; describe the flag in flags="),
        (lambda: with_buckets(rows=lambda: crates(classes=None)), "return Rows with classes="),
        (lambda: with_buckets(rows=list), "return Rows with classes="),
        (lambda: with_buckets(Buckets("many", count=5)), "has 4 classes for 5 buckets: declare at least 5 classes"),
    ],
)  # fmt: skip
def test_a_mistake_is_an_error_where_it_is_written(answer, said):
    with pytest.raises(Mistake, match=said):
        answer()


def test_children_of_undeclared_buckets_are_an_error_of_the_run(declared, stored):
    parent = declared.batch
    parent.buckets = Buckets("others", count=1)

    with pytest.raises(Mistake, match="the buckets old_crates that their batch does not declare: write buckets= in"):
        perform(parent, settings=settings())


def test_a_child_in_buckets_has_no_due(declared):
    with pytest.raises(
        Mistake, match="old_crates has buckets: its child returns all rows that are due; leave out due="
    ):
        child(declared.batch, queue="cron", budget=MINUTE, due=lambda _now: crates())


def test_two_batches_do_not_share_the_keys_of_their_buckets(declared):
    with pytest.raises(Mistake, match="and old_crates both have buckets called old_crates: rename one of them"):
        with_buckets()
