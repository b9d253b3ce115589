"""What limits let go: never one record or byte more, however many delete at once and whoever is killed."""

import threading
from datetime import timedelta
from random import Random

import pytest

from forgekeeper.batches import BATCHES, CHILDREN
from forgekeeper.connections import client
from forgekeeper.database import database as db
from forgekeeper.database import now
from forgekeeper.flags import FeatureFlag
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.brakes import Brakes
from forgekeeper.runs.totals import RunTotal
from models import JobArtifact, UserStatus
from tests.harness.performing import as_child, recorded
from tests.harness.settings import settings_with
from tests.harness.thorough import examples
from workers.expired_job_artifacts import FLAG, buckets
from workers.expired_job_artifacts.sample import artifacts
from workers.user_status_cleanup import sample

STATUSES, CHILD = BATCHES["user_status_cleanup"], CHILDREN["delete_artifact_bucket"]
CHILDREN_AT_ONCE = 10
ALL = "expired_job_artifacts"


def brakes_of(declared, outcome, run=1, clock=None, **limits):
    given = settings_with(**{f"{name}_{declared.batch.name}": value for name, value in limits.items()})
    return Brakes(declared, given, outcome, run, **({"clock": clock} if clock else {}))


def deleted_by(brakes, outcome, chunk=100, chunks=10_000):
    for _ in range(chunks):
        allowed = brakes.allowed(chunk)
        if not allowed:
            break
        outcome.deleted += allowed
    return outcome.deleted


def test_a_run_deletes_as_much_as_its_limit_and_says_so(database):
    sample(5_000)

    run = recorded(STATUSES, settings_with(max_per_run_user_status_cleanup=1_234))

    assert (run.result["deleted"], run.result["stopped"]) == (1_234, "max_per_run")


def test_the_runs_of_a_day_delete_as_much_as_its_limit(database):
    sample(5_000)

    runs = [recorded(STATUSES, settings_with(max_per_day_user_status_cleanup=1_500)) for _ in range(3)]

    assert sum(run.result["deleted"] for run in runs) == 1_500
    assert runs[-1].result["stopped"] == "max_per_day"


def test_where_nothing_is_limited_nothing_is_asked_about_limits():
    assert brakes_of(STATUSES, STATUSES.outcome()).allowed(100) == 100  # without a connection


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
            brakes = brakes_of(STATUSES, outcome, max_per_run=limit)
            while allowed := brakes.allowed(chunk := own.randint(1, 1_000)):
                # Some of a chunk is locked, or has gone.
                outcome.deleted += own.randint(0, allowed) if own.random() < 0.2 else allowed
                assert allowed <= chunk
                if own.random() < 0.1:
                    brakes.why(now=True)
            brakes.end()
            deleted.append(outcome.deleted)

    together(CHILDREN_AT_ONCE, child)
    together(1, child)  # what others had reserved and given back is the last one's

    assert sum(deleted) == limit
    (row,) = RunTotal.select()
    assert (row.records, row.reserved) == (limit, 0)


def test_what_a_killed_attempt_had_reserved_stays_used_up(database):
    killed, outcome = STATUSES.outcome(), STATUSES.outcome()
    deleted = deleted_by(brakes_of(STATUSES, killed, max_per_run=10_000), killed, chunks=3)  # and then no word of it

    brakes = brakes_of(STATUSES, outcome, max_per_run=10_000)
    deleted += deleted_by(brakes, outcome)

    assert 9_000 <= deleted <= 10_000
    assert brakes.reason == "max_per_run"


def test_another_run_has_the_limit_anew(database):
    for number in (1, 2):
        outcome = STATUSES.outcome()
        brakes = brakes_of(STATUSES, outcome, run=number, max_per_run=700)
        deleted_by(brakes, outcome)
        brakes.end()
        assert outcome.deleted == 700


def test_what_was_reserved_on_one_day_is_not_deleted_on_the_next(database):
    at, outcome = [0.0], STATUSES.outcome()
    brakes = brakes_of(STATUSES, outcome, clock=lambda: at[0], max_per_day=10_000)
    outcome.deleted += brakes.allowed(100)

    RunTotal.update(day=RunTotal.day - 1).execute()  # midnight passes
    brakes._day -= timedelta(days=1)
    at[0] += timedelta(days=1).total_seconds()
    outcome.deleted += brakes.allowed(100)
    brakes.end()

    assert [(row.records, row.reserved) for row in RunTotal.select().order_by(RunTotal.day)] == [(100, 0), (100, 0)]


def test_a_run_of_which_so_much_is_expected_deletes_no_more_nor_do_its_children(database):
    first, second = STATUSES.outcome(), STATUSES.outcome()
    brakes = brakes_of(STATUSES, first)
    brakes.expect(300)
    deleted_by(brakes, first, chunks=2)
    brakes.end()

    later = brakes_of(STATUSES, second)
    later.why(now=True)
    deleted_by(later, second)

    assert (first.deleted, second.deleted) == (200, 100)


# Bytes


@pytest.fixture
def expired(database):
    FeatureFlag.turn(FLAG, on=True)
    artifacts(1_000)
    buckets.tidy(client, 5, silent_for=timedelta(minutes=10))
    return 600


def left():
    return JobArtifact.expired(now()).count()


def destroyed(*, at_once=5, **limits):
    outcomes, given = [], settings_with(**{f"{name}_{ALL}": value for name, value in limits.items()})

    def child(_number):
        with db.connection_context():
            outcomes.append(as_child(CHILD, given).outcome)

    for _ in range(5 // at_once):
        together(at_once, child)
    return outcomes


@pytest.mark.parametrize("limit", [1, 99, 5_000, 20_000, 50_000])
def test_children_never_destroy_a_byte_beyond_the_limit(expired, limit):
    outcomes = destroyed(max_bytes_per_day=limit)

    gone = sum(outcome.bytes for outcome in outcomes)
    assert gone <= limit
    # No artifact is larger than 149 bytes: where one more does not fit, no more than that is missing for each child.
    assert gone > limit - 5 * 150 or left() == 0
    assert (sum(outcome.destroyed for outcome in outcomes)) == expired - left()


def test_an_artifact_that_is_larger_than_what_is_reserved_at_once_goes_if_the_limit_has_room_for_it(expired):
    outcomes = destroyed(max_bytes_per_day=10**6)

    assert sum(outcome.destroyed for outcome in outcomes) == expired


def test_children_destroy_as_many_artifacts_as_the_limit(expired):
    assert sum(outcome.destroyed for outcome in destroyed(max_per_day=333)) <= 333
    # One of an empty bucket has the rest reserved for a moment, in which the others would end.
    destroyed(at_once=1, max_per_day=333)

    assert expired - left() == 333


def test_statuses_that_are_not_due_are_nobodys_to_count(database):
    sample(500)
    recorded(STATUSES, settings_with(max_per_run_user_status_cleanup=10**6))

    assert UserStatus.select().count() == 300
