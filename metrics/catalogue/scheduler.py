"""What schedulers count: what they have sent."""

from __future__ import annotations

from metrics.catalogue.endpoint import Endpoint
from metrics.catalogue.labels import Labels


def write(endpoint: Endpoint, labels: Labels) -> None:
    """Write down the metrics."""
    endpoint.gauge(
        "scheduler_heartbeat_timestamp_seconds",
        "When the scheduler last turned for every batch (a 15 s interval job).",
    )
    endpoint.counter("scheduler_enqueued", "Messages sent on schedule.", "batch", labels.cron)
    endpoint.counter("scheduler_enqueue_failures", "Sends that raised.", "batch", labels.cron)
    endpoint.counter("scheduler_misfires", "Ticks missed.", "batch", labels.cron)
    endpoint.counter(
        "scheduler_max_instances", "Ticks suppressed, a run of the batch being at work.", "batch", labels.cron
    )
    endpoint.counter(
        "scheduler_runs_reopened", "Runs taken from a worker that had fallen silent.", "batch", labels.cron
    )
    endpoint.gauge("scheduler_last_enqueue_timestamp_seconds", "Last send.", "batch", labels.cron)
    endpoint.gauge(
        "scheduler_next_run_timestamp_seconds",
        "Next tick of the timetable; 0 if the cron is off.",
        "batch",
        labels.cron,
    )
