"""What the breaker lets begin and what it holds, whatever mistake made it; what a release lets go, and beside what."""

import threading
from datetime import timedelta

import peewee as pw
import pytest

from forgekeeper.api.batches import BATCHES, FeatureFlag
from forgekeeper.guards import breaker
from forgekeeper.guards.breaker import NEXT_RUN
from forgekeeper.ledger.holds import Batch, BatchHeld, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import process_identity
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now
from models import UserStatus
from tests.harness.past_runs import add_past_runs
from tests.harness.performing import run_as_worker
from tests.harness.programs import eventually
from tests.harness.settings import settings_with
from tests.harness.tables import somebody_waits_for_a_lock, wait_for_locks
from workers.expired_job_artifacts import FLAG

STATUSES, ARTIFACTS = BATCHES["user_status_cleanup"], BATCHES["expired_job_artifacts"]
DAY = timedelta(days=1)

STATUS_ROWS = """
    insert into user_statuses (user_id, clear_status_at)
    select first + n, clock_timestamp() + case when n < %(due)s then interval '-1 s' else interval '1 day' end
    from (select coalesce(max(user_id), 0) + 1 as first from user_statuses) as present,
        generate_series(0, %(total)s - 1) as n
"""


@pytest.fixture
def settings(settings, monkeypatch):
    monkeypatch.delenv("FORGEKEEPER_BREAKER_SHARE")
    monkeypatch.setenv("FORGEKEEPER_BREAKER_LEAST", "50")
    return settings_with()


def statuses(*, due, total):
    db.execute_sql(STATUS_ROWS, {"due": due, "total": total})


def every_minute():
    add_past_runs(STATUSES, range(60, 3 * 3600, 60), 10)


def left():
    return UserStatus.select().count()


def test_a_run_in_proportion_begins(database, settings):
    every_minute()
    statuses(due=90, total=200)

    assert run_as_worker(STATUSES, settings).result["deleted"] == 90


def test_a_run_out_of_proportion_does_not_begin_and_its_batch_is_held(database, settings):
    every_minute()
    statuses(due=400, total=500)

    run = run_as_worker(STATUSES, settings)

    assert (run.state, run.reason, left()) == ("skipped", "held", 500)
    (hold,) = Hold.list_active(batch=STATUSES.name)
    assert hold.reason == (
        "a run would delete 400 of about 500 records (80%), and the largest of the last 100 runs deleted 10: check"
        " `forgekeeper run user_status_cleanup --dry-run`, then `forgekeeper release user_status_cleanup --reason REASON`"
    )


def test_a_small_share_of_the_table_may_go(database, settings):
    every_minute()
    statuses(due=400, total=2_000)

    assert run_as_worker(STATUSES, settings).result["deleted"] == 400


def test_an_update_of_all_rows_does_not_hide_what_share_of_them_is_due(database, settings):
    statuses(due=4_500, total=10_000)
    db.execute_sql("analyze user_statuses")
    UserStatus.update(emoji="sheep").execute()

    run = run_as_worker(STATUSES, settings)

    assert (run.reason, left()) == ("held", 10_000)
    assert "4,500 of about 10,000 records (45%)" in Hold.get().reason


def test_ten_times_the_largest_run_is_an_ordinary_one_and_one_more_is_held(database, settings):
    every_minute()
    statuses(due=100, total=100)
    assert run_as_worker(STATUSES, settings).ordinary is True
    db.execute_sql("delete from run_totals where records > 10")
    statuses(due=10 * 10 + 1, total=101)

    assert judged(settings).ordinary is False


def judged(settings):
    return breaker.judge_run(STATUSES, settings, NEXT_RUN, now(), released=False)


# Releases


def released(expect=None):
    """Let a run be held, and release it."""
    run_as_worker(STATUSES, settings_with())
    assert breaker.release_batch(STATUSES.name, reason="I looked", by="me", expect=expect)


def deleted_by(*runs):
    return [run.result.get("deleted") for run in runs]


def test_a_release_lets_no_more_go_than_its_amount(database, settings):
    statuses(due=400, total=500)
    released(expect=150)

    first, second = run_as_worker(STATUSES, settings), run_as_worker(STATUSES, settings)

    assert (first.result["deleted"], first.result["stopped"]) == (150, "release_used_up")
    # With that it has ended, and what is left is in proportion to what the first run deleted.
    assert second.result["deleted"] == 250


def test_all_runs_of_a_release_have_its_amount_together(database, settings):
    statuses(due=9_000, total=9_100)
    released(expect=1_500)
    capped = settings_with(max_per_run_user_status_cleanup=700)

    runs = [run_as_worker(STATUSES, capped) for _ in range(3)]

    assert deleted_by(*runs) == [700, 700, 100]


def test_the_first_run_after_a_release_has_no_more_than_its_amount_though_it_is_an_ordinary_one(database, settings):
    statuses(due=400, total=500)
    released(expect=20)
    UserStatus.delete().where(UserStatus.user_id > 40).execute()

    assert deleted_by(run_as_worker(STATUSES, settings), run_as_worker(STATUSES, settings)) == [20, 20]


