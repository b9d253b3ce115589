"""What workers count: what has happened."""

from __future__ import annotations

from metrics.catalogue.labels import ERROR_KINDS, LEVELS, NO_BATCH, OPERATIONS, SKIPS, Labels, each
from metrics.catalogue.page import REQUEST_SECONDS, Page


def write(page: Page, labels: Labels) -> None:
    """Write down the metrics."""
    page.counter("runs", "Runs (attempts) that ended, whatever the outcome.", "batch", labels.each)
    page.counter(
        "run_failures", "Runs that raised, by kind of error.", "batch error_kind", each(labels.names, ERROR_KINDS)
    )
    page.counter(
        "runs_skipped", "Runs that returned early without doing work.", "batch reason", each(labels.names, SKIPS)
    )
    page.counter("run_retries", "Retries scheduled (each counted once).", "batch", labels.each)
    page.counter(
        "run_dead_letters",
        "Messages moved to the dead-letter queue; what is of no batch as `unknown`.",
        "batch",
        each((*labels.names, NO_BATCH)),
    )
    page.counter(
        "run_timeouts",
        "Runs that stopped at their own time budget with work left (execution_timeout).",
        "batch",
        labels.each,
    )
    page.counter(
        "run_late_starts",
        "Ticks whose run began more than a minute late, the most that the documents promise.",
        "batch",
        labels.cron,
    )
    page.histogram("run_duration", "Duration of a run.", "batch", labels.each)
    page.histogram(
        "run_wait",
        "Time from when a message was due (delay and back-off excluded) to its start.",
        "batch",
        labels.each,
    )
    page.gauge("runs_in_progress", "Runs in progress.", "batch", labels.each)
    page.counter(
        "threshold_breaches",
        "Times a documented monitoring threshold was crossed.",
        "batch threshold",
        labels.thresholds,
    )
    page.counter("records_examined", "Records looked at.", "batch record", labels.examined)
    page.counter(
        "records_processed",
        "Records deleted, timed out or scheduled, counted with each chunk whatever becomes of the run.",
        "batch record",
        labels.processed,
    )
    page.counter("record_errors", "Records that failed and were passed over.", "batch record error_kind", labels.errors)
    page.counter("children_enqueued", "Child messages sent by a fan-out.", "batch child", labels.fan_outs)
    for name, own in labels.counters.items():
        children = each(one.name for one in labels.declared if any(name == its.name for its in one.counters))
        page.counter(name, own.help, *("batch", children) if own.by_batch else ())
    page.counter("lease_acquisitions", "Leases taken.", "lease", labels.leases)
    page.counter("lease_contentions", "Leases found to be held by another.", "lease", labels.leases)
    page.counter("lease_lost", "Leases that expired or changed hands under a running job.", "lease", labels.leases)
    page.counter("feature_flag_errors", "Feature-flag reads that failed.", "flag", labels.flags)
    page.histogram(
        "object_storage_request_duration",
        "Duration of object-storage requests.",
        "operation",
        each(OPERATIONS),
        REQUEST_SECONDS,
    )
    page.counter(
        "object_storage_request_failures",
        "Object-storage requests that failed.",
        "operation",
        each(OPERATIONS),
    )
    page.counter("log_messages", "Log records emitted, by level.", "level", each(LEVELS))
