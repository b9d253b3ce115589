"""Six mistakes: what each would have deleted, and what it deletes until the brake holds."""

from datetime import timedelta
from types import SimpleNamespace
from uuid import uuid4

import peewee as pw
import pytest

from forgekeeper.batches import BATCHES, CHILDREN
from forgekeeper.database import database as db
from forgekeeper.database import now
from forgekeeper.database.installation import Installation
from forgekeeper.database.writes import writing
from forgekeeper.declaring.flags import FeatureFlag
from forgekeeper.installation import agreement
from forgekeeper.runs import releases
from forgekeeper.runs.counting import Growth
from forgekeeper.runs.holds import BRAKES, Hold
from forgekeeper.runs.totals import RunTotal
from forgekeeper.storage import sentinel
from forgekeeper.storage.outbox import DeletedObject
from models import JobArtifact, UserStatus
from tests.harness.installation import INSTALLATION
from tests.harness.performing import as_child, recorded
from tests.harness.settings import settings_with
from tests.harness.thorough import WHOLE
from workers.expired_job_artifacts import FLAG

STATUSES, ARTIFACTS, OBJECTS = (
    BATCHES[name] for name in ("user_status_cleanup", "expired_job_artifacts", "delete_objects")
)
CHILD = CHILDREN["delete_artifact_bucket"]
MANY = 1_000_000 if WHOLE else 10_000
FEW = MANY // 5
DAY = timedelta(days=1)
CAP = 1_000

STATUS_ROWS = """
    insert into user_statuses (user_id, clear_status_at)
    select n, clock_timestamp() + interval '1 hour' + n * interval '1 ms' from generate_series(1, %(total)s) as n
"""
ARTIFACT_ROWS = """
    insert into ci_job_artifacts (project_id, job_id, file_type, file, file_final_path, size, created_at, expire_at, locked)
    select 1 + n %% 7, n, 1, 'a.zip', 'a/' || n, 100, made, made + interval '90 days', 0
    from generate_series(1, %(total)s) as n,
        lateral (select clock_timestamp() - n * interval '89 days' / %(total)s as made) as times
"""
OUTBOX_ROWS = (
    "insert into ci_deleted_objects (store_dir, file) select 'a', n::text from generate_series(1, %(total)s) as n"
)
LIVED = """
    with runs as (
        insert into job_runs (batch, state, started_at, finished_at, claimed_at, ordinary, result)
        select %(batch)s, 'succeeded', at, at, at, true, '{}' from generate_series(
            clock_timestamp() - interval '3 days', clock_timestamp() - interval '5 minutes', interval '5 minutes') as at
        returning id, started_at
    )
    insert into run_totals (batch, run, day, records) select %(batch)s, id, started_at::date, 3 from runs
"""


@pytest.fixture(autouse=True)
def at_work(database, monkeypatch):
    """The settings that an operator has who set none of the brakes."""
    monkeypatch.delenv("FORGEKEEPER_BREAKER_SHARE")
    agreement.agree()


def lived(batch):
    db.execute_sql(LIVED, {"batch": batch.name})


def statuses():
    db.execute_sql(STATUS_ROWS, {"total": MANY})
    db.execute_sql("analyze user_statuses")
    lived(STATUSES)


def artifacts(total=FEW):
    db.execute_sql(ARTIFACT_ROWS, {"total": total})
    db.execute_sql("analyze ci_job_artifacts")
    FeatureFlag.turn(FLAG, on=True)


def run(batch, given):
    """Run the batch with its children, until it has nothing to do or is held back."""
    row = recorded(batch, given)
    for number in range((row.result or {}).get("children_enqueued", 0)):
        while as_child(CHILD, given, message_id=str(number)).more:
            pass
    return row


def tell(mistake, before, after, said):
    print(f"\n{mistake}: {before:,} would have gone, {after:,} went; {said}")  # noqa: T201, what `pytest -s` shows


def held(mistake, batch, count, *, given=None):
    """Let the mistake meet the brake, then nothing; return how many that deleted, of how many."""
    there = count()
    row = run(batch, given or settings_with())
    again = run_if_allowed(batch, given or settings_with())
    after = there - count()
    unheld(batch)
    run(batch, settings_with(breaker_share=1))
    tell(mistake, there - after - count(), after, f"{row.state}, {row.reason or row.result.get('stopped')}")
    return SimpleNamespace(row=row, after=after, before=there - after - count(), again=again)


def run_if_allowed(batch, given):
    return None if Hold.why(batch.name) else run(batch, given)


def unheld(batch):
    Hold.lift(batch.name, BRAKES)


def test_a_bad_import_makes_all_statuses_expire(database):
    statuses()
    UserStatus.update(clear_status_at=now() - DAY).where(pw.fn.mod(UserStatus.user_id, 10) != 0).execute()

    found = held("a bad import", STATUSES, lambda: UserStatus.select().count())

    assert (found.row.reason, found.after, found.again) == ("held", 0, None)
    assert found.before > MANY // 2 or WHOLE  # before, as far as one run comes