@pytest.mark.parametrize("expect", [None, 9_000])
def test_a_release_ends_with_the_first_ordinary_run_that_had_no_need_of_it(database, settings, expect):
    statuses(due=400, total=500)
    released(expect=expect)
    UserStatus.delete().execute()  # it was a mistake, and is corrected
    run_as_worker(STATUSES, settings)
    statuses(due=9_000, total=9_100)

    assert run_as_worker(STATUSES, settings).reason == "held"


# What cannot be had in time


def test_a_ledger_that_statistics_do_not_know_yet_is_read_once(database):
    add_past_runs(ARTIFACTS, range(60, 120_000, 60), 10)
    db.execute_sql("analyze job_runs, run_totals")
    add_past_runs(STATUSES, range(60, 120_000, 60), 10)

    explain = "explain (analyze, costs off, timing off) " + breaker.SELECT_RATES
    plan = db.execute_sql(explain, {"batch": STATUSES.name, "run": NEXT_RUN, "runs": breaker.COMPARED_RUNS}).fetchall()

    assert not [line for (line,) in plan if "Removed by Join Filter" in line]


def test_what_cannot_be_counted_in_time_is_taken_for_too_much(database, settings, monkeypatch):
    monkeypatch.setattr(breaker, "COUNT_TIME_LIMIT", timedelta(milliseconds=1))
    statuses(due=40_000, total=50_000)
    db.execute_sql("alter table user_statuses rename to real_statuses")
    db.execute_sql("create view user_statuses as select * from real_statuses where pg_sleep(0.001) is not null")
    try:
        with pytest.raises(BatchHeld, match="more than can be counted in 0"):
            breaker.check_run(STATUSES, settings, 1, now())
    finally:
        db.execute_sql("drop view user_statuses")
        db.execute_sql("alter table real_statuses rename to user_statuses")


# A release beside a breaker that looks or holds, or beside another release


def give(by="me", expect=100):
    return breaker.release_batch(STATUSES.name, reason="I looked", by=by, expect=expect)


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


def ended(thread):
    thread.join(30)
    assert not thread.is_alive()


def test_a_release_that_comes_while_the_breaker_looks_releases_nothing(database, settings):
    statuses(due=200, total=200)
    with db.atomic():
        db.execute_sql("lock table user_statuses in access exclusive mode")
        thread, answers = beside(lambda: run_as_worker(STATUSES, settings))
        eventually(somebody_waits_for_a_lock)
        assert give() == []
    ended(thread)

    assert ([run.reason for run in answers], UserStatus.select().count()) == (["held"], 200)
    assert (Hold.find_state(STATUSES.name), breaker.is_released(STATUSES.name)) == ("held", False)


def test_of_two_releases_at_once_one_counts_and_the_other_knows(database, settings):
    statuses(due=200, total=200)
    run_as_worker(STATUSES, settings)
    with db.atomic():
        assert give(by="Anna", expect=10)
        thread, answers = beside(lambda: give(by="Ben", expect=10**6))
        eventually(somebody_waits_for_a_lock)
    ended(thread)

    assert answers == [[]]
    row = Batch.get_by_id(STATUSES.name)
    assert (row.released_by, row.released_expect) == ("Anna", 10)


def test_no_run_starts_before_a_release_is_whole(database, settings):
    statuses(due=200, total=200)
    run_as_worker(STATUSES, settings)
    with db.atomic():
        give(expect=30)
        thread, answers = beside(lambda: JobRun.start_here(STATUSES.name, by=process_identity()))
        ended(thread)

    assert answers == [None]
    assert run_as_worker(STATUSES, settings).result["deleted"] == 30


# Mistakes of people, under the settings of an operator who has set no limit

ARTIFACT_ROWS = """
    insert into ci_job_artifacts (project_id, job_id, file_type, file, file_final_path, size, created_at, expire_at, locked)
    select 1 + n %% 7, n, 1, 'a.zip', 'a/' || n, 100, made, made + interval '90 days', 0
    from generate_series(1, 2000) as n, lateral (select clock_timestamp() - n * interval '89 days' / 2000 as made) as times
"""


@pytest.fixture
def at_work(database, settings, monkeypatch):
    """Let two batches have run for days; return settings."""
    monkeypatch.delenv("FORGEKEEPER_BREAKER_LEAST")
    for batch in (STATUSES, ARTIFACTS):
        add_past_runs(batch, range(300, 3 * 86_400, 300), 3)
    return settings_with()


def test_a_bad_import_makes_all_statuses_expire(at_work):
    statuses(due=0, total=10_000)
    db.execute_sql("analyze user_statuses")
    UserStatus.update(clear_status_at=now() - DAY).where(pw.fn.mod(UserStatus.user_id, 10) != 0).execute()

    assert (run_as_worker(STATUSES, at_work).reason, left()) == ("held", 10_000)
    assert JobRun.start_here(STATUSES.name, by="the next tick") is None


def test_a_retention_is_changed_from_ninety_days_to_nine(at_work):
    db.execute_sql(ARTIFACT_ROWS)
    db.execute_sql("analyze ci_job_artifacts")
    FeatureFlag.turn(FLAG, on=True)
    db.execute_sql("update ci_job_artifacts set expire_at = created_at + interval '9 days'")

    row = run_as_worker(ARTIFACTS, at_work)

    assert (row.reason, row.result["children_enqueued"]) == ("held", 0)
    assert Hold.find_state(ARTIFACTS.name) == "held"
