"""Batch 58 against a real PostgreSQL and Redis, and bare repositories on this machine's disk."""

import sys
from contextlib import suppress
from datetime import timedelta

import peewee as pw
import pytest
from structlog.testing import capture_logs

from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination.leases import LeaseLost, break_lease, list_leases
from forgekeeper.platform.database import now
from models import DeletionStatus, GitRefDeletion, Project
from tests.harness.clocks import Crash, clock, crash
from tests.harness.git_samples import BareRepository, replace_git
from tests.harness.leases import hold_lease
from tests.harness.ref_deletions import PROJECT, ProjectOutcome, count_git_commands, lock, pending, row, rows, statuses
from tests.harness.tables import before_each

PENDING, PROCESSED, REJECTED = DeletionStatus
ELSEWHERE = "1" * 40
LONG = "refs/" + "x" * 1_020

pytestmark = pytest.mark.usefixtures("database")


def test_a_child_deletes_the_refs_and_marks_the_rows_processed(child, repository):
    rows("refs/mr/1", "refs/mr/3")
    before = now()

    done = child()

    assert (done.outcome, done.has_more_work) == (ProjectOutcome(2, 0, "drained"), False)
    assert {name for name in repository.refs() if name.startswith("refs/mr/")} == {
        "refs/mr/2",
        "refs/mr/4",
        "refs/mr/5",
        "refs/mr/6",
    }
    assert statuses() == {"refs/mr/1": PROCESSED, "refs/mr/3": PROCESSED}
    assert all(before <= one.processed_at <= now() for one in GitRefDeletion.select())


def test_a_child_touches_no_other_project(child, root, repository):
    other = BareRepository(root, "group/other.git")
    other.packed("refs/mr/1")
    Project.create(id=8, disk_path=other.disk_path)
    row("refs/mr/1", project=8)
    row("refs/mr/2")

    child()

    assert ("refs/mr/1" in other.refs(), "refs/mr/1" in repository.refs(), pending()) == (True, True, {"refs/mr/1"})


def test_the_same_ref_twice_goes_once_and_both_rows_are_processed(child, repository):
    rows("refs/mr/1", "refs/mr/2", "refs/mr/1")

    outcome = child().outcome

    assert outcome == ProjectOutcome(3, 0, "drained")
    assert statuses() == {"refs/mr/1": [PROCESSED, PROCESSED], "refs/mr/2": PROCESSED}


def test_a_ref_that_has_moved_from_its_expected_oid_stays_and_its_row_says_so(child, repository):
    moved = row("refs/mr/1", expected_oid=ELSEWHERE)
    row("refs/mr/2")

    outcome = child().outcome

    fact = GitRefDeletion.get_by_id(moved)
    assert (outcome, fact.status, fact.reason) == (ProjectOutcome(1, 1, "drained"), REJECTED, "moved")
    assert {"refs/mr/1", "refs/mr/2"} & set(repository.refs()) == {"refs/mr/1"}


BAD = {
    "HEAD": "not_under_refs",
    "": "not_under_refs",
    "heads/main": "not_under_refs",
    "refs/a..b": "invalid_name",
    "refs/mr/4\ndelete refs/mr/5": "invalid_name",
    LONG: "too_long",
    "refs/heads/main": "default_branch",
}


def test_bad_rows_are_rejected_with_their_reasons_and_the_others_go_in_one_transaction(
    child, repository, tmp_path, monkeypatch
):
    rows("refs/mr/1", *BAD, "refs/mr/2")
    row("refs/mr/3", expected_oid=ELSEWHERE)
    calls = count_git_commands(tmp_path, monkeypatch)

    outcome = child().outcome

    assert outcome == ProjectOutcome(2, len(BAD) + 1, "drained")
    rejected = {one.ref: one.reason for one in GitRefDeletion.select_rejected()}
    assert rejected == BAD | {"refs/mr/3": "moved"}
    assert (calls("update-ref"), pending()) == (1, set())
    left = repository.refs()
    assert [f"refs/mr/{number}" in left for number in range(1, 7)] == [False, False, True, True, True, True]
    assert (repository.path / "HEAD").read_text() == "ref: refs/heads/main\n"


def test_one_ref_that_is_locked_for_ever_does_not_block_its_project(child, repository):
    rows("refs/mr/1", "refs/mr/2", "refs/mr/3")
    lock(repository, "refs/mr/2")

    with capture_logs() as lines:
        outcome = child().outcome

    assert (outcome, pending()) == (ProjectOutcome(2, 0, "drained"), {"refs/mr/2"})
    assert ("refs/mr/2" in repository.refs(), (repository.path / "refs/mr/2.lock").exists()) == (True, True)
    (line,) = [line for line in lines if line["event"] == "refs locked"]
    assert (line["log_level"], line["project_id"], line["refs"], line["first"]) == ("warning", PROJECT, 1, "refs/mr/2")
    assert line["reason"].startswith("another process holds the lock of the ref")


