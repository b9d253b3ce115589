"""A batch's rows on its runs: how they end, and how long they take."""

from __future__ import annotations

from metrics.dashboards.limits import documented, limit
from metrics.dashboards.panels import Query, Row, distribution, graph
from metrics.dashboards.queries import HERE, each_minute, grown, of_the_batch, within


def endings() -> Row:
    """Show successes, failures, skips, retries and breaches."""
    burn = [limit("BatchErrorBudgetBurn", window="1h"), limit("BatchErrorBudgetBurn", window="6h")]
    return Row(
        "How do its runs end?",
        [
            graph(
                "Runs",
                "Attempts that ended, each minute: all of them, and those that failed.",
                "opm",
                Query(each_minute("runs", where=HERE), "all"),
                Query(each_minute("run_failures", where=HERE), "failed"),
            ),
            graph(
                "Why runs fail",
                "Failures within the rate interval, by kind of error.",
                "short",
                Query(
                    grown("run_failures", "error_kind", HERE),
                    "{{error_kind}}",
                ),
                stacked=True,
            ),
            graph(
                "Error budget",
                "Failed share of the runs over four windows. The lines are where two together alarm: 5 minutes with "
                "an hour, 30 minutes with six hours.",
                "percentunit",
                *(
                    Query(f'batch:run_failures_per_runs:ratio_rate{window}{{batch="$batch"}}', window)
                    for window in ("5m", "30m", "1h", "6h")
                ),
                lines=burn,
            ),
            graph(
                "Skipped",
                "Runs that did not begin, within the rate interval, by reason.",
                "short",
                Query(
                    grown("runs_skipped", "reason", HERE),
                    "{{reason}}",
                ),
                stacked=True,
            ),
            graph(
                "Repeated and given up",
                "Attempts that will be repeated, messages moved to the dead letters, and what lies there now.",
                "short",
                Query(grown("run_retries", where=HERE), "retries"),
                Query(grown("run_dead_letters", where=HERE), "given up"),
                Query(
                    'sum(max by (queue_name, batch) (forgekeeper_dead_letter_messages{batch="$batch"}))',
                    "dead letters now",
                ),
            ),
            graph(
                "Limits that were crossed",
                "The documents' thresholds, and starts that came more than a minute late.",
                "short",
                Query(
                    grown("threshold_breaches", "threshold", HERE),
                    "{{threshold}}",
                ),
                Query(grown("run_late_starts", where=HERE), "late start"),
            ),
        ],
    )


def durations() -> Row:
    """Show how long runs take and messages wait, against the limits."""
    buckets = f"sum by (le) (increase(forgekeeper_run_{{}}_seconds_bucket{{{{{HERE}}}}}[$__rate_interval]))"
    return Row(
        "How long do they take?",
        [
            graph(
                "Duration",
                "The middle and the slow end of the runs, the document's limit, and the limit of a run: one that is at "
                "work for a minute longer is stuck.",
                "s",
                Query(within(0.5, "run_duration", where=HERE), "half of the runs within"),
                Query(within(0.95, "run_duration", where=HERE), "19 of 20 within"),
                Query('max(forgekeeper_last_run_duration_seconds{batch="$batch"})', "last run"),
                Query('max(forgekeeper_run_time_limit_seconds{batch="$batch"})', "limit of a run"),
                Query(of_the_batch(documented("duration")), "limit of the document"),
                columns=12,
            ),
            graph(
                "At its limits",
                "Runs that stopped at their own budget with work left, which is no error; and runs in progress.",
                "short",
                Query(grown("run_timeouts", where=HERE), "out of time"),
                Query('sum(forgekeeper_runs_in_progress{batch="$batch"})', "in progress"),
                columns=12,
            ),
            distribution(
                "Durations",
                "How many runs took how long. The edges hold the documents' 60, 250 and 600 seconds.",
                "s",
                Query(buckets.format("duration"), "{{le}}"),
            ),
            distribution(
                "Waits",
                "How many messages waited how long from due to begun; waiting for a retry is left out.",
                "s",
                Query(buckets.format("wait"), "{{le}}"),
            ),
        ],
    )
