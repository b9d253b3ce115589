"""Every metric: its name, type, labels and their values, unit, help, and the process whose page has it.

All else follows from this table: what is counted, `docs/metrics.md`, the zeros of the first
scrape, and the tests of rules and dashboards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Literal, NamedTuple

Process = Literal["worker", "scheduler", "exporter"]
Children = tuple[tuple[str, ...], ...]


class Batch(NamedTuple):
    """A batch, or the child of one, as alerts see it; *document* is its parent's."""

    name: str
    document: str
    queue: str
    team: str
    time_limit: timedelta
    parent: str | None = None


BATCHES = {
    batch.name: batch
    for batch in (
        Batch("user_status_cleanup", "48", "cron", "system-admins", timedelta(seconds=90)),
        Batch("git_ref_cleanup", "58", "cron", "operations", timedelta(minutes=12)),
        Batch("stale_direct_uploads", "100", "cron", "operations", timedelta(minutes=6)),
        Batch("stale_imports", "65", "cron", "log-monitoring", timedelta(minutes=12)),
        Batch("expired_job_artifacts", "11", "cron", "operations", timedelta(minutes=2)),
        Batch("delete_objects", "none", "objects", "operations", timedelta(minutes=6)),
        Batch("prune", "none", "cron", "operations", timedelta(minutes=7)),
        Batch("clean_project_refs", "58", "git", "operations", timedelta(minutes=12), "git_ref_cleanup"),
        Batch("delete_artifact_bucket", "11", "artifacts", "operations", timedelta(minutes=7), "expired_job_artifacts"),
    )
}
QUEUES = ("cron", "git", "artifacts", "objects")
NO_BATCH = "unknown"
"""The batch of a dead letter that is no message, or is of no batch: it is somebody's lost work all the same."""

OBJECTIVES = {
    ("user_status_cleanup", "user_status"): timedelta(seconds=300),
    ("clean_project_refs", "git_ref_deletion"): timedelta(hours=2),
    ("stale_direct_uploads", "stale_upload"): timedelta(hours=1),
    ("stale_imports", "bulk_import"): timedelta(hours=8),
    ("stale_imports", "entity"): timedelta(hours=8),
    ("delete_artifact_bucket", "expired_artifact"): timedelta(hours=24),
    ("delete_objects", "deleted_object"): timedelta(hours=1),
}
"""How long a record of a backlog may wait, from when it is due."""

SECONDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 250.0, 300.0, 600.0, 1800.0)
"""Edges of the histograms of runs; the documents' limits are among them."""
REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

FLAGS = ("bulk_delete_job_artifacts", "bulk_delete_job_artifacts_high_concurrency")
LEASES = ("clean_project_refs",)
LEVELS = ("debug", "info", "warning", "error", "critical")
ERROR_KINDS = (
    *("database", "redis", "object_storage", "gitaly"),
    *("feature_flag", "state_transition", "time_limit", "other"),
)
BLOCKS = ("no_store", "no_repositories", "flag_unreadable", "installation", "clocks", "schema")
"""Why a batch may be blocked: what only a person can mend."""
OFFS = ("flag_off", "cron_off")
SKIPS = ("overlap", "paused", "lease_held", "duplicate", "flag_off", *BLOCKS)
OPERATIONS = ("get", "delete", "delete_many")
COLLECTORS = (
    *("batches", "runs", "flags", "queues", "dead_letters", "leases", "buckets", "roots", "git_locks"),
    *("user_statuses", "git_refs", "uploads", "imports", "artifacts", "objects", "bad_records"),
    "clocks",
)
CLOCKS = (("postgresql", "host"), ("postgresql", "redis"), ("redis", "host"))
"""Which clock is compared with which; the host is the exporter's."""


@dataclass(frozen=True)
class Metric:
    """A metric; *children* are the label values that it ever has, None where the settings name them."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    children: Children | None
    unit: str
    help: str
    process: Process
    buckets: tuple[float, ...] = ()

    @property
    def values(self) -> dict[str, tuple[str, ...] | None]:
        """Each label's values, in their order; None where the settings name them."""
        if self.children is None:
            return dict.fromkeys(self.labels)
        columns = zip(*self.children, strict=True)
        return {label: tuple(dict.fromkeys(column)) for label, column in zip(self.labels, columns, strict=True)}


def _each(*values: Iterable[str]) -> Children:
    return tuple(product(*values))


