"""What is counted of a run, a child or a record."""

from dataclasses import fields
from datetime import timedelta
from types import SimpleNamespace

import peewee as pw
import pytest
import redis
from dramatiq.middleware import TimeLimitExceeded

from forgekeeper.api.batches import all_declared
from forgekeeper.engine import record_counts
from forgekeeper.engine.record_counts import OutcomeCounter, count_attempt, count_late_start, list_outcome_metrics
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform import shutdown
from forgekeeper.platform.coordination.leases import LeaseLost
from forgekeeper.platform.database import now
from forgekeeper.targets import git_refs, git_repository, objects
from metrics.instruments import WORKER_METRICS
from tests.harness import ref_deletions
from tests.harness.catalogue import METRICS
from tests.harness.every import every
from tests.harness.performing import start_run
from workers import stale_direct_uploads as direct
from workers import user_status_cleanup as statuses

DECLARED = {one.name: one for one in all_declared()}


class Counted:
    """What has been counted since."""

    def __init__(self):
        self._before = self._all()

    def __call__(self, name, *labels):
        metric = METRICS[f"forgekeeper_{name}"]
        key = (metric.name, *sorted(zip(metric.labels, labels, strict=True)))
        return self._all().get(key, 0) - self._before.get(key, 0)

    def _all(self):
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in WORKER_METRICS.registry.collect()
            for sample in family.samples
        }


@pytest.fixture
def counted():
    return Counted()


def end(batch, seconds=1.0, outcome=None, error=None, *, state="succeeded", skipped=None):
    if outcome is not None:
        OutcomeCounter(DECLARED[batch], outcome).count_growth()
    count_attempt(DECLARED[batch], seconds, outcome, error, state=state, skipped=skipped)


@every("declared", DECLARED.values(), name=lambda one: one.name)
def test_every_field_that_is_declared_to_be_counted_is_one_of_the_outcome(declared):
    names = {field.name for field in fields(declared.outcome)}

    found = {name for _, _, counted in list_outcome_metrics(declared) for name in counted}
    limits = {name for limit in declared.thresholds for name in (*limit.found, *limit.done)}

    assert found | limits <= names


def test_all_that_the_catalogue_says_of_records_and_children_is_counted():
    found = {
        (metric, *labels) for one in DECLARED.values() for metric, labels, names in list_outcome_metrics(one) if names
    }

    declared = {
        (name, *child)
        for name in (
            record_counts.PROCESSED_METRIC,
            record_counts.EXAMINED_METRIC,
            record_counts.RECORD_ERRORS_METRIC,
            record_counts.CHILDREN_METRIC,
        )
        for child in METRICS[name].children
        if child[-1] != "database"  # counted when it happens, not of an outcome
    }

    assert declared <= found


def test_an_outcome_is_counted_as_it_grows(counted):
    outcome = statuses.user_status_cleanup.outcome(2, 1, "drained")
    growth = OutcomeCounter(DECLARED["user_status_cleanup"], outcome)

    growth.count_growth()
    outcome.deleted = 5
    growth.count_growth()
    growth.count_growth()

    assert counted("records_processed_total", "user_status_cleanup", "user_status") == 5


def test_the_bytes_of_what_was_deleted_are_counted(counted):
    outcome = DECLARED["delete_artifact_bucket"].outcome()
    outcome.destroyed, outcome.bytes = 2, 300

    OutcomeCounter(DECLARED["delete_artifact_bucket"], outcome).count_growth()

    assert counted("freed_bytes_total", "delete_artifact_bucket", "expired_artifact") == 300


@pytest.mark.parametrize(("state", "retries"), [("enqueued", 1), ("failed", 0)])
def test_a_failed_attempt_is_a_failure_and_a_retry_if_it_will_be_tried_again(counted, state, retries):
    end("prune", error=redis.ConnectionError(), state=state)

    assert counted("run_failures_total", "prune", "redis") == 1
    assert counted("run_retries_total", "prune") == retries


@every(
    "error, kind",
    [
        (pw.OperationalError(), "database"),
        (redis.TimeoutError(), "redis"),
        (objects.StoreUnavailable("x", {}), "object_storage"),
        (git_refs.RepositoryFailed(), "gitaly"),
        (git_repository.RootUnavailable(), "gitaly"),
        (TimeLimitExceeded(), "time_limit"),
        (KeyError(), "other"),
    ],
)
def test_an_error_is_of_one_kind_of_the_catalogue(error, kind):
    assert record_counts.classify_error(error) == kind
    assert ("prune", kind) in METRICS["forgekeeper_run_failures_total"].children


