"""What limits let go: never one record or byte more, however many delete at once and whoever is killed."""

import threading
from random import Random

import pytest
from peewee import OperationalError

from forgekeeper.api.batches import BATCHES, CHILDREN
from forgekeeper.guards import breaker, run_guard
from forgekeeper.guards.run_guard import RunGuard
from forgekeeper.ledger import manual_runs
from forgekeeper.ledger.heartbeats import LostRun
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.limits import Amount, RunTotal
from forgekeeper.platform.database import database as db
from tests.harness.settings import settings_with
from tests.harness.tables import wait_for_locks
from tests.harness.thorough import examples

STATUSES, CHILD = BATCHES["user_status_cleanup"], CHILDREN["delete_artifact_bucket"]
CHILDREN_AT_ONCE = 10
ALL = "expired_job_artifacts"


def guard_of(declared, outcome, run=1, **limits):
    given = settings_with(**{f"{name}_{declared.batch.name}": value for name, value in limits.items()})
    return RunGuard(declared, given, outcome, run)


def chunk_of(guard, outcome, wanted, *, went=None, field="deleted", size=0):
    """Reserve so many records, delete as many of them, or as *went* says, and settle it; return what was granted."""
    granted = guard.reserve(wanted, wanted * size, least=size).records if guard.count_allowed(wanted) else 0
    if granted:
        done = granted if went is None else went(granted)
        with db.atomic():
            guard.settle(Amount(done, done * size))
        guard.note_settled(Amount(done, done * size))
        setattr(outcome, field, getattr(outcome, field) + done)
    return granted


@pytest.fixture
def frozen_guard(monkeypatch):
    """Let no reservation and no reading of the guard become a second old, however busy the machine is."""
    monkeypatch.setattr(run_guard, "GUARD_INTERVAL_SECONDS", 600.0)


def together(count, work):
    threads = [threading.Thread(target=lambda n=n: work(n), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("seed", range(examples(40)))
def test_children_at_once_never_have_more_than_the_limit_and_together_all_of_it(database, seed):
    dice = Random(seed)
    limit, deleted = dice.randint(1, 20_000), []
    Batch.register([STATUSES.name])

    def child(number):
        own, outcome = Random(f"{seed} {number}"), STATUSES.outcome()
        with db.connection_context():
            wait_for_locks()
            guard = guard_of(STATUSES, outcome, max_per_run=limit)
            # Some of a chunk is locked, or has gone.
            while granted := chunk_of(
                guard,
                outcome,
                chunk := own.randint(1, 1_000),
                went=lambda granted: own.randint(0, granted) if own.random() < 0.2 else granted,
            ):
                assert granted <= chunk
                if own.random() < 0.1:
                    guard.find_stop_reason(now=True)
            guard.count_unreserved()
            deleted.append(outcome.deleted)

    together(CHILDREN_AT_ONCE, child)
    together(1, child)  # what others had reserved and given back is the last one's

    assert sum(deleted) == limit
    (row,) = RunTotal.select()
    assert (row.records, row.reserved) == (limit, 0)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_per_run": 100, "max_per_day": 200}, "max_per_run"),
        ({"max_per_run": 200, "max_per_day": 100}, "max_per_day"),
        ({"max_bytes_per_run": 100, "max_bytes_per_day": 200}, "max_per_run"),
        ({"max_bytes_per_run": 200, "max_bytes_per_day": 100}, "max_per_day"),
    ],
)
def test_a_run_that_reaches_a_limit_says_which(database, limits, reason):
    outcome = CHILD.outcome()
    guard = guard_of(CHILD, outcome, **limits)
    while chunk_of(guard, outcome, 1 if "max_bytes_per_run" in limits else 10, field="destroyed", size=10):
        pass

    assert guard.stop_reason == reason


# Reservations for several chunks


