"""Batch 100 against real stores: a folder and S3, with entries, stores and runs that fail."""

import pytest
from structlog.testing import capture_logs

from forgekeeper.connections import client
from forgekeeper.failpoints import Failpoints, Fault, arm
from forgekeeper.runs.brakes import Deadline
from forgekeeper.storage import sentinel
from forgekeeper.storage.settled import SettledUpload
from tests.harness.clocks import StandingClock
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from tests.harness.stale_uploads import (
    BATCH,
    ELSEWHERE,
    HERE,
    SECOND,
    STALE,
    attempts,
    away,
    begin,
    fail,
    members,
    now,
    numbered,
    register,
    register_members,
    registered,
    run,
)
from workers.stale_direct_uploads import CHUNK, MAX_EXEC_DURATION, MAX_UPLOAD_DURATION, Outcome
from workers.stale_direct_uploads import register as uploads

pytestmark = pytest.mark.usefixtures("database")


# What it deletes


def test_a_stale_upload_is_deleted_with_its_entry(store):
    begin(store, "a/b")

    outcome = run(artifacts=store.url)

    assert (outcome, store.keys(), registered(), attempts()) == (Outcome(1, 1, False, 0), set(), set(), {})


def test_an_upload_of_exactly_three_hours_is_not_stale(folder):
    while True:
        client.delete(uploads.PENDING)
        begin(folder, "a", age=MAX_UPLOAD_DURATION.total_seconds())
        second = now()
        outcome = run(artifacts=folder.url)
        if now() == second:
            break

    assert (outcome, folder.keys()) == (Outcome(1, 0, False, 0), {"a"})


def test_a_path_is_not_cut_at_its_second_colon(store):
    begin(store, "a:b:c")
    store.put("a", "a:b", "b:c", "c")

    outcome = run(artifacts=store.url)

    assert (outcome.total_deleted_stale_entries, store.keys()) == (1, {"a", "a:b", "b:c", "c"})


def test_each_location_deletes_in_its_own_store(store, elsewhere):
    begin(store, "a")
    begin(elsewhere, "a", location=ELSEWHERE)
    store.put("b")
    begin(elsewhere, "b", location=ELSEWHERE)

    run(artifacts=store.url, lfs=elsewhere.url)

    assert (store.keys(), elsewhere.keys()) == ({"b"}, set())


# Bad entries


@pytest.mark.parametrize(
    "member",
    [
        "no colon at all",
        "artifacts:",
        ":path",
        "artifacts:..",
        "artifacts:../../etc/passwd",
        "artifacts:a/./b",
        "artifacts:a//b",
        "artifacts:/a",
        "artifacts:a/",
        f"artifacts:{sentinel.NAME}",
        f"artifacts:a/{sentinel.NAME}",
        "artifacts:a\x00b",
        "artifacts:a#1",
        f"artifacts:{'a' * 2000}",
        b"artifacts:\xff",
    ],
)
def test_an_entry_that_no_object_can_bear_is_failed_at_once_and_the_rest_goes_on(store, member):
    register_members(member, age=STALE + 60)
    begin(store, "good")

    outcome = run(artifacts=store.url)

    text = member.decode(errors="surrogateescape") if isinstance(member, bytes) else member
    assert (outcome, store.keys()) == (Outcome(2, 1, False, 1), set())
    assert (members(uploads.PENDING), members(uploads.DELETING), members(uploads.FAILED)) == (set(), set(), {text})


def test_an_unknown_location_costs_each_of_its_entries_an_attempt_and_the_others_go_on(store):
    register("a", "b", location="unknown", age=STALE + 60)
    begin(store, "good")

    outcome = run(artifacts=store.url)

    assert (outcome, store.keys()) == (Outcome(3, 1, False, 2), set())
    assert attempts() == {"unknown:a": 1, "unknown:b": 1}


def test_one_object_that_cannot_be_deleted_costs_an_attempt_and_keeps_no_other(s3):
    paths = numbered(20)
    begin(s3, *paths)
    s3.proxy.refuse_key(paths[3], "AccessDenied")

    outcome = run(artifacts=s3.url)

    assert (outcome, s3.keys()) == (Outcome(20, 19, False, 1), {paths[3]})
    assert attempts() == {f"artifacts:{paths[3]}": 1}


# Stores that are away


def test_a_store_that_is_away_costs_no_attempt_and_stops_no_other(store, elsewhere):
    begin(store, "a", "b", age=STALE + 60)
    begin(elsewhere, "c", location=ELSEWHERE)

    outcome, sentence = fail(artifacts=away(store), lfs=elsewhere.url)

    assert sentence.startswith("artifacts: ")
    assert (outcome, elsewhere.keys(), attempts()) == (Outcome(3, 1, False, 0), set(), {})
    assert (store.keys(), registered()) == ({"a", "b"}, {"artifacts:a", "artifacts:b"})


def test_without_its_sentinel_a_store_loses_nothing(store):
    begin(store, "a", "b")
    store.remove_sentinel()

    with capture_logs() as logs:
        outcome, _ = fail(artifacts=store.url)

    assert (outcome, store.keys(), attempts()) == (Outcome(2, 0, False, 0), {"a", "b"}, {})
    assert registered() == {"artifacts:a", "artifacts:b"}
    assert [line["event"] for line in logs] == ["object store unavailable"]
    # What is to go is remembered before it goes.
    assert SettledUpload.named(HERE, ["a", "b"], reaped=True) == {"a", "b"}


# Claims and deadlines


def test_a_worker_that_was_paused_for_longer_than_its_claim_deletes_nothing(store):
    begin(store, "a")
    clock = StandingClock(MAX_EXEC_DURATION)
    deadline = Deadline(MAX_EXEC_DURATION, clock=clock, safe_point=clock.go_on)
    settings = settings_with(object_stores={HERE: store.url}, upload_visibility=5 * SECOND)
    arm(Failpoints({"stale_direct_uploads.claimed": Fault("sleep", seconds=1.1)}))
    try:
        outcome = perform(BATCH, deadline=deadline, settings=settings)
    finally:
        arm(Failpoints())

    assert (outcome, store.keys(), attempts()) == (Outcome(1, execution_timeout=True), {"a"}, {})


def test_at_the_deadline_a_run_says_so_and_leaves_the_rest(s3):
    register(*numbered(CHUNK + 1))
    clock = StandingClock(MAX_EXEC_DURATION)
    deadline = Deadline(MAX_EXEC_DURATION, clock=clock, safe_point=clock.go_on)

    assert run(deadline, artifacts=s3.url) == Outcome(CHUNK + 1, CHUNK, True, 0)
    assert run(artifacts=s3.url) == Outcome(1, 1, False, 0)
