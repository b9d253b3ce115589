"""The children of a message share a thread, leases and reads; each has a result, a quarantine and an audit of its own."""

from datetime import timedelta

import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from forgekeeper.engine import message_attempt
from forgekeeper.engine.message_attempt import MessageAttempt
from forgekeeper.guards import run_guard
from forgekeeper.ledger.quarantine import Quarantined, record_failure
from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination.leases import list_leases
from forgekeeper.platform.database import database
from models import GitRefDeletion, Project
from tests.harness.git_samples import BareRepository
from tests.harness.leases import hold_lease
from tests.harness.performing import runner_of
from tests.harness.ref_deletions import row
from tests.harness.settings import settings_with
from tests.harness.tables import before_each
from workers.git_ref_cleanup import clean_project_refs

REF = "refs/mr/1"
PROJECTS = (1, 2, 3)
STOP = "insert into holds (batch, kind, reason, by) values ('git_ref_cleanup', 'stop', 'test', 'test')"
EXCLUDE_THIRD = """
    insert into exclusions (kind, subject, number, reason, by, since)
    values ('project', '3', 3, 'test', 'test', clock_timestamp())
"""
MOVE_THIRD = "update projects set disk_path = 'elsewhere.git' where id = 3"
MAKE_SECOND_UNREADABLE = """
    alter table batched_git_ref_updates_deletions rename to real_rows;
    create view batched_git_ref_updates_deletions as
        select id, project_id, ref, expected_oid, status, reason, updated_at, processed_at,
            case when project_id = 2 then to_timestamp(1 / (project_id - 2)) else created_at end as created_at
        from real_rows
"""
MAKE_READABLE = """
    drop view batched_git_ref_updates_deletions;
    alter table real_rows rename to batched_git_ref_updates_deletions
"""
FAIL_SECOND = "if old.project_id = 2 and new.status = 2 then raise exception 'spoilt'; end if"

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def repositories(root):
    """The repositories of three projects, each with a pending row for its packed ref."""
    made = {}
    for number in PROJECTS:
        made[number] = BareRepository(root, f"group/{number}.git")
        made[number].packed(REF)
        Project.create(id=number, disk_path=made[number].disk_path)
        row(REF, project=number)
    return made


@pytest.fixture
def work(root):
    """Work on a message with a child for each project, as a worker does; return the log lines and the successors."""

    def work(*projects, **settings):
        calls = [(f"clean_project_refs:{number}", (number,)) for number in projects or PROJECTS]
        with (
            runner_of(settings_with(repositories_root=root, **settings)) as runner,
            capture_logs(processors=[merge_contextvars]) as lines,
        ):
            attempt = MessageAttempt(runner, clean_project_refs, calls, run_number=7)
            attempt.work_if_allowed()
            attempt.close(None)
        return lines, attempt.successors

    return work


def waiting_projects():
    return {one.project_id for one in GitRefDeletion.select_pending()}


def results(lines):
    """Return what each child has deleted, by its key."""
    return {line["message_id"]: line["total_deletes"] for line in lines if line["event"] == "child finished"}


def test_each_child_has_a_result_and_an_audit_of_its_own(work, repositories):
    lines, _ = work()

    assert results(lines) == {f"clean_project_refs:{number}": 1 for number in PROJECTS}
    audited = database.execute_sql("select child, scope, run from audit_deletions where phase = 'intent' order by 2")
    assert audited.fetchall() == [(f"clean_project_refs:{number}", str(number), 7) for number in PROJECTS]
    assert (waiting_projects(), list_leases(client)) == (set(), [])
    assert not any(REF in one.refs() for one in repositories.values())


def test_no_child_works_while_another_process_has_its_lease(work, repositories):
    with hold_lease(client, "clean_project_refs:2", ttl=timedelta(seconds=15), holder="another"):
        lines, _ = work()

    assert (waiting_projects(), REF in repositories[2].refs()) == ({2}, True)
    assert [line["stopped"] for line in lines if line["event"].startswith("child f")] == [
        "drained",
        "lease_held",
        "drained",
    ]


def test_a_child_that_fails_is_quarantined_and_stops_no_other(work, repositories):
    with before_each("update", "batched_git_ref_updates_deletions", FAIL_SECOND):
        lines, _ = work()

    assert [line["message_id"] for line in lines if line["event"] == "child failed"] == ["clean_project_refs:2"]
    assert waiting_projects() == {2}
    child = Quarantined.get(Quarantined.record == "clean_project_refs")
    assert (child.key, child.reason) == ("clean_project_refs:2", "child_failed")


def test_an_earlier_failure_is_forgotten_once_its_child_succeeds(work, repositories):
    for number in (1, 8):
        record_failure(
            "git_ref_cleanup", "clean_project_refs", f"clean_project_refs:{number}", "x", reason="child_failed"
        )

    work()

    assert [one.key for one in Quarantined.select()] == ["clean_project_refs:8"]


def test_a_row_that_cannot_be_read_keeps_back_no_other_project(work, repositories):
    database.execute_sql(MAKE_SECOND_UNREADABLE)
    try:
        work()
    finally:
        database.execute_sql(MAKE_READABLE)

    assert waiting_projects() == {2}
    assert [(one.record, one.reason) for one in Quarantined.select()] == [("git_ref_deletion", "record_failed")]


def test_children_that_have_not_begun_in_time_get_a_message_of_their_own(work, repositories, monkeypatch):
    monkeypatch.setattr(message_attempt, "MAX_MESSAGE_TIME", timedelta(0))

    _, successors = work()

    assert waiting_projects() == {2, 3}
    assert successors == [("clean_project_refs:2", (2,)), ("clean_project_refs:3", (3,))]


def test_no_child_begins_after_the_batch_is_stopped(work, repositories, monkeypatch):
    monkeypatch.setattr(run_guard, "GUARD_INTERVAL_SECONDS", 0.0)

    with before_each("update", "batched_git_ref_updates_deletions", STOP):
        lines, successors = work()

    assert waiting_projects() == {2, 3}
    assert successors == []
    assert [line["children"] for line in lines if line["event"] == "children wait for the next run"] == [2]


def test_a_project_that_is_excluded_while_others_are_worked_on_keeps_its_refs(work, repositories):
    with before_each("update", "batched_git_ref_updates_deletions", EXCLUDE_THIRD):
        work()

    assert (waiting_projects(), REF in repositories[3].refs()) == ({3}, True)


def test_a_repository_that_moves_while_others_are_worked_on_keeps_its_refs(work, repositories):
    with before_each("update", "batched_git_ref_updates_deletions", MOVE_THIRD):
        work()

    assert (waiting_projects(), REF in repositories[3].refs()) == ({3}, True)


def test_deletions_of_all_children_are_counted_for_the_day(work, repositories):
    work()

    (counted,) = database.execute_sql("select sum(records) from run_totals where batch = 'git_ref_cleanup'").fetchone()
    assert counted == len(PROJECTS)


def test_the_children_of_a_message_do_not_exceed_a_limit(work, repositories):
    work(max_per_day_git_ref_cleanup=2)

    assert len(waiting_projects()) == 1
