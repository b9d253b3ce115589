"""What limits let go: never one record or byte more, however many delete at once and whoever is killed."""

import threading
from random import Random

import pytest

from forgekeeper.api.batches import BATCHES, CHILDREN
from forgekeeper.guards import breaker
from forgekeeper.guards.brakes import Brakes
from forgekeeper.ledger import manual_runs
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.limits import Amount, RunTotal
from forgekeeper.platform.database import database as db
from tests.harness.settings import settings_with
from tests.harness.tables import wait_for_locks
from tests.harness.thorough import examples

STATUSES, CHILD = BATCHES["user_status_cleanup"], CHILDREN["delete_artifact_bucket"]
CHILDREN_AT_ONCE = 10
ALL = "expired_job_artifacts"


def brakes_of(declared, outcome, run=1, **limits):
    given = settings_with(**{f"{name}_{declared.batch.name}": value for name, value in limits.items()})
    return Brakes(declared, given, outcome, run)


def chunk_of(brakes, outcome, wanted, *, went=None, field="deleted", size=0):
    """Reserve so many records, delete as many of them, or as *went* says, and settle it; return what was granted."""
    granted = brakes.reserve(wanted, wanted * size, least=size).records if brakes.count_allowed(wanted) else 0
    if granted:
        done = granted if went is None else went(granted)
        with db.atomic():
            brakes.settle(Amount(done, done * size))
        brakes.note_settled(Amount(done, done * size))
        setattr(outcome, field, getattr(outcome, field) + done)
    return granted


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
            brakes = brakes_of(STATUSES, outcome, max_per_run=limit)
            # Some of a chunk is locked, or has gone.
            while granted := chunk_of(
                brakes,
                outcome,
                chunk := own.randint(1, 1_000),
                went=lambda granted: own.randint(0, granted) if own.random() < 0.2 else granted,
            ):
                assert granted <= chunk
                if own.random() < 0.1:
                    brakes.find_stop_reason(now=True)
            brakes.count_unreserved()
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
    brakes = brakes_of(CHILD, outcome, **limits)
    while chunk_of(brakes, outcome, 1 if "max_bytes_per_run" in limits else 10, field="destroyed", size=10):
        pass

    assert brakes.stop_reason == reason


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
    brakes = brakes_of(CHILD, outcome, run=run, **limits)
    brakes.find_stop_reason(now=True)
    return brakes, outcome


def destroyed_by(child, chunks=10_000):
    brakes, outcome = child
    for _ in range(chunks):
        if not chunk_of(brakes, outcome, 100, field="destroyed"):
            break
    return outcome.destroyed


def test_children_that_earlier_runs_have_left_have_one_budget_with_those_of_the_newest(database):
    runs = [began() for _ in range(3)]

    assert sum(destroyed_by(child_of(run, max_per_run=700)) for run in (*runs, None)) == 700


def test_a_child_at_work_counts_to_the_run_that_has_begun_since(database):
    first, outcome = began(), CHILD.outcome()
    brakes = brakes_of(CHILD, outcome, run=first, max_per_run=10_000)
    brakes.find_stop_reason(now=True)
    destroyed_by((brakes, outcome), chunks=3)
    second = began()
    brakes.find_stop_reason(now=True)
    destroyed_by((brakes, outcome), chunks=2)
    brakes.count_unreserved()

    totals = {row.run: (row.records, row.reserved) for row in RunTotal.select()}
    assert totals == {first: (300, 0), second: (200, 0)}


def released(expect):
    Hold.add(ALL, "breaker", reason="too much", by="a run")
    assert breaker.release_batch(ALL, reason="I looked", by="me", expect=expect)


def test_children_of_earlier_runs_stay_held_until_a_run_has_begun_after_a_release(database):
    run = began()
    released(expect=100)

    brakes, _outcome = child_of(run)

    assert brakes.stop_reason == "held"


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
            brakes, outcome = child_of(own.choice([*earlier, None]))
            while chunk_of(brakes, outcome, own.randint(1, 500), field="destroyed"):
                if own.random() < 0.02:
                    brakes.reserve(100)
                    break  # killed: what it had reserved stays used up
            deleted.append(outcome.destroyed)

    together(CHILDREN_AT_ONCE, child)

    assert sum(deleted) <= expect


def test_a_child_from_a_queue_ends_if_the_run_that_has_sent_it_was_cancelled(database):
    cancelled = began()
    manual_runs.cancel_run(cancelled, reason="wrong", by="me")
    began()

    brakes, _outcome = child_of(cancelled)

    assert brakes.stop_reason == "cancelled"


def test_to_cancel_the_newest_run_ends_the_children_that_earlier_ones_have_left(database):
    earlier, newest = began(), began()
    manual_runs.cancel_run(newest, reason="wrong", by="me")
    brakes, _outcome = child_of(earlier)
    assert brakes.stop_reason == "cancelled"

    began()
    brakes, _outcome = child_of(earlier)
    assert brakes.stop_reason is None
