"""Prune against real records in PostgreSQL."""

from datetime import timedelta

import pytest
from playhouse.postgres_ext import DateTimeTZField
from structlog.testing import capture_logs

from forgekeeper import Rows, batch
from forgekeeper.api.batches import BATCHES
from forgekeeper.guards.deadline import Deadline
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.holds import Batch
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.limits import KEPT_RUNS_PER_BATCH, RunTotal
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform.database import Base, database, now
from forgekeeper.platform.database.exclusions import Exclusion
from models import GitRefDeletion
from tests.harness.excluding import exclude
from tests.harness.performing import perform
from workers.prune import MAX_RUNTIME, prune

CHUNK = 1_000
Outcome = prune.outcome
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)

PROCESS_MANY = """
    insert into batched_git_ref_updates_deletions (project_id, ref, status, processed_at)
    select 1, 'refs/old/' || number, 2, now() - interval '2 days' from generate_series(1, %s) as number
"""

pytestmark = pytest.mark.usefixtures("database")


def closed_run(state="succeeded", *, finished_at, batch="user_status_cleanup"):
    return JobRun.create(batch=batch, state=state, finished_at=finished_at).id


def refs():
    return {row.ref for row in GitRefDeletion.select()}


def runs():
    return {row.id for row in JobRun.select()}


def time_runs_out_after_a_chunk():
    """Tell a monotonic clock's time: it stands still until ref deletions have gone."""
    return 0.0 if len(refs()) > CHUNK else MAX_RUNTIME.total_seconds()


def run(**options):
    return perform(prune, deadline=Deadline(MAX_RUNTIME, **options))


def test_exclusions_go_thirty_days_after_their_end_and_never_while_they_stand():
    for ago in (31, 29):
        exclude(f"project:{ago}", ended=ago * DAY)
    exclude("project:1")

    outcome = run()

    assert (outcome.exclusions, {row.number for row in Exclusion.select()}) == (1, {29, 1})


def test_the_newest_run_of_each_batch_stays_however_old():
    for name in ("user_status_cleanup", "prune"):
        closed_run(batch=name, finished_at=now() - 50 * DAY)
    kept = {closed_run(batch=name, finished_at=now() - 40 * DAY) for name in ("user_status_cleanup", "prune")}

    outcome = run()

    assert (outcome.runs, runs()) == (2, kept)


class Visit(Base):
    """A row of an operator's own batch."""

    seen_at = DateTimeTZField()


@pytest.fixture
def visits(database):
    """Declare a batch whose rows go after a day, and keep some of them."""

    @batch(cron="off", budget=DAY, time_limit=DAY, outcome=Outcome)
    def count_visits(now):
        """Count visits."""
        return []

    @count_visits.old_records
    def old_visits(now):
        return Rows(Visit, since=Visit.seen_at, older_than=DAY)

    database.create_tables([Visit])
    Visit.insert_many([{"seen_at": now() - DAY + each * MINUTE} for each in (-2, -1, 1)]).execute()
    yield
    database.drop_tables([Visit])
    del BATCHES["count_visits"]


def left():
    return {visit.id for visit in Visit.select()}


@pytest.mark.usefixtures("visits")
def test_rows_that_a_batch_declares_go_when_they_are_old_and_one_that_cannot_stops_no_other():
    database.execute_sql("create table holding (visit bigint references visit); insert into holding values (1)")
    try:
        with capture_logs() as lines:
            outcome = run()
    finally:
        database.execute_sql("drop table holding")

    assert (outcome, left(), [row.key for row in Quarantined.select()]) == (Outcome(), {1, 3}, ["1"])
    assert {"event": "old records removed", "log_level": "info", "record": "visit", "records": 1} in lines


def process(pid, *, silent_for):
    """A worker that has not been heard of since it counts as silent for that long."""
    Process.record_heartbeat(
        None, kind="worker", host="forge-1", pid=pid, version="1", dead_after=-silent_for, facts={}
    )
    return pid


def test_a_process_goes_a_day_after_it_fell_silent():
    process(1, silent_for=DAY + MINUTE)
    young, alive = process(2, silent_for=DAY - MINUTE), process(3, silent_for=-MINUTE)

    outcome = run()

    assert (outcome, {one.pid for one in Process.list_all()}) == (Outcome(processes=1), {young, alive})


def test_a_run_ends_at_its_deadline_after_a_chunk():
    database.execute_sql(PROCESS_MANY, (CHUNK + 1,))
    closed_run(finished_at=now() - 40 * DAY)
    closed_run(finished_at=now() - 40 * DAY)

    outcome = run(clock=time_runs_out_after_a_chunk)

    assert (outcome, len(refs()), len(runs())) == (Outcome(ref_deletions=CHUNK, stopped="deadline"), 1, 2)


def test_totals_go_after_sixty_days_but_the_last_hundred_runs():
    Batch.register(["prune"])
    days = dict.fromkeys(range(1, KEPT_RUNS_PER_BATCH + 11), 61) | {KEPT_RUNS_PER_BATCH + 11: 1}
    rows = [{"batch": "prune", "run": run, "day": now() - age * DAY, "records": 5} for run, age in days.items()]
    RunTotal.insert_many(rows).execute()

    outcome = run()

    assert (outcome.run_totals, {row.run for row in RunTotal.select()}) == (
        11,
        set(range(12, KEPT_RUNS_PER_BATCH + 12)),
    )