_EACH = _each(BATCHES)
_CRON: Children = tuple((batch.name,) for batch in BATCHES.values() if batch.parent is None)
_INFO: Children = tuple((batch.name, batch.document, batch.queue, batch.team) for batch in BATCHES.values())
_FAN_OUTS: Children = tuple((batch.parent, batch.name) for batch in BATCHES.values() if batch.parent is not None)
_LEASES, _FLAGS = _each(LEASES), _each(FLAGS)
_THRESHOLDS: Children = (
    ("user_status_cleanup", "duration"),
    ("user_status_cleanup", "backlog"),
    ("git_ref_cleanup", "dead_letter"),
    ("clean_project_refs", "dead_letter"),
    ("stale_direct_uploads", "duration"),
    ("stale_direct_uploads", "consecutive_failures"),
    ("stale_direct_uploads", "backlog"),
    ("expired_job_artifacts", "duration"),
    ("expired_job_artifacts", "consecutive_failures"),
)
_PROCESSED: Children = (
    ("user_status_cleanup", "user_status"),
    ("clean_project_refs", "git_ref_deletion"),
    ("clean_project_refs", "gone_ref_deletion"),
    ("stale_direct_uploads", "stale_upload"),
    ("stale_imports", "bulk_import"),
    ("stale_imports", "entity"),
    ("stale_imports", "tracker"),
    ("delete_artifact_bucket", "expired_artifact"),
    ("delete_objects", "deleted_object"),
    ("prune", "ref_deletion"),
    ("prune", "job_run"),
    ("prune", "dead_letter"),
    ("prune", "process"),
    ("prune", "settled_upload"),
)
_EXAMINED: Children = (
    ("user_status_cleanup", "user_status"),
    ("git_ref_cleanup", "project"),
    ("clean_project_refs", "git_ref_deletion"),
    ("stale_direct_uploads", "pending_upload"),
    ("stale_imports", "bulk_import_or_entity"),
    ("delete_artifact_bucket", "expired_artifact"),
    ("delete_objects", "deleted_object"),
)
_RECORD_ERRORS: Children = (
    ("user_status_cleanup", "user_status", "database"),
    ("clean_project_refs", "git_ref_deletion", "database"),
    ("delete_artifact_bucket", "expired_artifact", "database"),
    ("delete_objects", "deleted_object", "database"),
    ("prune", "ref_deletion", "database"),
    ("prune", "job_run", "database"),
    ("clean_project_refs", "git_ref_deletion", "gitaly"),
    ("stale_direct_uploads", "stale_upload", "object_storage"),
    ("stale_imports", "bulk_import_or_entity", "state_transition"),
    ("delete_objects", "deleted_object", "object_storage"),
)
_BACKLOGS: Children = (*OBJECTIVES, ("stale_direct_uploads", "pending_upload"))
_PASSING_OVER: Children = tuple(
    dict.fromkeys((batch,) for batch, _, kind in _RECORD_ERRORS if kind in {"database", "state_transition"})
)
_GIVEN_UP: Children = (
    ("stale_direct_uploads", "failed_upload"),
    ("delete_objects", "dead_object"),
    ("clean_project_refs", "rejected_ref"),
)


