"""The page of one batch: how it stands, how its runs end and how long they take, and what is left to do."""

from __future__ import annotations

from collections.abc import Iterable

from grafana_foundation_sdk.models.dashboard import Dashboard

from forgekeeper.batches import all_declared
from metrics.catalogue import table
from metrics.dashboards import runs
from metrics.dashboards.limits import alert_names, documented, limit, runbook
from metrics.dashboards.panels import BAD, WARN, Query, Row, annotation, choice, figure, graph, listing, put_together
from metrics.dashboards.queries import HERE, each_second, grown, of_the_batch

UID = "forgekeeper-batch"
FIRING = f'ALERTS{{alertstate="firing",alertname=~"{"|".join(alert_names())}",batch="$batch"}}'
SINCE_SUCCESS = 'time() - max by (batch) (forgekeeper_last_success_timestamp_seconds{batch="$batch"})'


def choices() -> list[str]:
    """List whatever the label `batch` can be, so that every alert that has one leads here."""
    known = table(all_declared()).values()
    return list(dict.fromkeys(name for metric in known for name in metric.values.get("batch") or ()))


def batch(more: Iterable[Row] = ()) -> Dashboard:
    """Build the dashboard to which alerts lead that are of one batch, or of the child of one; *more* rows come last."""
    return put_together(
        UID,
        "forgekeeper: a batch",
        "One batch, or the child of one. See docs/dashboards.md.",
        [_standing(), runs.endings(), runs.durations(), _records(), _schedule(), _buckets(), _refs(), *more],
        variables=[choice("batch", "Batch", "A batch, or the child of one.", choices())],
        annotations=[
            annotation(
                "Pauses",
                Query(
                    'max by (batch) (forgekeeper_batch_paused_since_timestamp_seconds{batch="$batch"}) * 1000',
                    "{{batch}} was paused",
                ),
                colour="yellow",
                text="Somebody held it back: forgekeeper status",
                value_is_time=True,
            ),
            annotation(
                "Last seen paused",
                Query(
                    'batch:last_paused_timestamp_seconds:max{batch="$batch"} * 1000', "{{batch}} was last seen paused"
                ),
                colour="yellow",
                text="From here on it has its two periods anew",
                value_is_time=True,
            ),
        ],
    )


def _standing() -> Row:
    return Row(
        "How does it stand?",
        [
            figure(
                "Last success",
                "How long ago a run last ended well. Children keep no account of it.",
                "s",
                Query(SINCE_SUCCESS, "ago"),
                nothing="none known",
            ),
            figure(
                "Of its patience",
                "Time without success as a share of two periods and a minute. None while it is held back.",
                "percentunit",
                Query(f"({SINCE_SUCCESS}) / on (batch) batch:schedule_patience_seconds:max", "used up"),
                steps={0.75: WARN, 1: BAD},
            ),
            figure(
                "Failures in a row",
                "Failed attempts since the last success.",
                "short",
                Query('max(forgekeeper_consecutive_failures{batch="$batch"})', "attempts"),
                steps={1: WARN, limit("BatchConsecutiveFailures"): BAD},
            ),
            figure(
                "At work for",
                "How long the run in progress has taken.",
                "s",
                Query('time() - min(forgekeeper_running_since_timestamp_seconds{batch="$batch"})', "so far"),
                nothing="not running",
            ),
            figure(
                "Next tick",
                "When its next tick is due; while it is held back that will be skipped. None while its cron is off.",
                "s",
                Query(
                    '(max(forgekeeper_scheduler_next_run_timestamp_seconds{batch="$batch"}) > 0) - time()', "from now"
                ),
            ),
            figure(
                "Held back",
                "For how long it has been stopped, held, paused or off (BatchStopped, BatchHeld, BatchPaused, "
                "BatchOff), or blocked (BatchBlocked).",
                "s",
                Query('time() - max(forgekeeper_batch_stopped_since_timestamp_seconds{batch="$batch"})', "stopped for"),
                Query('time() - max(forgekeeper_batch_held_since_timestamp_seconds{batch="$batch"})', "held for"),
                Query('time() - max(forgekeeper_batch_paused_since_timestamp_seconds{batch="$batch"})', "paused for"),
                Query('time() - max(forgekeeper_batch_blocked_since_timestamp_seconds{batch="$batch"})', "blocked for"),
                Query('time() - max(forgekeeper_batch_off_since_timestamp_seconds{batch="$batch"})', "off for"),
                steps={limit("BatchPaused", severity="info"): WARN},
                nothing="no",
            ),
            listing(
                "Which alerts fire",
                "Alerts of this batch; the name leads to what to do.",
                f"max by (alertname, severity, team) ({FIRING})",
                names={"alertname": "alert", "severity": "severity", "team": "team"},
                links={"alert": runbook("${__value.text}")},
            ),
            listing(
                "Who and what it is",
                "Its document, its queue, and the team that its alerts go to.",
                'max by (batch, spec, queue_name, team) (forgekeeper_info{batch="$batch"})',
                names={"batch": "batch", "spec": "document", "queue_name": "queue", "team": "team"},
                links={},
            ),
        ],
    )


