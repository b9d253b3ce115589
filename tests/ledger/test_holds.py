"""Holds: rows beside one another, and what processes of older versions see of them and write.

Statements of an older version stand here as it has them.
"""

from contextlib import closing
from datetime import timedelta

import psycopg2
import pytest

from forgekeeper.ledger.holds import GUARD_HOLD_KINDS, KINDS_BY_PEOPLE, Batch, Hold
from forgekeeper.ledger.reconcile import reconcile_batch
from forgekeeper.platform.database import database, now
from tests.harness.settings import settings_with

NAME = "user_status_cleanup"
HOUR = timedelta(hours=1)
OLDER_PAUSE = """
    update batches set paused_until = clock_timestamp() + interval '1 hour', paused_since = clock_timestamp(),
        paused_reason = 'a move', paused_by = 'bob' where name = %s
"""
OLDER_RESUME = """
    update batches set paused_until = null, paused_since = null, paused_reason = null, paused_by = null,
        stopped_since = null, stopped_reason = null, stopped_by = null where name = %s
"""
OLDER_HOLD = """
    insert into batches (name, held_since, held_reason, held_sentence)
    values (%s, clock_timestamp(), 'breaker', '9 of 10')
    on conflict (name) do update set
        held_since = coalesce(batches.held_since, excluded.held_since),
        held_reason = excluded.held_reason, held_sentence = excluded.held_sentence
"""
OLDER_RELEASE = """
    update batches set held_since = null, held_reason = null, held_sentence = null, released_at = clock_timestamp()
    where name = %s
"""
OLDER_STOP = "update batches set stopped_since = now(), stopped_reason = 'wrong', stopped_by = 'bob' where name = %s"
OLDER_LOOK = """
    select case when stopped_since is not null then 'stopped' when held_since is not null then 'held'
        when paused_until > clock_timestamp() then 'paused' end
    from batches where name = %s
"""

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture(autouse=True)
def _registered(database):
    Batch.register([NAME])


def older(statement):
    """Do what a process of an older version does; return what it finds."""
    cursor = database.execute_sql(statement, (NAME,))
    return cursor.fetchone()[0] if cursor.description else None


# Beside one another


def test_the_newer_hold_of_one_person_takes_the_place_of_the_older():
    Hold.add(NAME, "pause", reason="a move", by="bob", until=now() + HOUR)
    since = Hold.get().since
    Hold.add(NAME, "pause", reason="it is longer", by="bob")

    (hold,) = Hold.select()
    assert (hold.reason, hold.since) == ("it is longer", since)


@pytest.mark.parametrize("kind", KINDS_BY_PEOPLE)
@pytest.mark.parametrize("until", [None, timedelta(days=1)])
def test_a_hold_that_ends_later_stays_unless_it_is_replaced(kind, until):
    Hold.add(NAME, kind, reason="legal hold", by="bob", until=until and now() + until)
    kept = Hold.add(NAME, kind, reason="an hour", by="bob", until=now() + HOUR)

    (hold,) = Hold.select()
    assert (kept.id, hold.reason) == (hold.id, "legal hold")

    Hold.add(NAME, kind, reason="an hour", by="bob", until=now() + HOUR, replace=True)

    (hold,) = Hold.select()
    assert hold.reason == "an hour"


def test_a_longer_hold_that_somebody_ends_just_then_does_not_take_the_newer_with_it(other):
    Hold.add(NAME, "stop", reason="wrong rows go", by="bob")
    other.execute("delete from holds")
    Hold.add(NAME, "stop", reason="an hour", by="bob", until=now() + HOUR)
    other.connection.commit()

    assert [hold.reason for hold in Hold.select()] == ["an hour"]


def test_a_pause_shortens_no_stop():
    Hold.add(NAME, "stop", reason="wrong rows go", by="bob")
    Hold.add(NAME, "pause", reason="an hour", by="bob", until=now() + HOUR, replace=True)

    assert Hold.find_state(NAME) == "stopped"
    assert Hold.get(Hold.kind == "stop").until is None


