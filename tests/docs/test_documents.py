"""The numbers of the five documents, each held against what the product uses.

A row is a number: its name, the document's own words for it, the number itself, and where it is used.
"""

# The documents are written in Japanese, with its brackets.
# ruff: noqa: RUF001

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from inspect import signature
from typing import Any

import pytest

import models
from forgekeeper.api.batches import BATCHES, all_declared
from forgekeeper.engine import record_counts
from forgekeeper.ledger import reconcile, retry_delays
from forgekeeper.platform.coordination.leases import hold_leases
from models import STALE_AFTER, UNFINISHED_STATES, ImportStatus, TrackerStatus
from tests.harness.artifacts import buckets
from tests.harness.catalogue import SERIES
from tests.harness.every import every
from tests.harness.performing import attempt_at, runner_of
from tests.harness.settings import settings_with
from workers import expired_job_artifacts, git_ref_cleanup, stale_direct_uploads, user_status_cleanup

SECOND, MINUTE, HOUR, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def cron(batch: str) -> str:
    """Return when the batch runs where nobody has set anything else."""
    return str(settings_with().schedule_of(batch))


def threshold(batch: str, name: str) -> float:
    """Return the limit that the batch declares."""
    limit = BATCHES[batch].find_threshold(name)
    assert limit is not None
    return limit.above


def default(function: Callable[..., Any], name: str) -> Any:
    """Return what the function takes for the argument where it is not given."""
    return signature(function).parameters[name].default


