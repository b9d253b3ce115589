"""What the audit knows of objects: said before they go, closed with their rows, and after a crash by the next run.

Of the outbox's objects (`delete_objects`) and of uploads that never completed (`stale_direct_uploads`).
"""

from datetime import datetime, timedelta
from functools import partial

import pytest

from forgekeeper.audit.deletions import Deletion
from forgekeeper.connections import client
from forgekeeper.database import database, now
from forgekeeper.storage.outbox import DeletedObject, parted
from tests.harness.audited import gone, interrupted_at, lines, unclosed
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from workers.delete_objects import delete_objects
from workers.stale_direct_uploads import register, stale_direct_uploads

OBJECT, UPLOAD = "deleted_object", "stale_upload"
HERE = "artifacts"
FOUR_HOURS = 4 * 3_600
HOUR = timedelta(hours=1)

pytestmark = pytest.mark.usefixtures("database")


def on(store, declared, **options):
    return perform(declared, settings=settings_with(object_stores={HERE: store.url}, **options), number=17)


@pytest.fixture
def run(store):
    """Run a batch on each kind of store in turn."""
    return partial(on, store)


def record(store, *paths, project=7):
    """Leave objects behind whose artifacts are gone; return the ids of their rows."""
    store.put(*paths)
    due = now() - HOUR
    parts = [parted(path) for path in paths]
    return [
        DeletedObject.create(project_id=project, store_dir=folder, file=file, pick_up_at=due, created_at=due).id
        for folder, file in parts
    ]


def upload(store, *paths):
    """Register uploads that began long ago, with their objects."""
    store.put(*paths)
    began = client.time()[0] - FOUR_HOURS
    client.zadd(register.PENDING, {f"{HERE}:{path}": began for path in paths})
    return began


def claims_run_out():
    DeletedObject.update(pick_up_at=DeletedObject.pick_up_at - HOUR).execute()
    for member in client.zrange(register.DELETING, 0, -1):
        client.zadd(register.DELETING, {member: 0})


# The outbox


def test_each_deleted_object_has_its_line(run, store):
    numbers = record(store, "a/b/c", "d")

    run(delete_objects)

    found = sorted(lines(OBJECT), key=lambda line: line["id"])
    assert [(line["id"], line["path"], line["project_id"], line["state"]) for line in found] == [
        (numbers[0], "a/b/c", 7, "deleted"),
        (numbers[1], "d", 7, "deleted"),
    ]
    assert datetime.fromisoformat(found[0]["due"]) < now() - HOUR


def test_it_is_said_before_the_object_goes(run, store):
    record(store, "a")
    with interrupted_at("delete_objects.deleted"):
        run(delete_objects)

    assert [line["path"] for line in lines(OBJECT, "intent")] == ["a"]
    assert lines(OBJECT) == []


def test_an_object_held_back_between_claim_and_deletion_is_left_alone(folder):
    record(folder, "a")
    # As if somebody held it back right after the claim.
    hold = "begin new.pick_up_at := 'infinity'; return new; end"
    database.execute_sql(f"create function hold() returns trigger language plpgsql as $$ {hold} $$")
    claims = "create trigger hold before update on ci_deleted_objects for each row execute function hold()"
    database.execute_sql(claims)
    try:
        outcome = on(folder, delete_objects)
    finally:
        database.execute_sql("drop function hold cascade")

    assert (outcome.deleted, folder.keys()) == (0, {"a"})
    assert Deletion.select().count() == 0


# Uploads


def test_each_stale_upload_has_its_line(run, store):
    began = upload(store, "a/b", "c")

    run(stale_direct_uploads)

    assert gone(UPLOAD, "path") == {"a/b", "c"}
    assert {(line["location"], line["state"]) for line in lines(UPLOAD)} == {(HERE, "deleted")}
    due = {datetime.fromisoformat(line["due"]).timestamp() for line in lines(UPLOAD)}
    assert due == {began + timedelta(hours=3).total_seconds()}


def test_it_is_said_in_the_transaction_that_remembers_an_upload_as_reaped(run, store):
    upload(store, "a")
    database.execute_sql("alter table settled_uploads add constraint refused check (path <> 'a')")
    try:
        with pytest.raises(Exception, match="refused"):
            run(stale_direct_uploads)
    finally:
        database.execute_sql("alter table settled_uploads drop constraint refused")

    assert Deletion.select().count() == 0
    assert store.keys() == {"a"}


# Both


@pytest.mark.parametrize("step", ["marked", "deleted", "settled"])
@pytest.mark.parametrize("kind", [OBJECT, UPLOAD])
def test_what_a_crash_left_open_the_next_run_closes(run, store, kind, step):
    batch, put = {OBJECT: (delete_objects, record), UPLOAD: (stale_direct_uploads, upload)}[kind]
    put(store, "a", "b")
    with interrupted_at(f"{batch.name}.{step}"):
        run(batch)

    claims_run_out()
    run(batch)

    assert gone(kind, "path") == {"a", "b"}
    assert unclosed() == 0
