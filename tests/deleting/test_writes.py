"""Nothing of a batch deletes beside the engine: PostgreSQL refuses it, and one sentence says what to return instead."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper import Rows, Table, batch
from forgekeeper.batches import BATCHES
from forgekeeper.database import database as db
from forgekeeper.database.sessions import TakesNoWrites, WritesByItself, reading_only, writing
from forgekeeper.runs.ledger import JobRun
from tests.harness.performing import recorded
from tests.harness.settings import settings_with

DAY = timedelta(days=1)
ROWS = 250


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


def declared(work, **options):
    """Declare a batch that works so."""

    def pull_weeds(now):
        """Pull what should not grow here."""
        return work(now)

    return batch(cron="off", budget=DAY, records=options.pop("records", ()), **options)(pull_weeds)


@pytest.mark.usefixtures("weeds")
@pytest.mark.parametrize(
    "work",
    [
        delete_raw,
        delete_by_peewee,
        delete_by_function,
        delete_between_chunks,
    ],
)
def test_a_batch_that_deletes_by_itself_deletes_nothing_and_is_named(work):
    with pytest.raises(WritesByItself, match=r"^pull_weeds writes by itself: return Rows, Items or Children"):
        recorded(declared(work), settings_with())

    assert Weed.select().count() == ROWS
    assert "pull_weeds writes by itself" in JobRun.get().error


@pytest.mark.usefixtures("weeds")
def test_one_that_declares_why_it_writes_may():
    recorded(declared(delete_raw, writes="it empties a table"), settings_with())

    assert Weed.select().count() == 0


def in_a_thread(work):
    """Do the *work* with connections of a thread's own."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


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
        with pytest.raises(TakesNoWrites), reading_only("pull_weeds"):
            pass
        with pytest.raises(Exception, match="read-only transaction"), writing():
            db.execute_sql("delete from weed")
        db.manual_close()

    in_a_thread(try_to_write)

    assert Weed.select().count() == ROWS
