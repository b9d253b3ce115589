"""The overview's rows on what batches run on: queues, processes, leases, disks and stores."""

from __future__ import annotations

from metrics.dashboards.limits import limit
from metrics.dashboards.panels import Query, Row, graph
from metrics.dashboards.queries import each_minute, grown, within


def queues() -> Row:
    """Show what waits for workers, for how long, and what was given up."""
    return Row(
        "Do messages move?",
        [
            graph(
                "Messages ready",
                "Waiting for a worker. The line is two whole fan-outs.",
                "short",
                Query('max by (queue_name) (forgekeeper_queue_messages{state="ready"})', "{{queue_name}}"),
                lines=[limit("BatchQueueTooLong")],
            ),
            graph(
                "Oldest message",
                "Since when the head of a queue is due. The lines: batches may wait a minute, children half an hour.",
                "s",
                Query(
                    "time() - min by (queue_name) (forgekeeper_queue_oldest_message_timestamp_seconds)",
                    "{{queue_name}}",
                ),
                lines=[
                    limit("BatchQueueLatencyHigh", queue_class="cron"),
                    limit("BatchQueueLatencyHigh", queue_class="children"),
                ],
            ),
            graph(
                "Messages in workers' hands, or put off",
                "Unacknowledged: fetched, and not yet settled. Delayed: waiting for a retry.",
                "short",
                Query(
                    'max by (queue_name, state) (forgekeeper_queue_messages{state=~"unacked|delayed"})',
                    "{{queue_name}}: {{state}}",
                ),
            ),
            graph(
                "Dead letters",
                "By batch; they are kept for seven days. forgekeeper dead replay sends them anew.",
                "short",
                Query("sum by (batch) (max by (queue_name, batch) (forgekeeper_dead_letter_messages))", "{{batch}}"),
            ),
            graph(
                "Retries",
                "Attempts that failed and will be repeated, each minute.",
                "opm",
                Query(each_minute("run_retries", "batch"), "{{batch}}"),
            ),
            graph(
                "Wait, slow end",
                "From due to begun: nineteen messages of twenty begin within this.",
                "s",
                Query(within(0.95, "run_wait", "batch"), "{{batch}}"),
            ),
        ],
    )


def processes() -> Row:
    """Show who is up, what they are doing, and what they had trouble with."""
    return Row(
        "Are schedulers and workers at work?",
        [
            graph(
                "Pages up",
                "What Prometheus can scrape, by job.",
                "short",
                Query(
                    'sum by (job) (up{job=~"forgekeeper-worker|forgekeeper-scheduler|forgekeeper-exporter"})', "{{job}}"
                ),
            ),
            graph(
                "Workers whose page says nothing",
                "Up, and without a single metric of ours: their processes do not count where the page looks.",
                "short",
                Query(
                    'count((up{job="forgekeeper-worker"} == 1) unless on (job, instance) forgekeeper_runs_total) '
                    "or vector(0)",
                    "workers",
                ),
                lines=[1],
            ),
            graph(
                "Runs in progress",
                "In all workers, at the moment of the scrape.",
                "short",
                Query("sum by (batch) (forgekeeper_runs_in_progress)", "{{batch}}"),
                stacked=True,
            ),
            graph(
                "Sent by schedulers",
                "Messages sent on schedule, each minute.",
                "opm",
                Query(each_minute("scheduler_enqueued", "batch"), "{{batch}}"),
            ),
            graph(
                "What schedulers had trouble with",
                "Ticks that were missed or suppressed, sends that failed, runs taken from silent workers.",
                "short",
                Query(grown("scheduler_misfires"), "missed"),
                Query(grown("scheduler_max_instances"), "suppressed"),
                Query(grown("scheduler_enqueue_failures"), "not sent"),
                Query(grown("scheduler_runs_reopened"), "worker lost"),
            ),
            graph(
                "Log lines that matter",
                "Warnings and worse, each minute. Document 65 logs stale imports as errors: that is its normal work.",
                "opm",
                Query(
                    each_minute("log_messages", "level", 'level=~"warning|error|critical"'),
                    "{{level}}",
                ),
            ),
        ],
    )


def holds() -> Row:
    """Show leases, artifact buckets and flags."""
    return Row(
        "What is held, and what is switched?",
        [
            graph(
                "Leases held",
                "Of each family: whether any is held.",
                "bool_yes_no",
                Query("max by (lease) (forgekeeper_lease_held)", "{{lease}}"),
            ),
            graph(
                "Time that leases have left",
                "The last of the family. One beyond the line was not set by us, and will not end by itself.",
                "s",
                Query("max by (lease) (forgekeeper_lease_expiry_timestamp_seconds) - time()", "{{lease}}"),
                lines=[limit("BatchLeaseStuck")],
            ),
            graph(
                "Leases taken, refused, lost",
                "Within the rate interval. A lost one ran out under a job that was still at work.",
                "short",
                Query(
                    grown("lease_acquisitions", "lease"),
                    "{{lease}}: taken",
                ),
                Query(
                    grown("lease_contentions", "lease"),
                    "{{lease}}: refused",
                ),
                Query(grown("lease_lost", "lease"), "{{lease}}: lost"),
            ),
            graph(
                "Artifact buckets",
                "Free and at work; together they should reach the limit, which is 0 while the batch is held back.",
                "short",
                Query("max by (state) (forgekeeper_buckets)", "{{state}}"),
                Query("max(forgekeeper_buckets_limit)", "limit"),
                columns=12,
            ),
            graph(
                "Feature flags",
                "On or off, and how often one could not be read.",
                "short",
                Query("max by (flag) (forgekeeper_feature_flag_enabled)", "{{flag}}"),
                Query(
                    grown("feature_flag_errors", "flag"),
                    "{{flag}}: unread",
                ),
                columns=12,
            ),
        ],
    )


def ground() -> Row:
    """Show what all the rest stands on."""
    return Row(
        "Is the ground firm? Disks, object stores, the exporter",
        [
            graph(
                "Roots that can be read",
                "Sentinels of the repositories and of the object stores. Below an unreadable one nothing is deleted.",
                "bool_yes_no",
                Query("min by (root) (forgekeeper_root_readable)", "{{root}}"),
            ),
            graph(
                "Object storage, slow end",
                "Nineteen requests of twenty are answered within this.",
                "s",
                Query(within(0.95, "object_storage_request_duration", "operation"), "{{operation}}"),
            ),
            graph(
                "Object storage, failures",
                "Requests that failed, each minute.",
                "opm",
                Query(
                    each_minute("object_storage_request_failures", "operation"),
                    "{{operation}}",
                ),
            ),
            graph(
                "Collectors of the exporter",
                "Whether each could read what it reports; where not, its figures are missing from this page.",
                "bool_yes_no",
                Query("min by (collector) (forgekeeper_exporter_collector_success)", "{{collector}}"),
            ),
            graph(
                "How long collectors take",
                "All together have 1.7 seconds.",
                "s",
                Query("max by (collector) (forgekeeper_exporter_collector_duration_seconds)", "{{collector}}"),
            ),
            graph(
                "Clocks apart",
                "PostgreSQL's, Redis's and the exporter's machine's. Beyond the line batches refuse to run.",
                "s",
                Query(
                    "min by (clock, reference) (abs(forgekeeper_clock_offset_seconds))", "{{clock}} and {{reference}}"
                ),
                lines=[limit("BatchClockOff")],
            ),
        ],
        folded=True,
    )
