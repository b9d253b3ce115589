"""A batch with `child_per=` sends a child for each value of a column, and each child deletes its share."""

from datetime import timedelta

import peewee as pw
import pytest
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper import Buckets, Objects, Queue, Rows, Table, batch, child
from forgekeeper.api.answers import Mistake
from forgekeeper.api.batches import CHILDREN
from forgekeeper.delivery.broker import broker, load_batches
from forgekeeper.engine import child_per_value
from forgekeeper.engine.previewing import preview_batch
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now
from forgekeeper.platform.failpoints import FailpointReached
from tests.harness.excluding import exclude
from tests.harness.performing import run_as_worker, run_child_as_worker
from tests.harness.settings import settings_with
from tests.harness.toys import forget_declarations

MINUTE = timedelta(minutes=1)
PROJECTS = {1: 3, 2: 2, None: 1}
"""Numbers of due parcels by project; those of project 2 are the oldest."""


class Parcel(Table):
    due_at = DateTimeTZField()
    tries = pw.IntegerField(default=0)
    made_at = DateTimeTZField()
    project_id = pw.BigIntegerField(null=True)
    path = pw.TextField()
    weight = pw.FloatField(null=True)

    class Meta:
        table_name = "parcel"


class Crate(Table):
    project_id = pw.BigIntegerField()


def make_rows(_now):
    """Delete parcels that nobody has collected."""
    return Rows(Parcel, since=Parcel.due_at, older_than=MINUTE, name=Parcel.path, project=Parcel.project_id)


def make_twice(now):
    """Delete parcels that nobody has collected."""
    return [make_rows(now), make_rows(now)]


def make_objects(_now):
    """Delete parcels that nobody has collected."""
    queue = Queue(Parcel, due_at=Parcel.due_at, attempts=Parcel.tries, created_at=Parcel.made_at)
    return Objects(queue, location="parcels", path=Parcel.path, project=Parcel.project_id)


@pytest.fixture(params=[make_rows, make_objects], ids=["rows", "objects"])
def old_parcels(request, database, folder):
    """A batch with a child for each project, and parcels with their objects, one of which is not due."""
    with forget_declarations():
        request.param.__name__ = "old_parcels"
        spec = declare(request.param)
        load_batches()
        db.create_tables([Parcel])
        for project, count in PROJECTS.items():
            for number in range(count):
                due = now() - (3 if project == 2 else 2) * MINUTE
                Parcel.create(due_at=due, made_at=due, project_id=project, path=f"{project}/{number}")
        Parcel.create(due_at=now() + MINUTE, made_at=now(), project_id=3, path="3/0")
        folder.put(*(parcel.path for parcel in Parcel.select()))
        yield spec
        db.drop_tables([Parcel])
        for name in ("old_parcels", "old_parcels_child"):
            del broker.actors[name]


def declare(function, **facts):
    facts = {"queue": "objects", "child_per": Parcel.project_id} | facts
    return batch(cron="off", budget=MINUTE, **facts)(function)


@pytest.fixture
def given(folder):
    return settings_with(object_stores={"parcels": folder.url}, breaker_share=1)


def left():
    return {parcel.path for parcel in Parcel.select()}


def keys_sent():
    return {key.decode() for key in client.hkeys("forgekeeper:queued")}


def test_a_run_sends_a_child_for_each_project_with_due_rows_and_deletes_nothing(old_parcels, given):
    row = run_as_worker(old_parcels, given)

    assert (row.result["children_enqueued"], row.result["stopped"], len(left())) == (3, "drained", 7)
    assert keys_sent() == {f"old_parcels_child:{project}" for project in ("1", "2", "null")}


def test_a_child_deletes_the_rows_of_its_project_alone(old_parcels, given):
    run = run_child_as_worker(CHILDREN["old_parcels_child"], given, 2)

    assert (run.outcome.deleted, left()) == (2, {"1/0", "1/1", "1/2", "None/0", "3/0"})


def test_a_child_deletes_the_rows_without_a_project(old_parcels, given):
    run = run_child_as_worker(CHILDREN["old_parcels_child"], given, None)

    assert (run.outcome.deleted, "None/0" in left()) == (1, False)


def test_the_projects_with_the_oldest_rows_come_first_if_there_are_too_many(old_parcels, given, monkeypatch):
    monkeypatch.setattr(child_per_value, "MAX_CHILDREN_PER_RUN", 1)

    row = run_as_worker(old_parcels, given)

    assert (row.result["stopped"], keys_sent()) == ("max_children", {"old_parcels_child:2"})


def test_an_excluded_project_gets_no_child(old_parcels, given):
    exclude("project:2")

    run_as_worker(old_parcels, given)

    assert keys_sent() == {"old_parcels_child:1", "old_parcels_child:null"}


@pytest.mark.parametrize("old_parcels", [make_objects], ids=["objects"], indirect=True)
def test_a_child_leaves_the_intents_of_another_child(old_parcels, given, folder):
    declared = CHILDREN["old_parcels_child"]
    dying = settings_with(object_stores={"parcels": folder.url}, failpoints="old_parcels_child.deleted=raise")
    with pytest.raises(FailpointReached):
        run_child_as_worker(declared, dying, 1)

    others, its_own = (run_child_as_worker(declared, given, project).outcome.deleted for project in (2, 1))

    assert (others, its_own) == (2, 3)


def test_preview_backlog_and_breaker_see_the_rows_of_all_children(old_parcels, given):
    parts = preview_batch(old_parcels, given).parts

    assert sum(part.records or 0 for part in parts) == 6
    assert (old_parcels.sum_backlogs(now()).records, old_parcels.stake(now()).due(10)) == (6, 6)


def test_the_batch_names_the_tables_and_places_that_its_child_deletes_from(old_parcels):
    (relation,) = old_parcels.relations

    assert (relation.model, old_parcels.deletes_records) == (Parcel, True)
    assert {subject.called for subject in old_parcels.subjects} == {"parcel"}


@pytest.mark.parametrize(
    ("answer", "facts", "said"),
    [
        (make_twice, {}, "needs a single answer; return one Rows or one Objects"),
        (make_rows, {"child_per": Crate.project_id}, "has to be a column of Parcel with whole numbers or text"),
        (make_objects, {"child_per": Parcel.weight}, "has to be a column of Parcel with whole numbers or text"),
        (make_rows, {"child_per": "project_id"}, "has to be a column of Parcel with whole numbers or text"),
        (make_rows, {"buckets": Buckets("old_parcels", count=2)}, "child_per= and buckets= both divide rows"),
        (make_rows, {"records": ()}, "with child_per= the engine derives records="),
    ],
)
def test_a_mistake_is_refused_when_the_batch_is_declared(answer, facts, said):
    with forget_declarations(), pytest.raises(Mistake, match=said):
        declare(answer, **facts)


def test_a_child_cannot_answer_with_objects_of_its_own():
    with forget_declarations():
        spec = batch(cron="off", budget=MINUTE, records=())(make_rows)
        with pytest.raises(Mistake, match="return them from its batch, with child_per="):
            child(spec, queue="objects", budget=MINUTE, due=make_objects)(make_twice)


def test_children_need_a_queue_of_their_own():
    with forget_declarations(), pytest.raises(Mistake, match="child_per= needs queue="):
        batch(cron="off", budget=MINUTE, child_per=Parcel.project_id)(make_rows)
