"""A release beside a breaker that looks or holds, or beside another release: what is said is what happened."""

import threading

import peewee as pw
import pytest

from demo.sample_data import add_statuses as sample
from forgekeeper.batches import BATCHES
from forgekeeper.connections import identity
from forgekeeper.database import database as db
from forgekeeper.runs import breaker
from forgekeeper.runs.holds import Batch, Hold
from forgekeeper.runs.ledger import JobRun
from models import UserStatus
from tests.harness.performing import recorded
from tests.harness.programs import eventually
from tests.harness.settings import settings_with
from tests.harness.tables import wait_for_locks

STATUSES = BATCHES["user_status_cleanup"]
WAITING = """
    select count(*) > 0 from pg_locks join pg_stat_activity using (pid)
    where not granted and datname = current_database()
"""


@pytest.fixture(autouse=True)
def all_due(database, monkeypatch):
    monkeypatch.delenv("FORGEKEEPER_BREAKER_SHARE")
    monkeypatch.setenv("FORGEKEEPER_BREAKER_LEAST", "50")
    sample(200)
    UserStatus.update(clear_status_at=pw.fn.now()).execute()


def give(by="me", expect=100):
    return breaker.release(STATUSES.name, reason="I looked", by=by, expect=expect)


def beside(work):
    """Do the work in another session; return its thread, and what it returned as a list."""
    answers = []

    def working():
        with db.connection_context():
            wait_for_locks()
            answers.append(work())

    thread = threading.Thread(target=working, daemon=True)
    thread.start()
    return thread, answers


def waiting():
    return db.execute_sql(WAITING).fetchone()[0]


def ended(thread):
    thread.join(30)
    assert not thread.is_alive()


def test_a_release_that_comes_while_the_breaker_looks_releases_nothing(database):
    with db.atomic():
        db.execute_sql("lock table user_statuses in access exclusive mode")
        thread, answers = beside(lambda: recorded(STATUSES, settings_with()))
        eventually(waiting)
        assert give() == []
    ended(thread)

    assert ([run.reason for run in answers], UserStatus.select().count()) == (["held"], 200)
    assert (Hold.why(STATUSES.name), breaker.released(STATUSES.name)) == ("held", False)


def test_of_two_releases_at_once_one_counts_and_the_other_knows(database):
    recorded(STATUSES, settings_with())
    with db.atomic():
        assert give(by="Anna", expect=10)
        thread, answers = beside(lambda: give(by="Ben", expect=10**6))
        eventually(waiting)
    ended(thread)

    assert answers == [[]]
    row = Batch.get_by_id(STATUSES.name)
    assert (row.released_by, row.released_expect) == ("Anna", 10)


def test_no_run_starts_before_a_release_is_whole(database):
    recorded(STATUSES, settings_with())
    with db.atomic():
        give(expect=30)
        thread, answers = beside(lambda: JobRun.start_here(STATUSES.name, by=identity()))
        ended(thread)

    assert answers == [None]
    assert recorded(STATUSES, settings_with()).result["deleted"] == 30