def test_a_bad_import_while_a_run_is_at_work_costs_one_cap(database, monkeypatch):
    statuses()
    UserStatus.update(clear_status_at=now() - DAY).where(UserStatus.user_id <= 100).execute()
    given = settings_with(max_per_run_user_status_cleanup=CAP, max_per_day_user_status_cleanup=CAP)
    told = []

    def count(growth, real=Growth.count):
        real(growth)
        if UserStatus.select().count() < MANY and not told:
            with writing():
                told.append(UserStatus.update(clear_status_at=now() - DAY / 2).execute())

    monkeypatch.setattr(Growth, "count", count)
    row = recorded(STATUSES, given)

    assert told == [MANY - 100]
    assert MANY - UserStatus.select().count() <= CAP
    tell("a bad import during a run", MANY, MANY - UserStatus.select().count(), row.result["stopped"])


def test_a_flag_is_switched_on_with_ninety_percent_due(database):
    artifacts()
    JobArtifact.update(expire_at=now() - DAY).where(pw.fn.mod(JobArtifact.id, 10) != 0).execute()

    found = held("a flag switched on", ARTIFACTS, lambda: JobArtifact.select().count())

    assert (found.row.reason, found.after, found.again) == ("held", 0, None)
    assert found.before == FEW * 9 // 10


def test_a_retention_is_changed_from_ninety_days_to_nine(database):
    artifacts()
    lived(ARTIFACTS)
    db.execute_sql("update ci_job_artifacts set expire_at = created_at + interval '9 days'")

    found = held("a retention of 9 days", ARTIFACTS, lambda: JobArtifact.select().count())

    assert (found.row.reason, found.after, found.again) == ("held", 0, None)
    assert found.before > FEW * 8 // 10


def test_a_retention_is_changed_while_children_work_they_end_when_the_next_run_is_held(database):
    artifacts()
    lived(ARTIFACTS)
    recorded(ARTIFACTS, settings_with())  # its children wait
    db.execute_sql("update ci_job_artifacts set expire_at = created_at + interval '9 days'")

    assert recorded(ARTIFACTS, settings_with()).reason == "held"

    assert as_child(CHILD, settings_with()).skipped == "held"
    assert JobArtifact.select().count() == FEW


def test_children_that_earlier_runs_have_left_delete_no_more_than_was_released(database):
    artifacts()
    lived(ARTIFACTS)
    first = recorded(ARTIFACTS, settings_with())  # its children wait
    db.execute_sql("update ci_job_artifacts set expire_at = created_at + interval '9 days'")
    recorded(ARTIFACTS, settings_with())
    assert releases.give(ARTIFACTS.name, reason="a hundred, to see", by="me", expect=100)

    assert as_child(CHILD, settings_with(), run=first.id).skipped == "held"  # until a run has begun
    newest = recorded(ARTIFACTS, settings_with())
    outcomes = [as_child(CHILD, settings_with(), run=run).outcome for run in 3 * [first.id, newest.id]]

    assert sum(outcome.destroyed for outcome in outcomes) == 100
    assert JobArtifact.select().count() == FEW - 100


def test_the_clock_is_a_day_ahead(database, ahead):
    statuses()
    before = UserStatus.due(now() + DAY).count()

    ahead(DAY)
    db.execute_sql("set search_path = public, shifted, pg_catalog")
    row = recorded(STATUSES, settings_with())
    db.execute_sql("reset search_path")

    assert (row.state, row.reason, UserStatus.select().count()) == ("blocked", "clocks", MANY)
    tell("the clock a day ahead", before, 0, "blocked, clocks")


def test_the_database_is_another_one(database):
    statuses()
    UserStatus.update(clear_status_at=now() - DAY).execute()
    Installation.update(id=uuid4()).execute()  # and Redis knows the right one
    try:
        row = recorded(STATUSES, settings_with())
    finally:
        Installation.update(id=INSTALLATION).execute()

    assert (row.state, row.reason, UserStatus.select().count()) == ("blocked", "installation", MANY)
    tell("the wrong database", MANY, 0, "blocked, installation")


def test_the_bucket_is_somebody_elses(database, tmp_path):
    db.execute_sql(OUTBOX_ROWS, {"total": FEW})
    (tmp_path / "a").mkdir()
    for number in range(1, FEW + 1) if not WHOLE else range(1, 2_001):
        (tmp_path / "a" / str(number)).touch()
    sentinel.Folder(tmp_path).create_sentinel(str(uuid4()))
    there = sum(1 for _ in (tmp_path / "a").iterdir())
    given = settings_with(object_stores={"artifacts": tmp_path.as_uri()}, breaker_share=1)

    row = recorded(OBJECTS, given)

    assert (row.state, row.reason) == ("blocked", "installation")
    assert sum(1 for _ in (tmp_path / "a").iterdir()) == there
    assert DeletedObject.select().count() == FEW
    tell("somebody else's bucket", there, 0, "blocked, installation")


def test_with_a_limit_a_mistake_that_the_breaker_cannot_see_costs_no_more_than_one_a_day(database):
    statuses()
    UserStatus.update(clear_status_at=now() - DAY).execute()
    given = settings_with(max_per_day_user_status_cleanup=CAP, breaker_share=1)
    RunTotal.delete().execute()  # those runs were another day

    for _ in range(4):
        recorded(STATUSES, given)

    assert MANY - UserStatus.select().count() == CAP
