"""What the breaker lets begin, and what it holds."""

from datetime import timedelta

import pytest

from forgekeeper.batches import BATCHES
from forgekeeper.database import database as db
from forgekeeper.database import now
from forgekeeper.runs import breaker
from forgekeeper.runs.breaker import NEXT
from forgekeeper.runs.holds import Held, Hold
from models import UserStatus
from tests.harness.lived import lived
from tests.harness.performing import recorded
from tests.harness.settings import settings_with

STATUSES = BATCHES["user_status_cleanup"]

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
    lived(STATUSES, range(60, 3 * 3600, 60), 10)


def left():
    return UserStatus.select().count()


def test_a_run_in_proportion_begins(database, settings):
    every_minute()
    statuses(due=90, total=200)

    assert recorded(STATUSES, settings).result["deleted"] == 90


def test_a_run_out_of_proportion_does_not_begin_and_its_batch_is_held(database, settings):
    every_minute()
    statuses(due=400, total=500)

    run = recorded(STATUSES, settings)

    assert (run.state, run.reason, left()) == ("skipped", "held", 500)
    (hold,) = Hold.standing(batch=STATUSES.name)
    assert hold.reason == (
        "it would delete 400 of about 500 records (80%), and the largest of its last 100 runs deleted 10: `forgekeeper"
        " run user_status_cleanup --dry-run` shows what, `forgekeeper release user_status_cleanup --reason REASON` lets"
        " it go"
    )


def test_a_small_share_of_the_table_may_go(database, settings):
    every_minute()
    statuses(due=400, total=2_000)

    assert recorded(STATUSES, settings).result["deleted"] == 400


def test_an_update_of_all_rows_does_not_hide_what_share_of_them_is_due(database, settings):
    statuses(due=4_500, total=10_000)
    db.execute_sql("analyze user_statuses")
    UserStatus.update(emoji="sheep").execute()

    run = recorded(STATUSES, settings)

    assert (run.reason, left()) == ("held", 10_000)
    assert "4,500 of about 10,000 records (45%)" in Hold.get().reason


def test_ten_times_the_largest_run_is_an_ordinary_one_and_one_more_is_held(database, settings):
    every_minute()
    statuses(due=100, total=100)
    assert recorded(STATUSES, settings).ordinary is True
    db.execute_sql("delete from run_totals where records > 10")
    statuses(due=10 * 10 + 1, total=101)

    assert judged(settings).ordinary is False


def judged(settings):
    return breaker.judge(STATUSES, settings, NEXT, now(), released=False)


# Releases


def released(expect=None):
    """Let a run be held, and release it."""
    recorded(STATUSES, settings_with())
    assert breaker.release(STATUSES.name, reason="I looked", by="me", expect=expect)


def deleted_by(*runs):
    return [run.result.get("deleted") for run in runs]


def test_a_release_lets_no_more_go_than_its_amount(database, settings):
    statuses(due=400, total=500)
    released(expect=150)

    run = recorded(STATUSES, settings)

    assert (run.result["deleted"], run.result["stopped"]) == (150, "max_per_run")


def test_all_runs_of_a_release_have_its_amount_together(database, settings):
    statuses(due=9_000, total=9_100)
    released(expect=1_500)
    capped = settings_with(max_per_run_user_status_cleanup=700)

    runs = [recorded(STATUSES, capped) for _ in range(3)]

    assert deleted_by(*runs) == [700, 700, 100]


def test_the_first_run_after_a_release_has_no_more_than_its_amount_though_it_is_an_ordinary_one(database, settings):
    statuses(due=400, total=500)
    released(expect=20)
    UserStatus.delete().where(UserStatus.user_id > 40).execute()

    assert deleted_by(recorded(STATUSES, settings), recorded(STATUSES, settings)) == [20, 20]


@pytest.mark.parametrize("expect", [None, 9_000])
def test_a_release_ends_with_the_first_ordinary_run_that_had_no_need_of_it(database, settings, expect):
    statuses(due=400, total=500)
    released(expect=expect)
    UserStatus.delete().execute()  # it was a mistake, and is corrected
    recorded(STATUSES, settings)
    statuses(due=9_000, total=9_100)

    assert recorded(STATUSES, settings).reason == "held"


# What cannot be had in time


def test_what_cannot_be_counted_in_time_is_taken_for_too_much(database, settings, monkeypatch):
    monkeypatch.setattr(breaker, "PATIENCE", timedelta(milliseconds=1))
    statuses(due=40_000, total=50_000)
    db.execute_sql("alter table user_statuses rename to real_statuses")
    db.execute_sql("create view user_statuses as select * from real_statuses where pg_sleep(0.001) is not null")
    try:
        with pytest.raises(Held, match="more than can be counted in 0"):
            breaker.ask(STATUSES, settings, 1, now())
    finally:
        db.execute_sql("drop view user_statuses")
        db.execute_sql("alter table real_statuses rename to user_statuses")