@pytest.mark.usefixtures("small_limits")
def test_a_child_that_comes_to_its_maximum_leaves_a_successor_who_finishes(child, repository):
    rows(*(f"refs/mr/{number}" for number in range(1, 6)))

    first, second = child(), child()

    assert (first.outcome, first.has_more_work) == (ProjectOutcome(3, 0, "max_deletes"), True)
    assert (second.outcome, second.has_more_work) == (ProjectOutcome(2, 0, "drained"), False)
    assert pending() == set()


# Leases and crashes


def failing_updates():
    """Let PostgreSQL refuse to close any row."""
    return before_each("update", "batched_git_ref_updates_deletions", "raise exception 'spoilt'")


def test_a_busy_lease_is_not_reported_as_a_failure(child, repository):
    row("refs/mr/1")

    with (
        hold_lease(client, f"clean_project_refs:{PROJECT}", ttl=timedelta(seconds=15), holder="another"),
        capture_logs() as lines,
    ):
        done = child()

    assert (done.outcome, done.has_more_work) == (ProjectOutcome(0, 0, "lease_held"), False)
    assert {line["log_level"] for line in lines} <= {"debug", "info"}
    assert (pending(), "refs/mr/1" in repository.refs()) == ({"refs/mr/1"}, True)


@pytest.mark.usefixtures("small_limits")
def test_a_child_that_has_lost_its_lease_consumes_nothing_more(clean, repository):
    rows("refs/mr/1", "refs/mr/2", "refs/mr/3", "refs/mr/4")
    lock(repository, "refs/mr/1")

    with pytest.raises(LeaseLost):
        clean(safe_point=lambda: break_lease(client, f"clean_project_refs:{PROJECT}"))

    assert pending() == {"refs/mr/1", "refs/mr/4"}
    assert "refs/mr/4" in repository.refs()


def test_a_crash_between_git_and_table_repeats_a_harmless_deletion(child, repository):
    rows("refs/mr/1", "HEAD", "refs/gone", "refs/mr/2")
    row("refs/mr/3", expected_oid=ELSEWHERE)
    with failing_updates(), pytest.raises(pw.InternalError):
        child()
    assert not {"refs/mr/1", "refs/mr/2"} & set(repository.refs())
    assert len(pending()) == 5

    outcome = child().outcome

    assert outcome == ProjectOutcome(3, 2, "drained")
    assert statuses() == {
        "refs/mr/1": PROCESSED,
        "HEAD": REJECTED,
        "refs/gone": PROCESSED,
        "refs/mr/2": PROCESSED,
        "refs/mr/3": REJECTED,
    }
    assert {f"refs/mr/{number}" for number in range(3, 7)} <= set(repository.refs())


def test_a_ref_that_was_made_anew_after_a_crash_survives_where_its_row_says_what_it_was(child, repository):
    row("refs/mr/1", expected_oid=repository.one)
    with failing_updates(), pytest.raises(pw.InternalError):
        child()
    repository.git("update-ref", "refs/mr/1", repository.two)

    outcome = child().outcome

    assert (outcome, repository.refs()["refs/mr/1"]) == (ProjectOutcome(0, 1, "drained"), repository.two)


CLOSE = """
import sys, psycopg2
with psycopg2.connect(sys.argv[1]) as somebody, somebody.cursor() as cursor:
    cursor.execute("update batched_git_ref_updates_deletions set status = 3, reason = 'by hand' where ref = 'refs/mr/2'")
"""


def test_a_row_that_somebody_closes_while_git_is_at_work_stays_as_it_is_and_is_not_counted(
    clean, repository, urls, tmp_path, monkeypatch
):
    mine, theirs = rows("refs/mr/1", "refs/mr/2")
    (tmp_path / "close.py").write_text(CLOSE)
    close = f"{sys.executable} {tmp_path}/close.py '{urls.database}'"
    replace_git(tmp_path / "bin", monkeypatch, f'case "$*" in *update-ref*) {close};; esac\nexec $GIT "$@"')

    assert clean() == ProjectOutcome(1, 0, "drained")
    assert (GitRefDeletion.get_by_id(mine).status, GitRefDeletion.get_by_id(theirs).reason) == (PROCESSED, "by hand")


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("way", [{}, {"clock": clock(400.0)}, {"safe_point": crash}], ids=["end", "late", "crash"])
def test_the_lease_is_free_after_every_way_out(clean, repository, way):
    rows("refs/mr/1", "refs/mr/2", "refs/mr/3", "refs/mr/4")

    with suppress(Crash):
        clean(**way)

    assert list_leases(client) == []
