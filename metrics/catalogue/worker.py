"""What workers count: what has happened."""

from __future__ import annotations

from metrics.catalogue.endpoint import REQUEST_SECONDS, Endpoint
from metrics.catalogue.labels import ERROR_KINDS, LEVELS, NO_BATCH, OPERATIONS, SKIPS, Labels, each


def write(endpoint: Endpoint, labels: Labels) -> None:
    """Write down the metrics."""
    endpoint.counter("runs", "Runs (attempts) that ended, whatever the outcome.", "batch", labels.each)
    endpoint.counter(
        "run_failures", "Runs that raised, by kind of error.", "batch error_kind", each(labels.names, ERROR_KINDS)
    )
    endpoint.counter(
        "runs_skipped", "Runs that returned early without doing work.", "batch reason", each(labels.names, SKIPS)
    )
    endpoint.counter("run_retries", "Retries scheduled (each counted once).", "batch", labels.each)
    endpoint.counter(
        "run_dead_letters",
        "Messages moved to the dead-letter queue; what is of no batch as `unknown`.",
        "batch",
        each((*labels.names, NO_BATCH)),
    )
    endpoint.counter(
        "run_timeouts",
        "Runs that stopped at their own time budget with work left (execution_timeout).",
        "batch",
        labels.each,
    )
    endpoint.counter(
        "run_late_starts",
        "Ticks whose run began more than a minute late, the most that the documents promise.",
        "batch",
        labels.cron,
    )
    endpoint.histogram("run_duration", "Duration of a run.", "batch", labels.each)
    endpoint.histogram(
        "run_wait",
        "Time from when a message was due (delay and back-off excluded) to its start.",
        "batch",
        labels.each,
    )
    endpoint.gauge("runs_in_progress", "Runs in progress.", "batch", labels.each)
    endpoint.counter(
        "threshold_breaches",
        "Times a documented monitoring threshold was crossed.",
        "batch threshold",
        labels.thresholds,
    )
    endpoint.counter("records_examined", "Records looked at.", "batch record", labels.examined)
    endpoint.counter(
        "records_processed",
        "Records deleted, timed out or scheduled, counted with each chunk whatever becomes of the run.",
        "batch record",
        labels.processed,
    )
    endpoint.counter(
        "record_errors", "Records that failed and were passed over.", "batch record error_kind", labels.errors
    )
    endpoint.counter("children_enqueued", "Child messages sent by a fan-out.", "batch child", labels.fan_outs)
    for name, own in labels.counters.items():
        children = each(one.name for one in labels.declared if any(name == its.name for its in one.counters))
        endpoint.counter(name, own.help, *("batch", children) if own.by_batch else ())
    endpoint.counter("lease_acquisitions", "Leases taken.", "lease", labels.leases)
    endpoint.counter("lease_contentions", "Leases found to be held by another.", "lease", labels.leases)
    endpoint.counter("lease_lost", "Leases that expired or changed hands under a running job.", "lease", labels.leases)
    endpoint.counter("feature_flag_errors", "Feature-flag reads that failed.", "flag", labels.flags)
    endpoint.histogram(
        "object_storage_request_duration",
        "Duration of object-storage requests.",
        "operation",
        each(OPERATIONS),
        REQUEST_SECONDS,
    )
    endpoint.counter(
        "object_storage_request_failures",
        "Object-storage requests that failed.",
        "operation",
        each(OPERATIONS),
    )
    endpoint.counter("log_messages", "Log records emitted, by level.", "level", each(LEVELS))