@every("batch, limit", [("user_status_cleanup", 60), ("stale_direct_uploads", 250), ("expired_job_artifacts", 60)])
def test_a_run_longer_than_its_document_allows_is_one_breach(database, batch, limit):
    counted = Counted()
    end(batch, limit, DECLARED[batch].outcome())
    within = counted("threshold_breaches_total", batch, "duration")
    end(batch, limit + 0.1, error=ValueError())

    assert (within, counted("threshold_breaches_total", batch, "duration")) == (0, 1)


@pytest.mark.parametrize(("batch", "limit"), [("stale_direct_uploads", 2), ("expired_job_artifacts", 3)])
def test_failures_in_a_row_are_a_breach_from_the_document_s_number_on(database, counted, batch, limit):
    started = start_run(batch, JobRun.claim_manual(batch, by="test"), by="test")
    breaches = []
    for _ in range(limit):
        JobRun.fail(started, "x", delay=timedelta(0))
        end(batch, error=ValueError(), state="enqueued")
        breaches.append(counted("threshold_breaches_total", batch, "consecutive_failures"))
        started = start_run(batch, started.id, by="test")

    assert breaches == [0] * (limit - 1) + [1]


@pytest.mark.parametrize(("left", "breaches"), [(10_000, 0), (10_001, 1)])
def test_more_left_than_the_limit_is_a_breach(database, counted, left, breaches):
    database.execute_sql(
        "insert into user_statuses (user_id, clear_status_at) select n, now() from generate_series(1, %s) as n", (left,)
    )

    end("user_status_cleanup", outcome=statuses.user_status_cleanup.outcome(1, 1, "drained"))
    end("stale_direct_uploads", outcome=direct.StaleUploadsResult(left + 5, 5))

    assert counted("threshold_breaches_total", "user_status_cleanup", "backlog") == breaches
    assert counted("threshold_breaches_total", "stale_direct_uploads", "backlog") == breaches


@pytest.mark.parametrize(("drains", "timeouts"), [(False, 1), (True, 0)])
def test_a_run_that_stops_at_its_budget_is_a_timeout_unless_its_worker_drains(database, counted, drains, timeouts):
    if drains:
        shutdown.requested.set()
    try:
        end("user_status_cleanup", outcome=statuses.user_status_cleanup.outcome(1, 1, "deadline"))
        end("stale_direct_uploads", outcome=direct.StaleUploadsResult(execution_timeout=True))
    finally:
        shutdown.requested.clear()

    assert counted("run_timeouts_total", "user_status_cleanup") == timeouts
    assert counted("run_timeouts_total", "stale_direct_uploads") == timeouts


def test_what_a_batch_alone_counts_is_counted(counted):
    end("git_ref_cleanup", outcome=ref_deletions.Outcome(10, 8, 2, "max_projects"))
    end("expired_job_artifacts", outcome=DECLARED["expired_job_artifacts"].outcome(5, 2, 1, 1, 2, 3))

    assert counted("children_enqueued_total", "git_ref_cleanup", "clean_project_refs") == 8
    assert counted("fanout_limit_reached_total", "git_ref_cleanup") == 1
    assert counted("buckets_recovered_total") == 1
    assert counted("buckets_refilled_total") == 2


def test_a_flag_that_could_not_be_read_is_counted(counted):
    end("expired_job_artifacts", outcome=DECLARED["expired_job_artifacts"].outcome(), skipped="flag_unreadable")

    assert counted("feature_flag_errors_total", "bulk_delete_job_artifacts") == 1
    assert counted("runs_skipped_total", "expired_job_artifacts", "flag_unreadable") == 1


@pytest.mark.parametrize(
    ("stopped", "error", "expected"),
    [
        ("drained", None, (1, 0, 0)),
        ("lease_held", None, (0, 1, 0)),
        (None, LeaseLost(), (1, 0, 1)),
        (None, redis.TimeoutError(), (0, 0, 0)),
    ],
    ids=["taken", "held by another", "lost", "nobody knows"],
)
def test_a_child_counts_what_became_of_its_lease(counted, stopped, error, expected):
    outcome = stopped and ref_deletions.ProjectOutcome(stopped=stopped)

    count_attempt(DECLARED["clean_project_refs"], 1.0, outcome, error, state=None, skipped=None)

    names = ("lease_acquisitions_total", "lease_contentions_total", "lease_lost_total")
    assert tuple(counted(name, "clean_project_refs") for name in names) == expected
    assert counted("runs_skipped_total", "clean_project_refs", "lease_held") == expected[1]


@pytest.mark.parametrize(("late", "attempt", "times"), [(61, 1, 1), (30, 1, 0), (61, 2, 0), (None, 1, 0)], ids=str)
def test_a_tick_that_starts_more_than_a_minute_late_is_counted_once(database, counted, late, attempt, times):
    tick = None if late is None else now() - timedelta(seconds=late)

    count_late_start("prune", SimpleNamespace(tick=tick, attempt=attempt))

    assert counted("run_late_starts_total", "prune") == times