def _records() -> Row:
    age = 'time() - min by (record) (forgekeeper_backlog_oldest_timestamp_seconds{batch="$batch"})'
    return Row(
        "What has it done, and what is left?",
        [
            graph(
                "Backlog",
                "Records that are due; counted up to a bound. The limit is the document's.",
                "short",
                Query('max by (record) (forgekeeper_backlog_records{batch="$batch"})', "{{record}}"),
                Query(of_the_batch(documented("backlog")), "limit of the document"),
            ),
            graph(
                "Oldest due record",
                "How long it has waited, and how long it may. Without an objective it is held back on purpose.",
                "s",
                Query(age, "{{record}}"),
                Query(
                    'max by (record) (forgekeeper_backlog_age_objective_seconds{batch="$batch"})',
                    "{{record}}: objective",
                ),
            ),
            graph(
                "Quarantine",
                "What failed more than once, or was refused, and waits for its next try or a person.",
                "short",
                Query('max by (record) (forgekeeper_quarantine_records{batch="$batch"})', "{{record}}"),
            ),
            graph(
                "Records looked at and done",
                "Each second. Looking at many and doing none, with a backlog, is no progress.",
                "cps",
                Query(
                    each_second("records_examined", "record", HERE),
                    "{{record}}: looked at",
                ),
                Query(
                    each_second("records_processed", "record", HERE),
                    "{{record}}: done",
                ),
            ),
            graph(
                "Records that failed",
                "Passed over, within the rate interval.",
                "short",
                Query(
                    grown("record_errors", "record, error_kind", HERE),
                    "{{record}}: {{error_kind}}",
                ),
            ),
            graph(
                "Children sent",
                "By its fan-out; how often that was cut off at its limit; projects without their repositories.",
                "short",
                Query(
                    grown("children_enqueued", "child", HERE),
                    "{{child}}",
                ),
                Query(grown("fanout_limit_reached", where=HERE), "cut off"),
                Query(grown("missing_repositories", where=HERE), "without a repository"),
            ),
        ],
    )


def _schedule() -> Row:
    return Row(
        "Is it sent in time?",
        [
            graph(
                "Since it was last sent",
                "Beyond its patience BatchNotEnqueued is near. Children are not sent on schedule.",
                "s",
                Query(
                    'time() - max(forgekeeper_scheduler_last_enqueue_timestamp_seconds{batch="$batch"})', "since sent"
                ),
                Query('time() - max(forgekeeper_last_run_timestamp_seconds{batch="$batch"})', "since a run ended"),
                Query('max(batch:schedule_patience_seconds:max{batch="$batch"})', "patience"),
                Query('max(forgekeeper_schedule_interval_seconds{batch="$batch"})', "period"),
            ),
            graph(
                "Sent",
                "Messages sent on schedule, within the rate interval.",
                "short",
                Query(grown("scheduler_enqueued", where=HERE), "sent"),
            ),
            graph(
                "Not sent, or taken back",
                "Ticks that were missed, suppressed or claimed before their time (a clock was ahead), sends that "
                "failed, runs taken from a silent worker.",
                "short",
                Query('max(forgekeeper_ticks_ahead{batch="$batch"})', "before their time"),
                Query(grown("scheduler_misfires", where=HERE), "missed"),
                Query(
                    grown("scheduler_max_instances", where=HERE),
                    "suppressed",
                ),
                Query(
                    grown("scheduler_enqueue_failures", where=HERE),
                    "not sent",
                ),
                Query(
                    grown("scheduler_runs_reopened", where=HERE),
                    "worker lost",
                ),
            ),
        ],
    )


def _buckets() -> Row:
    return Row(
        "Document 11: are the artifact buckets in order?",
        [
            graph(
                "Buckets",
                "Free and at work; together they should reach the limit, which is 0 while the batch is held back.",
                "short",
                Query("max by (state) (forgekeeper_buckets)", "{{state}}"),
                Query("max(forgekeeper_buckets_limit)", "limit"),
            ),
            graph(
                "Longest silence of a bucket",
                "Of the bucket that has been silent for longest. The line is BatchBucketStuck's.",
                "s",
                Query("time() - min(forgekeeper_bucket_oldest_occupied_timestamp_seconds)", "silent"),
                lines=[limit("BatchBucketStuck")],
            ),
            graph(
                "Recovered and refilled",
                "Within an hour: buckets taken back from silent workers, and missing ones that were added. The line is "
                "BatchBucketRecoveries'.",
                "short",
                Query("sum(increase(forgekeeper_buckets_recovered_total[1h]))", "recovered"),
                Query("sum(increase(forgekeeper_buckets_refilled_total[1h]))", "refilled"),
                lines=[limit("BatchBucketRecoveries")],
            ),
            graph(
                "Feature flags",
                "Without the first, artifacts are not deleted, by decision.",
                "bool_on_off",
                Query("max by (flag) (forgekeeper_feature_flag_enabled)", "{{flag}}"),
                columns=24,
            ),
        ],
        folded=True,
    )


def _refs() -> Row:
    return Row(
        "Document 58: are leases and repositories in order?",
        [
            graph(
                "Leases taken, refused, lost",
                "Within the rate interval. A lost one ran out under a job that was still at work.",
                "short",
                Query(grown("lease_acquisitions"), "taken"),
                Query(grown("lease_contentions"), "refused"),
                Query(grown("lease_lost"), "lost"),
                columns=12,
            ),
            graph(
                "Stale locks in repositories",
                "A packed-refs.lock older than any deletion of ours: another git was killed, and pushes fail too.",
                "short",
                Query("max(forgekeeper_git_stale_locks)", "repositories"),
                lines=[1],
                columns=12,
            ),
        ],
        folded=True,
    )
