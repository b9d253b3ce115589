"""A batch that deletes an object for each row of a queue says where both are, and nothing else."""

from datetime import timedelta

import peewee as pw
import pytest
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper import Locations, Objects, Queue, Retry, Table, batch
from forgekeeper.api.answers import Mistake
from forgekeeper.api.batches import BATCHES
from forgekeeper.audit.deletions import Deletion
from forgekeeper.engine.previewing import preview_batch
from forgekeeper.guards.preconditions import Blocked
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now
from tests.harness.performing import perform, run_as_worker
from tests.harness.settings import settings_with

MINUTE = timedelta(minutes=1)


class Parcel(Table):
    due_at = DateTimeTZField()
    tries = pw.IntegerField(default=0)
    made_at = DateTimeTZField()
    project_id = pw.BigIntegerField()
    path = pw.TextField()

    class Meta:
        table_name = "parcel"


QUEUE = Queue(Parcel, due_at=Parcel.due_at, attempts=Parcel.tries, created_at=Parcel.made_at, retry=Retry(attempts=2))


@pytest.fixture
def parcels(database, folder):
    """Three parcels that are due, and one that is not, with their objects."""
    db.create_tables([Parcel])
    for number in range(4):
        due = now() + (MINUTE if number == 3 else -MINUTE)
        Parcel.create(due_at=due, made_at=now() - 2 * MINUTE, project_id=7, path=f"p/{number}")
    folder.put(*(f"p/{number}" for number in range(4)))
    yield folder
    db.drop_tables([Parcel])
    BATCHES.pop("old_parcels", None)


def declared(**facts):
    @batch(cron="off", budget=MINUTE)
    def old_parcels(now):
        """Delete parcels that nobody has collected."""
        return Objects(QUEUE, **{"location": "parcels", "path": Parcel.path, "project": Parcel.project_id} | facts)

    return old_parcels


def settings(folder):
    return settings_with(object_stores={"parcels": folder.url}, breaker_share=1)


def left():
    return {row.path for row in Parcel.select()}


def test_a_run_deletes_the_objects_that_are_due_and_their_rows(parcels):
    outcome = perform(declared(), settings=settings(parcels))

    assert (outcome.deleted, outcome.remaining, outcome.stopped) == (3, 0, "drained")
    assert (parcels.keys(), left()) == ({"p/3"}, {"p/3"})


def test_the_name_of_a_location_is_a_value_in_every_statement(parcels):
    name = "it's 100% {of}"

    outcome = perform(declared(location=name), settings=settings_with(object_stores={name: parcels.url}))

    assert (outcome.deleted, left()) == (3, {"p/3"})


def test_the_audit_has_each_object_with_its_project(parcels):
    run_as_worker(declared(), settings(parcels))

    (intent,) = Deletion.select().where(Deletion.record == "parcel", Deletion.phase == "intent")
    assert (intent.detail["path"], intent.detail["project_id"]) == (["p/0", "p/1", "p/2"], 7)


def test_what_cannot_be_deleted_is_tried_again_and_then_waits_for_a_person(parcels):
    spec, given = declared(), settings(parcels)
    Parcel.update(path="p//x").where(Parcel.path == "p/0").execute()

    for _ in range(2):
        Parcel.update(due_at=now() - MINUTE).where(Parcel.path == "p//x").execute()
        perform(spec, settings=given)

    (refused,) = spec.refused
    (entry,) = refused.entries(given, 10)
    assert (refused.kind, entry.failures, "p//x" in entry.error) == ("parcel", 2, True)
    assert (refused.retry([entry.key]), refused.count()) == (1, 0)


def test_a_preview_counts_what_a_run_would_delete(parcels):
    (part,) = preview_batch(declared(), settings(parcels)).parts

    assert (part.records, part.kept, part.projects) == (3, {"fresh": 1}, {"7": 3})
    assert len(left()) == 4


def test_without_its_store_the_batch_is_blocked_and_claims_nothing(parcels):
    due = {row.id: row.due_at for row in Parcel.select()}

    with pytest.raises(Blocked, match="no object store 'parcels' is configured"):
        perform(declared(), settings=settings_with(object_stores={"others": parcels.url}))

    assert {row.id: row.due_at for row in Parcel.select()} == due


def test_what_everybody_asks_about_it_follows_from_the_answer(parcels):
    spec = declared()

    assert (spec.sum_backlogs(now()).records, spec.deletes_from, spec.deletes_records) == (3, "stores", True)
    assert {one.name for one in spec.records} == {"parcel", "dead_parcel"}
    assert spec.stake(now()).due(10) == 3
    (relation,) = spec.relations
    assert (relation.needed_privileges("worker"), relation.needed_privileges("exporter")) == (
        ["select", "update", "delete"],
        ["select"],
    )


class Crate(Table):
    due_at = DateTimeTZField()
    path = pw.TextField()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: Queue(Parcel, due_at=Crate.due_at, attempts=Parcel.tries, created_at=Parcel.made_at),
         "due_at has to be a column of Parcel for times"),
        (lambda: Queue(Parcel, due_at=Parcel.due_at, attempts=Parcel.path, created_at=Parcel.made_at),
         "attempts has to be a column of Parcel for whole numbers"),
        (lambda: Queue(Parcel, due_at=Parcel.due_at, attempts=Parcel.tries, created_at=Parcel.made_at,
                       retry=Retry(attempts=0)), "an item has at least one attempt, not 0"),
        (lambda: Objects(QUEUE, location="a", path=Crate.path), "path has to be a column of Parcel"),
        (lambda: Objects(QUEUE, location="a", path="path"), "path has to be a text column or an expression"),
        (lambda: Objects(QUEUE, location="a", path=Parcel.path, project=Crate.id), "project has to be a column of"),
        (lambda: Objects(QUEUE, location=Locations(Crate.id, {1: "a"}), path=Parcel.path), "location has to be a"),
        (lambda: Objects(QUEUE, location="a", path=Parcel.path, chunk=0), "a chunk has at least one object"),
    ],
)  # fmt: skip
def test_a_mistake_is_an_error_where_it_is_written(answer, said):
    with pytest.raises(Mistake, match=said):
        answer()
