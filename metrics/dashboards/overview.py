"""The overview: all batches on one page, from "is anything wrong" down to what the processes stand on."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from metrics.dashboards import machinery
from metrics.dashboards.limits import alert_names, documented, limit, runbook
from metrics.dashboards.panels import (
    BAD,
    GOOD,
    WARN,
    Column,
    Query,
    Row,
    annotation,
    comparison,
    figure,
    graph,
    listing,
    put_together,
)
from metrics.dashboards.queries import each_minute, each_second, grown, within

UID = "forgekeeper-overview"
BATCH_PAGE = "/d/forgekeeper-batch?var-batch=${__value.text}"
FIRING = f'ALERTS{{alertstate="firing",alertname=~"{"|".join(alert_names())}"}}'
SINCE_SUCCESS = "time() - max by (batch) (forgekeeper_last_success_timestamp_seconds)"
BACKLOG = "max by (batch, record) (forgekeeper_backlog_records)"
OLDEST = "time() - min by (batch, record) (forgekeeper_backlog_oldest_timestamp_seconds)"


def overview() -> Dashboard:
    """Build the dashboard to which alerts lead that are of no single batch."""
    return put_together(
        UID,
        "forgekeeper: overview",
        "All batches, their queues, and the processes that work on them. See docs/dashboards.md.",
        [
            _trouble(),
            _success(),
            _runs(),
            _work(),
            machinery.queues(),
            machinery.processes(),
            machinery.holds(),
            machinery.ground(),
        ],
        annotations=[
            annotation(
                "Pauses",
                Query(
                    "max by (batch) (forgekeeper_batch_paused_since_timestamp_seconds) * 1000", "{{batch}} was paused"
                ),
                colour="yellow",
                text="Somebody held the batch back: forgekeeper status",
                value_is_time=True,
            ),
            annotation(
                "Worker restarts",
                # No metric tells of a deployment: counters that begin anew are its trace.
                Query(
                    'sum by (instance) (resets(forgekeeper_log_messages_total{level="info"}[2m])) > 0',
                    "{{instance}} started anew",
                ),
                colour="blue",
                text="A worker's counters began at zero: a deployment, or a crash",
            ),
        ],
    )


def _trouble() -> Row:
    return Row(
        "Is anything wrong?",
        [
            figure(
                "Firing alerts",
                "How many alerts of forgekeeper fire now. The list below names them.",
                "short",
                Query(f"count({FIRING}) or vector(0)", "alerts"),
                steps={1: BAD},
            ),
            figure(
                "Workers up",
                "Worker pages that Prometheus can scrape. None: nothing is being deleted.",
                "short",
                Query('sum(up{job="forgekeeper-worker"})', "workers"),
                steps={1: GOOD},
                first=BAD,
            ),
            figure(
                "Schedulers up",
                "Scheduler pages that Prometheus can scrape. None: nothing is sent.",
                "short",
                Query('sum(up{job="forgekeeper-scheduler"})', "schedulers"),
                steps={1: GOOD},
                first=BAD,
            ),
            figure(
                "Exporters up",
                "Exporter pages that Prometheus can scrape. None: half of this page is blind.",
                "short",
                Query('sum(up{job="forgekeeper-exporter"})', "exporters"),
                steps={1: GOOD},
                first=BAD,
            ),
            figure(
                "Last turn of a scheduler",
                "Since when no scheduler's loop has turned; one turns every 15 seconds.",
                "s",
                Query("time() - max(forgekeeper_scheduler_heartbeat_timestamp_seconds)", "ago"),
                steps={limit("BatchSchedulerStalled"): BAD},
            ),
            figure(
                "Dead letters now",
                "Messages that were given up and lie in the dead letters. forgekeeper dead list shows them.",
                "short",
                Query("sum(max by (queue_name, batch) (forgekeeper_dead_letter_messages))", "messages"),
                steps={1: BAD},
            ),
            listing(
                "Which alerts fire",
                "One line for each firing alert; its name leads to what to do about it.",
                f"max by (alertname, severity, team, batch, queue_name, instance) ({FIRING})",
                names={
                    "alertname": "alert",
                    "severity": "severity",
                    "team": "team",
                    "batch": "batch",
                    "queue_name": "queue",
                    "instance": "instance",
                },
                links={"alert": runbook("${__value.text}"), "batch": BATCH_PAGE},
            ),
            graph(
                "Alerts over time",
                "How many alerts fired, by severity.",
                "short",
                Query(f"count by (severity) ({FIRING})", "{{severity}}"),
                stacked=True,
                columns=12,
            ),
        ],
    )


def _success() -> Row:
    share = "({success}) / on (batch) batch:schedule_patience_seconds:max"
    return Row(
        "Does every batch succeed?",
        [
            comparison(
                "Batches",
                "The name leads to the batch's page. A batch may go without success for as long as its patience: two "
                "periods and a minute, and longer where a run may outlast its period. A paused one has none to lose.",
                "batch",
                [
                    Column("last success ago", SINCE_SUCCESS, "s"),
                    Column(
                        "of its patience", share.format(success=SINCE_SUCCESS), "percentunit", {0.75: WARN, 1.0: BAD}
                    ),
                    Column(
                        "failures in a row",
                        "max by (batch) (forgekeeper_consecutive_failures)",
                        "short",
                        {1: WARN, limit("BatchConsecutiveFailures"): BAD},
                    ),
                    Column("last run took", "max by (batch) (forgekeeper_last_run_duration_seconds)", "s"),
                    Column("at work for", "time() - min by (batch) (forgekeeper_running_since_timestamp_seconds)", "s"),
                    Column("backlog", f"sum by (batch) ({BACKLOG})"),
                    Column("oldest due", f"max by (batch) ({OLDEST})", "s"),
                    Column(
                        "dead letters",
                        "sum by (batch) (max by (queue_name, batch) (forgekeeper_dead_letter_messages))",
                        "short",
                        {1: BAD},
                    ),
                    Column(
                        "stopped",
                        "time() - max by (batch) (forgekeeper_batch_stopped_since_timestamp_seconds)",
                        "s",
                        {0: BAD},
                    ),
                    Column(
                        "held",
                        "time() - max by (batch) (forgekeeper_batch_held_since_timestamp_seconds)",
                        "s",
                        {0: BAD},
                    ),
                    Column("paused", "time() - max by (batch) (forgekeeper_batch_paused_since_timestamp_seconds)", "s"),
                    Column(
                        "blocked",
                        "time() - max by (batch) (forgekeeper_batch_blocked_since_timestamp_seconds)",
                        "s",
                        {0: BAD},
                    ),
                    Column("runs", "sum by (batch) (increase(forgekeeper_runs_total[$__range]))"),
                    Column(
                        "failed",
                        "sum by (batch) (increase(forgekeeper_run_failures_total[$__range]))",
                        "short",
                        {1: WARN},
                    ),
                ],
                links={"batch": BATCH_PAGE},
            ),
            graph(
                "Time since the last success",
                "As a share of the batch's patience, so that a minute's batch and a four-hourly one compare. At 100 % "
                "BatchNotSucceeded is near.",
                "percentunit",
                Query(share.format(success=SINCE_SUCCESS), "{{batch}}"),
                lines=[1],
                columns=12,
            ),
            graph(
                "Failed attempts in a row",
                "Since the last success. The lines: two are too many for document 100, three for any other.",
                "short",
                Query("max by (batch) (forgekeeper_consecutive_failures)", "{{batch}}"),
                lines=[limit("StaleDirectUploadCleanupFailing"), limit("BatchConsecutiveFailures")],
                columns=12,
            ),
        ],
    )


def _runs() -> Row:
    return Row(
        "What becomes of the runs?",
        [
            graph(
                "Runs",
                "Attempts that ended, each minute, whatever their outcome.",
                "opm",
                Query(each_minute("runs", "batch"), "{{batch}}"),
            ),
            graph(
                "Failed share of the runs",
                "Over five minutes. The lines are the two rates at which the error budget of 1 % burns up too fast.",
                "percentunit",
                Query("batch:run_failures_per_runs:ratio_rate5m", "{{batch}}"),
                lines=[limit("BatchErrorBudgetBurn", window="1h"), limit("BatchErrorBudgetBurn", window="6h")],
            ),
            graph(
                "Why runs fail",
                "Failures each minute, by kind of error.",
                "opm",
                Query(
                    each_minute("run_failures", "error_kind"),
                    "{{error_kind}}",
                ),
                stacked=True,
            ),
            graph(
                "Duration, slow end",
                "Nineteen runs of twenty end within this. The lines are the documents' limits.",
                "s",
                Query(within(0.95, "run_duration", "batch"), "{{batch}}"),
                lines=sorted(set(documented("duration").values())),
            ),
            graph(
                "Limits that were crossed",
                "Threshold breaches, as the code that knows the documents' numbers counts them.",
                "short",
                Query(
                    grown("threshold_breaches", "batch, threshold"),
                    "{{batch}}: {{threshold}}",
                ),
                stacked=True,
            ),
            graph(
                "Runs that were skipped",
                "Each minute, by reason: neither success nor failure.",
                "opm",
                Query(each_minute("runs_skipped", "reason"), "{{reason}}"),
                stacked=True,
            ),
        ],
    )


def _work() -> Row:
    return Row(
        "Is the work being done?",
        [
            graph(
                "Backlog",
                "Records that are due; counted up to a bound. The line is the documents' limit for user statuses and "
                "for pending uploads.",
                "short",
                Query(BACKLOG, "{{batch}}: {{record}}"),
                lines=[limit("UserStatusCleanupBacklogHigh")],
            ),
            graph(
                "Oldest due record",
                "Its waiting time as a share of what is promised. At 100 % BatchBacklogTooOld is near, but for what "
                "was held back until lately.",
                "percentunit",
                Query(
                    f"({OLDEST}) / on (batch, record) "
                    "max by (batch, record) (forgekeeper_backlog_age_objective_seconds)",
                    "{{batch}}: {{record}}",
                ),
                lines=[1],
            ),
            graph(
                "Records done",
                "Deleted, given up or scheduled, each second. Backlog without progress is a failure without an error.",
                "cps",
                Query(
                    each_second("records_processed", "batch, record"),
                    "{{batch}}: {{record}}",
                ),
            ),
            graph(
                "Records that failed",
                "Passed over, within the rate interval, by kind of error.",
                "short",
                Query(
                    grown("record_errors", "batch, error_kind"),
                    "{{batch}}: {{error_kind}}",
                ),
                columns=12,
            ),
            graph(
                "Quarantine",
                "What failed more than once, or was refused, and waits for its next try or a person.",
                "short",
                Query("max by (batch, record) (forgekeeper_quarantine_records)", "{{batch}}: {{record}}"),
                Query("max by (reason) (forgekeeper_waiting_artifacts)", "expired artifacts that stay: {{reason}}"),
                columns=12,
            ),
        ],
    )