class _Page:
    """The metrics of one process, in the order in which the documentation lists them."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.metrics: list[Metric] = []

    def counter(self, name: str, text: str, labels: str = "", children: Children = ((),)) -> None:
        names = tuple(labels.split())
        self.metrics.append(Metric(f"forgekeeper_{name}_total", "counter", names, children, "", text, self.process))

    def gauge(self, name: str, text: str, labels: str = "", children: Children | None = ((),)) -> None:
        unit, names = "seconds" if name.endswith("_seconds") else "", tuple(labels.split())
        self.metrics.append(Metric(f"forgekeeper_{name}", "gauge", names, children, unit, text, self.process))

    def histogram(self, name: str, text: str, label: str, children: Children, edges: tuple[float, ...]) -> None:
        name = f"forgekeeper_{name}_seconds"
        self.metrics.append(Metric(name, "histogram", (label,), children, "seconds", text, self.process, edges))


def _worker(page: _Page) -> None:
    page.counter("runs", "Runs (attempts) that ended, whatever the outcome.", "batch", _EACH)
    page.counter("run_failures", "Runs that raised, by kind of error.", "batch error_kind", _each(BATCHES, ERROR_KINDS))
    page.counter("runs_skipped", "Runs that returned early without doing work.", "batch reason", _each(BATCHES, SKIPS))
    page.counter("run_retries", "Retries scheduled (each counted once).", "batch", _EACH)
    page.counter(
        "run_dead_letters",
        "Messages moved to the dead-letter queue; what is of no batch as `unknown`.",
        "batch",
        _each((*BATCHES, NO_BATCH)),
    )
    page.counter(
        "run_timeouts",
        "Runs that stopped at their own time budget with work left (execution_timeout).",
        "batch",
        _EACH,
    )
    page.counter(
        "run_late_starts",
        "Ticks whose run began more than a minute late, the most that the documents promise.",
        "batch",
        _CRON,
    )
    page.histogram("run_duration", "Duration of a run.", "batch", _EACH, SECONDS)
    page.histogram(
        "run_wait",
        "Time from when a message was due (delay and back-off excluded) to its start.",
        "batch",
        _EACH,
        SECONDS,
    )
    page.gauge("runs_in_progress", "Runs in progress.", "batch", _EACH)
    page.counter(
        "threshold_breaches", "Times a documented monitoring threshold was crossed.", "batch threshold", _THRESHOLDS
    )
    page.counter("records_examined", "Records looked at.", "batch record", _EXAMINED)
    page.counter(
        "records_processed",
        "Records deleted, timed out or scheduled, counted with each chunk whatever becomes of the run.",
        "batch record",
        _PROCESSED,
    )
    page.counter(
        "record_errors", "Records that failed and were passed over.", "batch record error_kind", _RECORD_ERRORS
    )
    page.counter("children_enqueued", "Child messages sent by a fan-out.", "batch child", _FAN_OUTS)
    page.counter(
        "fanout_limit_reached",
        "Fan-outs cut off at their limit (MAX_PROJECTS).",
        "batch",
        _each(["git_ref_cleanup"]),
    )
    page.counter(
        "missing_repositories",
        "Projects with pending deletions that were found without a repository, in each run anew.",
        "batch",
        _each(["git_ref_cleanup"]),
    )
    page.counter("lease_acquisitions", "Leases taken.", "lease", _LEASES)
    page.counter("lease_contentions", "Leases found to be held by another.", "lease", _LEASES)
    page.counter("lease_lost", "Leases that expired or changed hands under a running job.", "lease", _LEASES)
    page.counter("buckets_recovered", "Stale buckets put back (stale_count).")
    page.counter("buckets_refilled", "Missing buckets added (missing_count).")
    page.counter("feature_flag_errors", "Feature-flag reads that failed.", "flag", _FLAGS)
    page.histogram(
        "object_storage_request_duration",
        "Duration of object-storage requests.",
        "operation",
        _each(OPERATIONS),
        REQUEST_SECONDS,
    )
    page.counter(
        "object_storage_request_failures",
        "Object-storage requests that failed.",
        "operation",
        _each(OPERATIONS),
    )
    page.counter("log_messages", "Log records emitted, by level.", "level", _each(LEVELS))


def _scheduler(page: _Page) -> None:
    page.gauge(
        "scheduler_heartbeat_timestamp_seconds",
        "When the scheduler last turned for every batch (a 15 s interval job).",
    )
    page.counter("scheduler_enqueued", "Messages sent on schedule.", "batch", _CRON)
    page.counter("scheduler_enqueue_failures", "Sends that raised.", "batch", _CRON)
    page.counter("scheduler_misfires", "Ticks missed.", "batch", _CRON)
    page.counter("scheduler_max_instances", "Ticks suppressed, a run of the batch being at work.", "batch", _CRON)
    page.counter("scheduler_runs_reopened", "Runs taken from a worker that had fallen silent.", "batch", _CRON)
    page.gauge("scheduler_last_enqueue_timestamp_seconds", "Last send.", "batch", _CRON)
    page.gauge(
        "scheduler_next_run_timestamp_seconds", "Next tick of the timetable; 0 if the cron is off.", "batch", _CRON
    )


def _exporter(page: _Page) -> None:
    page.gauge("info", "Catalogue entry of a batch; always 1.", "batch spec queue_name team", _INFO)
    page.gauge(
        "schedule_interval_seconds",
        "Longest gap between two ticks of the configured schedule; absent while paused or off.",
        "batch",
        _CRON,
    )
    page.gauge("run_time_limit_seconds", "How long a run may last before it is killed.", "batch", _EACH)
    page.gauge(
        "backlog_age_objective_seconds",
        "How long a due record may wait; absent while its batch is paused, off, switched off by its flag or blocked.",
        "batch record",
        tuple(OBJECTIVES),
    )
    page.gauge("registered_timestamp_seconds", "When the batch was first registered.", "batch", _CRON)
    page.gauge(
        "batch_paused_since_timestamp_seconds",
        "Since when the batch is paused; absent when it is not.",
        "batch",
        _CRON,
    )
    page.gauge(
        "batch_blocked_since_timestamp_seconds",
        "Since when the batch is blocked, by the reason of its last run; absent when it is not, paused or off.",
        "batch reason",
        _each([name for (name,) in _CRON], BLOCKS),
    )
    page.gauge(
        "batch_off_since_timestamp_seconds",
        "Since when the batch is switched off by its flag, or not scheduled; absent when it is neither.",
        "batch reason",
        _each([name for (name,) in _CRON], OFFS),
    )
    page.gauge("last_run_timestamp_seconds", "End of the last run, whatever the outcome.", "batch", _CRON)
    page.gauge(
        "last_success_timestamp_seconds",
        "End of the last successful run; absent before the first.",
        "batch",
        _CRON,
    )
    page.gauge("last_run_duration_seconds", "Duration of the last run.", "batch", _CRON)
    page.gauge("consecutive_failures", "Failures since the last success.", "batch", _CRON)
    page.gauge(
        "running_since_timestamp_seconds", "Start of the oldest run in progress; absent when none.", "batch", _CRON
    )
    page.gauge(
        "ticks_ahead",
        "Ticks in the ledger whose time has not come, or that were set aside for it within the last hour.",
        "batch",
        _CRON,
    )
    page.gauge(
        "clock_offset_seconds",
        "How far a clock is ahead of another, negative if it is behind; the host is the exporter's.",
        "clock reference",
        CLOCKS,
    )
    page.gauge("backlog_records", "Records that are due (counted up to a bound).", "batch record", _BACKLOGS)
    page.gauge(
        "backlog_oldest_timestamp_seconds",
        "When the oldest due record became due; absent when none.",
        "batch record",
        tuple(OBJECTIVES),
    )
    page.gauge(
        "given_up_records",
        "Records that were given up and wait for a person (counted up to a bound).",
        "batch record",
        _GIVEN_UP,
    )
    page.gauge("passed_over_records", "Bad records that are passed over for a growing while.", "batch", _PASSING_OVER)
    page.gauge(
        "queue_messages",
        "Messages by state (ready, unacked, delayed).",
        "queue_name state",
        _each(QUEUES, ("ready", "unacked", "delayed")),
    )
    page.gauge(
        "queue_oldest_message_timestamp_seconds",
        "When the head of the queue became due; absent when empty.",
        "queue_name",
        _each(QUEUES),
    )
    page.gauge(
        "dead_letter_messages",
        "Messages in the dead-letter queue; what is of no batch of that queue as `unknown`.",
        "queue_name batch",
        (*((batch.queue, batch.name) for batch in BATCHES.values()), *_each(QUEUES, [NO_BATCH])),
    )
    page.gauge("lease_held", "1 while the lease is held.", "lease", _LEASES)
    page.gauge(
        "lease_expiry_timestamp_seconds",
        "When the held lease expires, the last one of the family; absent when free.",
        "lease",
        _LEASES,
    )
    page.gauge("buckets", "Artifact buckets (available, occupied).", "state", _each(("available", "occupied")))
    page.gauge("buckets_limit", "Configured number of buckets (5 or 10); 0 while the batch is held back.")
    page.gauge(
        "bucket_oldest_occupied_timestamp_seconds",
        "Last sign of life of the bucket that has been silent for longest; absent when none is occupied.",
    )
    page.gauge("feature_flag_enabled", "1 while the flag is on.", "flag", _FLAGS)
    page.gauge(
        "root_readable",
        "1 while the sentinel can be read and is ours: of the repositories' root, or of a location's object store.",
        "root",
        None,
    )
    page.gauge(
        "git_stale_locks",
        "Repositories with pending ref deletions whose packed-refs.lock is older than any deletion may last.",
    )
    page.gauge("exporter_collector_success", "1 if the last collection worked.", "collector", _each(COLLECTORS))
    page.gauge(
        "exporter_collector_duration_seconds", "Duration of the last collection.", "collector", _each(COLLECTORS)
    )


def _table() -> dict[str, Metric]:
    worker, scheduler, exporter = _Page("worker"), _Page("scheduler"), _Page("exporter")
    _worker(worker)
    _scheduler(scheduler)
    _exporter(exporter)
    return {metric.name: metric for page in (worker, scheduler, exporter) for metric in page.metrics}


METRICS = _table()


def of(process: Process) -> list[Metric]:
    """List the metrics on the page of *process*."""
    return [metric for metric in METRICS.values() if metric.process == process]