RETRIES = "リトライ回数 Sidekiqデフォルト"
DOCUMENT_48 = [
    ("cron", "1分間隔で実行", "* * * * *", lambda: cron("user_status_cleanup")),
    ("late after", "期限切れステータスは最大1分の遅延", MINUTE, lambda: record_counts.LATE_AFTER),
    ("missed after", "期限切れステータスは最大1分の遅延", MINUTE, lambda: reconcile.MISFIRE_GRACE),
    ("batch size", "BATCH_SIZE = 100", 100, lambda: user_status_cleanup.BATCH_SIZE),
    ("time", "MAX_RUNTIME = 30.seconds", 30 * SECOND, lambda: user_status_cleanup.MAX_RUNTIME),
    ("retries", RETRIES, 25, lambda: retry_delays.MAX_RETRIES),
    ("alert: seconds", "処理時間 60秒", 60, lambda: threshold("user_status_cleanup", "duration")),
    ("alert: left by a run", "10000件超過", 10_000, lambda: threshold("user_status_cleanup", "backlog")),
]
DOCUMENT_58 = [
    ("cron", "Cron設定に依存", "* * * * *", lambda: cron("git_ref_cleanup")),
    ("time", "LOCK_TIMEOUT = 10分", 10 * MINUTE, lambda: git_ref_cleanup.LOCK_TIMEOUT),
    ("lease", "タイムアウト: LOCK_TIMEOUT = 10分", 10 * MINUTE, lambda: default(hold_leases, "max_duration")),
    ("projects", "MAX_PROJECTS = 10,000", 10_000, lambda: git_ref_cleanup.MAX_PROJECTS),
    ("batch size", "BATCH_SIZE = 100", 100, lambda: git_ref_cleanup.BATCH_SIZE),
    ("retries", "リトライ対象エラー すべての例外", 25, lambda: retry_delays.MAX_RETRIES),
    (
        "alert: batches with dead letters",
        "Sidekiq失敗キュー",
        {"git_ref_cleanup", "clean_project_refs"},
        lambda: {one.name for one in all_declared() if one.find_threshold("dead_letter")},
    ),
]
DOCUMENT_100 = [
    ("cron", "6分ごとに実行されます（cron: `*/6 * * * *`）", "*/6 * * * *", lambda: cron("stale_direct_uploads")),
    ("time", "MAX_EXEC_DURATION（250秒）", 250 * SECOND, lambda: stale_direct_uploads.MAX_EXEC_DURATION),
    ("retries", RETRIES, 25, lambda: retry_delays.MAX_RETRIES),
    ("alert: seconds", "250秒超過", 250, lambda: threshold("stale_direct_uploads", "duration")),
    ("alert: failures counted", "連続失敗", 2, lambda: threshold("stale_direct_uploads", "consecutive_failures")),
    ("alert: left by a run", "大量蓄積", 10_000, lambda: threshold("stale_direct_uploads", "backlog")),
]
DOCUMENT_65 = [
    ("cron", "実行時刻 0 */4 * * *", "0 */4 * * *", lambda: cron("stale_imports")),
    ("stale after", "updated_at < 24時間前", 24 * HOUR, lambda: STALE_AFTER),
    ("stale statuses", "status IN (0, 1)", (0, 1), lambda: UNFINISHED_STATES),
    ("created", "created(0)", 0, lambda: ImportStatus.CREATED),
    ("started", "started(1)", 1, lambda: ImportStatus.STARTED),
    ("timeout", "3 (timeout)", 3, lambda: ImportStatus.TIMEOUT),
    ("tracker enqueued", "enqueued 3", 3, lambda: TrackerStatus.ENQUEUED),
    ("tracker timeout", "timeout **4**", 4, lambda: TrackerStatus.TIMEOUT),
    ("retries", RETRIES, 25, lambda: retry_delays.MAX_RETRIES),
]
DOCUMENT_11 = [
    ("cron", "通常は数分間隔", "*/5 * * * *", lambda: cron("expired_job_artifacts")),
    ("buckets", "並列度（max_buckets）を5から10に", 5, lambda: expired_job_artifacts.MAX_BUCKETS),
    (
        "buckets, many",
        "並列度（max_buckets）を5から10に",
        10,
        lambda: expired_job_artifacts.MAX_BUCKETS_HIGH_CONCURRENCY,
    ),
    ("classes", "バケット数分（最大10）", 10, lambda: models.CLASS_COUNT),
    ("silent after", "10分以上経過したoccupiedバケット", 10 * MINUTE, lambda: settings_with().bucket_silent_after),
    ("silent after, else", "10分後に再利用可能", 10 * MINUTE, lambda: default(buckets.tidy, "silent_for")),
    ("unlocked", "locked = 0", 0, lambda: models.UNLOCKED_STATE),
    ("trace", "file_type <> 3", 3, lambda: models.TRACE_FILE_TYPE),
    ("flag", "bulk_delete_job_artifacts", "bulk_delete_job_artifacts", lambda: expired_job_artifacts.FLAG),
    (
        "flag, many",
        "bulk_delete_job_artifacts_high_concurrency",
        "bulk_delete_job_artifacts_high_concurrency",
        lambda: expired_job_artifacts.HIGH_CONCURRENCY_FLAG,
    ),
    ("retries", RETRIES, 25, lambda: retry_delays.MAX_RETRIES),
    ("alert: seconds", "処理時間 60秒", 60, lambda: threshold("expired_job_artifacts", "duration")),
    ("alert: failures counted", "連続3回失敗", 3, lambda: threshold("expired_job_artifacts", "consecutive_failures")),
]
TABLES = {"48": DOCUMENT_48, "58": DOCUMENT_58, "100": DOCUMENT_100, "65": DOCUMENT_65, "11": DOCUMENT_11}
"""By document."""


ROWS = [(document, *number) for document, table in TABLES.items() for number in table]


@every("document, name, words, number, used", ROWS, name=lambda row: f"{row[0]}: {row[1]}")
def test_each_number_of_the_documents_is_the_one_in_use(document, name, words, number, used):
    assert used() == number, f"the document says: {words}"


@pytest.mark.parametrize("document", list(TABLES))
def test_each_document_has_its_batch(document):
    (parent,) = [batch for batch in BATCHES.values() if batch.document == int(document)]

    assert (parent.name, document, parent.queue, parent.team) in SERIES["info"]


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize(
    ("batch", "seconds"), [("user_status_cleanup", 30), ("stale_imports", 600), ("expired_job_artifacts", 60)]
)
def test_a_run_gets_the_time_of_its_document(batch, seconds, settings):
    with runner_of(settings) as runner, attempt_at(runner, BATCHES[batch]) as made:
        made.work_if_allowed()
        left = made.run.deadline.seconds_left()

    # A busy machine may have used some of it.
    assert seconds * 0.8 < left <= seconds
