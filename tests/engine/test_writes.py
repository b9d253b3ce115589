"""Nothing of a batch deletes beside the engine: that is refused, and one sentence says what to return instead.

PostgreSQL refuses it, and so do the handles of stores, repositories and Redis.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper import Rows, Table, batch
from forgekeeper.api.batches import BATCHES
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database.sessions import (
    DatabaseReadOnly,
    WritesByItself,
    read_only_session,
    write_transaction,
)
from forgekeeper.targets import git_refs, stores
from tests.harness.git_samples import BareRepository, put_root
from tests.harness.installation import INSTALLATION
from tests.harness.performing import run_as_worker
from tests.harness.settings import settings_with

DAY = timedelta(days=1)
ROWS = 250
REPOSITORY, DOOMED = "group/project.git", git_refs.RefToDelete("refs/mr/1", None)


class Weed(Table):
    """A row of an operator's own."""

    grown_at = DateTimeTZField()


@pytest.fixture
def weeds(database):
    """A table of which every row is due."""
    database.create_tables([Weed])
    database.execute_sql(
        "insert into weed (grown_at) select now() - n * interval '1 minute' from generate_series(1, %s) as n", (ROWS,)
    )
    database.execute_sql("create function pull() returns void language sql as 'delete from weed'")
    yield
    database.execute_sql("drop function pull(); drop table weed cascade")
    BATCHES.pop("pull_weeds", None)


def run(work, settings=None, **options):
    """Run a batch that works so; raise what becomes of it."""

    def pull_weeds(now):
        """Pull what should not grow here."""
        return work(now)

    declared = batch(cron="off", budget=DAY, records=(), **options)(pull_weeds)
    run_as_worker(declared, settings_with(**settings or {}))


def delete_raw(_now):
    db.execute_sql("delete from weed")
    return []


def delete_by_peewee(_now):
    Weed.delete().execute()
    return []


def delete_by_function(_now):
    db.execute_sql("select pull()")
    return []


def delete_between_chunks(now):
    yield Rows(Weed, Weed.grown_at < now - DAY, since=Weed.grown_at)
    db.execute_sql("delete from weed")


@pytest.mark.usefixtures("weeds")
@pytest.mark.parametrize("work", [delete_raw, delete_by_peewee, delete_by_function, delete_between_chunks])
def test_a_batch_that_deletes_by_itself_deletes_nothing_and_is_named(work):
    with pytest.raises(WritesByItself, match=r"^pull_weeds writes by itself: return Rows, Objects or Children"):
        run(work)

    assert Weed.select().count() == ROWS
    assert "pull_weeds writes by itself" in JobRun.get().error


@pytest.mark.usefixtures("weeds")
def test_one_that_declares_why_it_writes_may():
    run(delete_raw, writes="it empties a table")

    assert Weed.select().count() == 0


@pytest.fixture
def read_only_database(weeds):
    """A database that somebody has made read-only, for all sessions that come."""
    (name,) = db.execute_sql("select current_database()").fetchone()
    db.execute_sql(f'alter database "{name}" set default_transaction_read_only = on')
    yield
    db.execute_sql(f'alter database "{name}" reset default_transaction_read_only')


@pytest.mark.usefixtures("read_only_database")
def test_a_database_that_others_have_made_read_only_stays_so():
    def try_to_write():
        db.connect()
        with pytest.raises(DatabaseReadOnly), read_only_session("pull_weeds"):
            pass
        with pytest.raises(Exception, match="read-only transaction"), write_transaction():
            db.execute_sql("delete from weed")
        db.manual_close()

    # A thread has connections of its own.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(try_to_write).result()

    assert Weed.select().count() == ROWS


# Handles


@pytest.fixture
def places(database, tmp_path):
    """What settings say that lead to a store that has an object, and to a repository that has a ref."""
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / ".forgekeeper-root").write_text(f"installation: {INSTALLATION}\n")
    (folder / "kept").touch()
    root = put_root(tmp_path / "repositories")
    BareRepository(root).packed("refs/mr/1")
    stores.open_object_store.cache_clear()
    yield {"object_stores": {"artifacts": f"file://{folder}"}, "repositories_root": root}
    stores.open_object_store.cache_clear()
    BATCHES.pop("pull_weeds", None)


def with_places(work, places):
    """Run a batch that does that with the store and the place of the repository."""

    def answer(_now):
        work(stores.for_location("artifacts", settings_with(**places)), places["repositories_root"])
        return []

    run(answer, places)


def in_a_pipeline(_store, _root):
    with client.pipeline() as pipe:
        pipe.delete("kept").execute()


@pytest.mark.parametrize(
    "work",
    [
        lambda store, _root: store.delete(["kept"]),
        lambda _store, root: git_refs.delete_refs(root, REPOSITORY, [DOOMED], until=time.monotonic() + 60),
        lambda _store, _root: client.delete("kept"),
        in_a_pipeline,
        lambda _store, _root: client.eval("return 1", 0),
    ],
    ids=["object", "ref", "key", "pipeline", "script"],
)
def test_what_would_delete_is_refused_and_the_batch_is_named(places, work):
    client.set("kept", 1)

    with pytest.raises(WritesByItself, match=r"^pull_weeds writes by itself, .*: return Rows, Objects or Children"):
        with_places(work, places)

    refs = git_refs.preview_deletion(places["repositories_root"], REPOSITORY, [DOOMED], until=time.monotonic() + 60)
    assert stores.for_location("artifacts", settings_with(**places)).check_present(["kept"]) == {"kept": True}
    assert (client.get("kept"), refs[DOOMED].state) == (b"1", "deleted")


def test_what_a_batch_reads_is_answered(places):
    found = []

    with_places(lambda store, _root: found.append((client.exists("none"), store.check_present(["kept"]))), places)

    assert found == [(0, {"kept": True})]