def test_a_hold_that_has_ended_holds_nothing_back_and_goes_with_the_next():
    Hold.add(NAME, "pause", reason=None, by="alice", until=now() - HOUR)
    before = Hold.find_state(NAME)
    Hold.add(NAME, "stop", reason="wrong", by="bob")

    assert before is None
    assert [hold.by for hold in Hold.select()] == ["bob"]


@pytest.mark.parametrize(
    ("kinds", "why"),
    [(("pause", "new", "stop"), "stopped"), (("pause", "breaker"), "held"), (("pause",), "paused"), ((), None)],
)
def test_a_stop_comes_before_a_guard_s_hold_and_that_before_a_pause(kinds, why):
    for kind in kinds:
        Hold.add(NAME, kind, reason="test", by="test")

    assert Hold.find_state(NAME) == why


# Older versions


@pytest.mark.parametrize(
    ("kind", "why"), [("pause", "paused"), ("stop", "stopped"), ("breaker", "held"), ("new", "held")]
)
def test_what_holds_a_batch_back_holds_it_back_for_older_versions(kind, why):
    Hold.add(NAME, kind, reason="test", by="alice")
    there = older(OLDER_LOOK)
    Hold.lift(NAME, (*KINDS_BY_PEOPLE, *GUARD_HOLD_KINDS))

    assert (there, older(OLDER_LOOK)) == (why, None)


def test_what_could_not_be_shown_as_the_row_was_locked_is_shown_by_the_next_turn(urls):
    with closing(psycopg2.connect(urls.database)) as connection, connection.cursor() as another:
        another.execute("select from batches for update")
        Hold.add(NAME, "stop", reason="wrong", by="alice")
        before = older(OLDER_LOOK)
        # To close a connection is not to wait until the server has let go of its locks.
        connection.rollback()
    reconcile_batch(NAME, settings_with(cron_user_status_cleanup="off"), print, by="scheduler")

    assert (before, older(OLDER_LOOK)) == (None, "stopped")


@pytest.mark.parametrize(
    ("statement", "kind", "reason"),
    [(OLDER_PAUSE, "pause", "a move"), (OLDER_STOP, "stop", "wrong"), (OLDER_HOLD, "breaker", "9 of 10")],
    ids=["pause", "stop", "breaker"],
)
def test_what_an_older_version_writes_stands_beside_what_is_there(statement, kind, reason):
    Hold.add(NAME, "pause", reason="legal hold", by="alice")

    older(statement)

    assert [(hold.kind, hold.reason) for hold in Hold.list_active()] == [("pause", "legal hold"), (kind, reason)]


@pytest.mark.parametrize(
    ("statement", "left"),
    [(OLDER_RESUME, {"breaker", "new"}), (OLDER_RELEASE, {"pause", "stop"})],
    ids=["resume", "release"],
)
def test_what_an_older_version_ends_ends_and_nothing_else_does(statement, left):
    for kind in (*KINDS_BY_PEOPLE, *GUARD_HOLD_KINDS):
        Hold.add(NAME, kind, reason="test", by="alice")

    older(statement)

    assert {hold.kind for hold in Hold.list_active()} == left


# What a trigger of ours does with the rights of its owner.
LIFTS = """
    create temporary table batches (like forgekeeper.batches including defaults);
    create trigger mine after update on pg_temp.batches for each row execute function forgekeeper.batches_changed();
    insert into pg_temp.batches (name, stopped_since) values ('user_status_cleanup', now());
    update pg_temp.batches set stopped_since = null
"""


def test_a_role_that_may_only_look_lifts_no_stop_by_a_trigger_on_a_table_of_its_own(database, urls):
    Hold.add(NAME, "stop", reason="wrong", by="ann")
    database.execute_sql("create role looker; grant usage on schema forgekeeper to looker")
    with closing(psycopg2.connect(urls.database)) as session, session.cursor() as cursor:
        cursor.execute("grant select on forgekeeper.batches to looker; set role looker")
        with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="batches_changed"):
            cursor.execute(LIFTS)
    database.execute_sql("drop owned by looker; drop role looker")

    assert Hold.find_state(NAME) == "stopped"