def delete_chunks(guard, chunk=100, chunks=1_000_000):
    """Delete full chunks of rows, as the loop over rows does, and return the number of deleted rows."""
    deleted = 0
    for _ in range(chunks):
        if not (allowed := guard.count_allowed(chunk)) or not (granted := guard.reserve_chunk(allowed)):
            break
        statement = "with {} as ({}) select".format(*guard.build_settled_table(f"generate_series(1, {granted})")[0])
        db.execute_sql(statement, guard.settlement_values())
        guard.note_settled(Amount(granted), of_reserved=granted)
        deleted += granted
    return deleted


def count_reserved():
    return sum(row.reserved for row in RunTotal.select())


def test_reservations_grow_to_64_chunks_and_a_twentieth_of_the_rest(database, frozen_guard):
    guard, rest = guard_of(STATUSES, STATUSES.outcome(), max_per_run=1_000_000), []
    for _ in range(8):
        granted = guard.count_allowed(100) and guard.reserve_chunk(100)
        rest.append(guard.records_left)
        delete_chunks(guard, chunks=rest[-1] // granted)

    assert rest == [100, 200, 400, 800, 1_600, 3_200, 6_400, 6_400]


def test_near_a_limit_a_chunk_is_reserved_at_a_time(database, frozen_guard):
    guard = guard_of(STATUSES, STATUSES.outcome(), max_per_day=10_000)
    most = []
    while delete_chunks(guard, chunks=1):
        left = 10_000 - sum(row.records for row in RunTotal.select())
        most.append((left, count_reserved()))

    assert all(reserved <= max(100, (left + reserved + 100) / 20) for left, reserved in most)
    assert max(reserved for _, reserved in most) == 300
    assert all(reserved == 0 for left, reserved in most if left < 3_900)
    assert sum(row.records for row in RunTotal.select()) == 10_000


@pytest.mark.parametrize("seed", range(examples(40)))
def test_attempts_that_are_killed_leave_a_twentieth_of_the_rest_or_a_chunk_used_up(database, frozen_guard, seed):
    dice, limit, deleted, lost = Random(seed), 50_000, 0, 0
    while True:
        guard = guard_of(STATUSES, STATUSES.outcome(), max_per_day=limit)
        rest = limit - deleted - lost
        deleted += (some := delete_chunks(guard, chunks=dice.randint(1, 200)))
        if not some:
            break
        used_up = count_reserved() - lost
        assert used_up <= max(100, rest / 20)
        lost += used_up

    assert (limit - deleted, count_reserved()) == (lost, lost)


def test_two_processes_that_reserve_several_chunks_delete_all_of_a_limit_and_no_more(database):
    Batch.register([STATUSES.name])
    deleted = []

    def delete_in_turns(_number):
        with db.connection_context():
            wait_for_locks()
            guard = guard_of(STATUSES, STATUSES.outcome(), max_per_run=33_333)
            with guard.giving_back_rest():
                deleted.append(delete_chunks(guard))

    together(2, delete_in_turns)

    assert (sum(deleted), count_reserved()) == (33_333, 0)


def test_a_reservation_that_is_a_second_old_is_given_back_before_the_next_chunk(database, monkeypatch):
    guard = guard_of(STATUSES, STATUSES.outcome(), max_per_run=1_000_000)
    delete_chunks(guard, chunks=2)
    assert count_reserved() == 100

    monkeypatch.setattr(run_guard, "GUARD_INTERVAL_SECONDS", 0.0)

    assert (guard.count_allowed(100), count_reserved(), guard.records_left) == (100, 0, None)


def delete_and_fail(guard, error):
    with guard.giving_back_rest(LostRun):
        delete_chunks(guard, chunks=2)
        raise error


def test_the_rest_is_given_back_if_the_run_is_lost_between_two_chunks(database):
    guard = guard_of(STATUSES, STATUSES.outcome(), max_per_run=1_000_000)
    with pytest.raises(LostRun):
        delete_and_fail(guard, LostRun())

    assert [(row.records, row.reserved) for row in RunTotal.select()] == [(200, 0)]


def test_the_rest_stays_used_up_if_the_answer_to_a_chunk_is_unknown(database):
    guard = guard_of(STATUSES, STATUSES.outcome(), max_per_run=1_000_000)
    with pytest.raises(OperationalError):
        delete_and_fail(guard, OperationalError("the reply was lost"))

    assert [(row.records, row.reserved) for row in RunTotal.select()] == [(200, 100)]


# Children, of whichever run


def began():
    """Let a run of the children's batch begin; return its number."""
    (run,) = db.execute_sql(
        "insert into job_runs (batch, state, started_at, finished_at) values (%s, 'succeeded', now(), now())"
        " returning id",
        (ALL,),
    ).fetchone()
    return run


def child_of(run, **limits):
    outcome = CHILD.outcome()
    guard = guard_of(CHILD, outcome, run=run, **limits)
    guard.find_stop_reason(now=True)
    return guard, outcome


def destroyed_by(child, chunks=10_000):
    guard, outcome = child
    for _ in range(chunks):
        if not chunk_of(guard, outcome, 100, field="destroyed"):
            break
    return outcome.destroyed


def test_children_that_earlier_runs_have_left_have_one_budget_with_those_of_the_newest(database):
    runs = [began() for _ in range(3)]

    assert sum(destroyed_by(child_of(run, max_per_run=700)) for run in (*runs, None)) == 700


def test_a_child_reserves_anew_before_its_next_chunk_when_another_run_has_begun(database, frozen_guard):
    first = began()
    guard, _outcome = child_of(first, max_per_run=1_000_000)
    delete_chunks(guard, chunks=2)
    second = began()
    delete_chunks(guard, chunks=1)

    totals = {row.run: row.records for row in RunTotal.select()}
    assert totals == {first: 200, second: 100}


def test_a_child_at_work_counts_to_the_run_that_has_begun_since(database):
    first, outcome = began(), CHILD.outcome()
    guard = guard_of(CHILD, outcome, run=first, max_per_run=10_000)
    guard.find_stop_reason(now=True)
    destroyed_by((guard, outcome), chunks=3)
    second = began()
    guard.find_stop_reason(now=True)
    destroyed_by((guard, outcome), chunks=2)
    guard.count_unreserved()

    totals = {row.run: (row.records, row.reserved) for row in RunTotal.select()}
    assert totals == {first: (300, 0), second: (200, 0)}


def released(expect):
    Hold.add(ALL, "breaker", reason="too much", by="a run")
    assert breaker.release_batch(ALL, reason="I looked", by="me", expect=expect)


def test_children_of_earlier_runs_stay_held_until_a_run_has_begun_after_a_release(database):
    run = began()
    released(expect=100)

    guard, _outcome = child_of(run)

    assert guard.stop_reason == "held"


@pytest.mark.parametrize("seed", range(examples(20)))
def test_children_at_once_of_any_runs_never_have_more_than_was_released(database, seed):
    dice = Random(seed)
    expect, earlier, deleted = dice.randint(1, 5_000), [began(), began()], []
    released(expect=expect)
    breaker.begin_release(ALL, began())

    def child(number):
        own = Random(f"{seed} {number}")
        with db.connection_context():
            wait_for_locks()
            guard, outcome = child_of(own.choice([*earlier, None]))
            while chunk_of(guard, outcome, own.randint(1, 500), field="destroyed"):
                if own.random() < 0.02:
                    guard.reserve(100)
                    break  # killed: what it had reserved stays used up
            deleted.append(outcome.destroyed)

    together(CHILDREN_AT_ONCE, child)

    assert sum(deleted) <= expect


def test_a_child_from_a_queue_ends_if_the_run_that_has_sent_it_was_cancelled(database):
    cancelled = began()
    manual_runs.cancel_run(cancelled, reason="wrong", by="me")
    began()

    guard, _outcome = child_of(cancelled)

    assert guard.stop_reason == "cancelled"


def test_to_cancel_the_newest_run_ends_the_children_that_earlier_ones_have_left(database):
    earlier, newest = began(), began()
    manual_runs.cancel_run(newest, reason="wrong", by="me")
    guard, _outcome = child_of(earlier)
    assert guard.stop_reason == "cancelled"

    began()
    guard, _outcome = child_of(earlier)
    assert guard.stop_reason is None
