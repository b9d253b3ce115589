"""What exporters read: what is the case."""

from __future__ import annotations

from metrics.catalogue.endpoint import Endpoint
from metrics.catalogue.labels import BLOCKS, CLOCKS, HOLDS, OFFS, Labels, each


def write(endpoint: Endpoint, labels: Labels) -> None:
    """Write down the metrics."""
    endpoint.gauge("info", "Catalogue entry of a batch; always 1.", "batch spec queue_name team", labels.info)
    endpoint.gauge(
        "schedule_interval_seconds",
        "Longest gap between two ticks of the configured schedule; absent while paused, stopped, held or off.",
        "batch",
        labels.cron,
    )
    endpoint.gauge("run_time_limit_seconds", "How long a run may last before it is killed.", "batch", labels.each)
    endpoint.gauge(
        "backlog_age_objective_seconds",
        "How long a due record may wait; absent while its batch is held back in any way, or blocked.",
        "batch record",
        labels.objectives,
    )
    endpoint.gauge("registered_timestamp_seconds", "When the batch was first registered.", "batch", labels.cron)
    endpoint.gauge(
        "batch_paused_since_timestamp_seconds",
        "Since when the batch is paused; absent when it is not.",
        "batch",
        labels.cron,
    )
    endpoint.gauge(
        "batch_stopped_since_timestamp_seconds",
        "Since when the batch is stopped; absent when it is not.",
        "batch",
        labels.cron,
    )
    endpoint.gauge(
        "batch_held_since_timestamp_seconds",
        "Since when a brake holds the batch, and which; absent when none does.",
        "batch reason",
        each(labels.parents, HOLDS),
    )
    endpoint.gauge(
        "batch_blocked_since_timestamp_seconds",
        "Since when the batch is blocked, by the reason of its last run; absent when it is not, or held back.",
        "batch reason",
        each(labels.parents, BLOCKS),
    )
    endpoint.gauge(
        "batch_off_since_timestamp_seconds",
        "Since when the batch is switched off by its flag, or not scheduled; absent when it is neither.",
        "batch reason",
        each(labels.parents, OFFS),
    )
    endpoint.gauge("last_run_timestamp_seconds", "End of the last run, whatever the outcome.", "batch", labels.cron)
    endpoint.gauge(
        "last_success_timestamp_seconds",
        "End of the last successful run; absent before the first.",
        "batch",
        labels.cron,
    )
    endpoint.gauge("last_run_duration_seconds", "Duration of the last run.", "batch", labels.cron)
    endpoint.gauge("consecutive_failures", "Failures since the last success.", "batch", labels.cron)
    endpoint.gauge(
        "running_since_timestamp_seconds",
        "Start of the oldest run in progress; absent when none.",
        "batch",
        labels.cron,
    )
    endpoint.gauge(
        "ticks_ahead",
        "Ticks in the ledger whose time has not come, or that were set aside for it within the last hour.",
        "batch",
        labels.cron,
    )
    endpoint.gauge(
        "clock_offset_seconds",
        "How far a clock is ahead of another, negative if it is behind; the host is the exporter's.",
        "clock reference",
        CLOCKS,
    )
    endpoint.gauge("backlog_records", "Records that are due (counted up to a bound).", "batch record", labels.backlogs)
    endpoint.gauge(
        "backlog_oldest_timestamp_seconds",
        "When the oldest due record became due; absent when none.",
        "batch record",
        labels.objectives,
    )
    endpoint.gauge(
        "quarantine_records",
        "What failed more than once, or was refused, and waits for its next try or a person (counted up to a bound).",
        "batch record",
        labels.quarantined,
    )
    endpoint.gauge(
        "queue_messages",
        "Messages by state (ready, unacked, delayed).",
        "queue_name state",
        each(labels.queues, ("ready", "unacked", "delayed")),
    )
    endpoint.gauge(
        "queue_oldest_message_timestamp_seconds",
        "When the head of the queue became due; absent when empty.",
        "queue_name",
        each(labels.queues),
    )
    endpoint.gauge(
        "dead_letter_messages",
        "Messages in the dead-letter queue; what is of no batch of that queue as `unknown`.",
        "queue_name batch",
        labels.dead_letters,
    )
    endpoint.gauge("lease_held", "1 while the lease is held.", "lease", labels.leases)
    endpoint.gauge(
        "lease_expiry_timestamp_seconds",
        "When the held lease expires, the last one of the family; absent when free.",
        "lease",
        labels.leases,
    )
    for one in labels.declared:
        for own in (gauge for collector in one.collectors.values() for gauge in collector.gauges):
            endpoint.gauge(own.name, own.help, " ".join(own.labels), own.children)
    endpoint.gauge("feature_flag_enabled", "1 while the flag is on.", "flag", labels.flags)
    endpoint.gauge(
        "root_readable",
        "1 while the sentinel can be read and is ours: of the repositories' root, or of a location's object store.",
        "root",
        None,
    )
    endpoint.gauge(
        "exporter_collector_success", "1 if the last collection worked.", "collector", each(labels.collectors)
    )
    endpoint.gauge(
        "exporter_collector_duration_seconds", "Duration of the last collection.", "collector", each(labels.collectors)
    )
