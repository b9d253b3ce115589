"""What the exporter says of rows, keys and disks: what is due, what is held back, what waits for a person."""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from pydantic import SecretStr

from forgekeeper.api.batches import FeatureFlag
from forgekeeper.delivery import queues
from forgekeeper.delivery.broker import broker
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.event_watch import EventWatch
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.operator_events import OperatorEvent
from forgekeeper.ledger.retry_delays import MAX_RETRIES
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import now, queries
from forgekeeper.platform.webhook import Webhook
from forgekeeper.sources.outbox import MAX_OBJECT_ATTEMPTS, DeletedObject
from forgekeeper.targets import sentinel
from models import BulkImport, BulkImportEntity, GitRefDeletion, JobArtifact, Project, UserStatus
from tests.harness.artifacts import buckets
from tests.harness.catalogue import METRICS, SERIES, select_process_metrics
from tests.harness.installation import INSTALLATION
from tests.harness.leases import hold_lease
from tests.harness.performing import start_run
from tests.harness.receivers import answer_with, run_receiver
from tests.harness.stale_uploads import uploads as register

DAY = timedelta(days=1)
NAME = "user_status_cleanup"
ALWAYS_THERE = {
    metric.name
    for metric in select_process_metrics("exporter")
    if not metric.name.endswith(("_timestamp_seconds", "last_run_duration_seconds", "root_readable"))
}


def ended_run(state="succeeded", *, failures=0):
    started = start_run(NAME, JobRun.claim_manual(NAME, by="test"), by="test")
    for _ in range(failures):
        JobRun.fail(started, "x", delay=timedelta(0), retries=99)
        started = start_run(NAME, started.id, by="test")
    if state == "succeeded":
        JobRun.succeed(started, {})
    elif state == "failed":
        JobRun.fail(started, "x", delay=timedelta(0), retries=0)


def near(instant, tolerance=20.0):
    return pytest.approx(instant.timestamp(), abs=tolerance)


def test_every_series_that_can_be_zero_is_there_on_the_first_scrape_and_only_what_is_in_the_catalogue(look, promtool):
    page = look()

    expected = {name: set(METRICS[name].children) for name in ALWAYS_THERE}
    # A batch whose flag is off may wait.
    expected["forgekeeper_backlog_age_objective_seconds"] -= {("delete_artifact_bucket", "expired_artifact")}
    shown = {
        metric.name: {tuple(labels[name] for name in metric.labels) for labels in page.labels(metric.name)}
        for metric in select_process_metrics("exporter")
    }
    assert {name: shown[name] for name in ALWAYS_THERE} == expected
    assert page.names <= shown.keys()
    assert promtool(page.text) == ""


def test_a_collector_of_a_batch_whose_table_the_forge_lacks_has_not_failed(look, database):
    database.execute_sql("alter table bulk_imports rename to gone")
    try:
        page = look()
    finally:
        database.execute_sql("alter table gone rename to bulk_imports")

    failed = {labels[0] for labels, value in page.series("exporter_collector_success").items() if not value}
    assert (failed, page.value("backlog_records", batch="stale_imports", record="stale_import")) == (set(), None)


def test_the_interval_is_the_longest_gap_of_the_configured_schedule(look, settings):
    page = look(cron_stale_imports=settings.cron_user_status_cleanup)

    assert page.value("schedule_interval_seconds", batch="stale_imports") == 60
    assert page.value("schedule_interval_seconds", batch="stale_direct_uploads") == 360
    assert page.value("schedule_interval_seconds", batch="expired_job_artifacts") == 300


def blocked(batch):
    started = start_run(batch, JobRun.claim_manual(batch, by="test"), by="test")
    JobRun.block(started, {}, reason="no_repositories", sentence="there are none")


@pytest.mark.parametrize(
    ("hold_back", "name", "labels", "interval"),
    [
        (lambda batch: Hold.add(batch, "pause", until=None, reason=None, by="test"), "paused", {}, False),
        (lambda batch: Hold.add(batch, "stop", reason="test", by="test"), "stopped", {}, False),
        (lambda batch: Hold.add(batch, "breaker", by="w", reason="test"), "held", {"reason": "breaker"}, False),
        (blocked, "blocked", {"reason": "no_repositories"}, True),
    ],
    ids=["paused", "stopped", "held", "blocked"],
)
def test_a_batch_that_is_held_back_says_since_when_and_its_records_may_wait(look, hold_back, name, labels, interval):
    hold_back("git_ref_cleanup")
    FeatureFlag.turn("bulk_delete_job_artifacts", on=True)

    page = look()

    assert page.value(f"batch_{name}_since_timestamp_seconds", batch="git_ref_cleanup", **labels) == near(now())
    assert (page.value("schedule_interval_seconds", batch="git_ref_cleanup") is not None) == interval
    assert set(page.series("backlog_age_objective_seconds")) == set(SERIES["objectives"]) - {
        ("clean_project_refs", "git_ref_deletion")
    }


def test_a_batch_on_no_timetable_says_since_when_and_nothing_is_expected_of_it(look):
    Batch.register(["stale_imports"])

    page = look(cron_stale_imports=None)

    assert page.value("batch_off_since_timestamp_seconds", batch="stale_imports", reason="cron_off") == near(now())
    assert page.value("registered_timestamp_seconds", batch="stale_imports") == near(now())
    assert page.value("registered_timestamp_seconds", batch="prune") is None
    assert page.value("schedule_interval_seconds", batch="stale_imports") is None
    assert page.value("backlog_age_objective_seconds", batch="stale_imports", record="entity") is None


def test_a_batch_whose_flag_is_off_says_since_when(look):
    Batch.register(["expired_job_artifacts"])
    since = now() - DAY
    FeatureFlag.insert(name="bulk_delete_job_artifacts", enabled=False, updated_at=since).execute()

    page = look()

    assert page.series("batch_off_since_timestamp_seconds") == {("expired_job_artifacts", "flag_off"): near(since)}


def test_a_run_that_has_ended_well_is_the_last_run_and_the_last_success(look):
    ended_run()
    ended = now() - timedelta(seconds=10)
    JobRun.update(started_at=ended - timedelta(seconds=30), finished_at=ended).execute()

    page = look()

    assert page.value("last_run_timestamp_seconds", batch=NAME) == near(ended, 0.001)
    assert page.value("last_success_timestamp_seconds", batch=NAME) == near(ended, 0.001)
    assert page.value("last_run_duration_seconds", batch=NAME) == 30
    assert page.value("running_since_timestamp_seconds", batch=NAME) is None


def test_failures_are_counted_since_the_last_success_and_a_run_in_progress_says_since_when(look):
    ended_run(failures=7)
    ended_run("failed", failures=1)
    ended_run("open", failures=3)

    page = look()

    assert page.value("consecutive_failures", batch=NAME) == 5
    assert page.value("running_since_timestamp_seconds", batch=NAME) == near(now())


def test_messages_are_counted_by_state_and_nobody_becomes_a_worker(look):
    for _ in range(3):
        broker.enqueue(broker.actors[NAME].message())
    client.lpop(queues.ready_key("cron"))  # what a worker does when it fetches
    client.hset(queues.bodies_key("git.DQ"), "x", b"{}")
    client.delete(queues.HEARTBEATS_KEY)  # of this test, which has sent them

    page = look()

    assert page.value("queue_messages", queue_name="cron", state="ready") == 2
    assert page.value("queue_messages", queue_name="cron", state="unacked") == 1
    assert page.value("queue_messages", queue_name="git", state="delayed") == 1
    assert not client.exists(queues.HEARTBEATS_KEY)


def test_the_oldest_message_is_the_head_of_the_queue(look):
    message, _ = (broker.enqueue(broker.actors[NAME].message()) for _ in range(2))

    oldest = look().series("queue_oldest_message_timestamp_seconds")

    assert oldest == {("cron",): message.message_timestamp / 1000}


def fail(child, key, times, reason="child_failed"):
    for _ in range(times):
        quarantine.record_failure("git_ref_cleanup", child, key, "x", reason=reason)


def test_children_that_wait_for_a_person_and_messages_that_nothing_could_read_are_dead_letters(look):
    fail("clean_project_refs", "1", MAX_RETRIES + 1)
    fail("clean_project_refs", "2", MAX_RETRIES)
    fail("git_ref_deletion", "1", MAX_RETRIES + 1, reason="record_failed")
    for number in ("a", "b"):
        quarantine.record_failure("unknown", "git", number, "its body is not a message", reason="unreadable")

    page = look()

    assert page.value("dead_letter_messages", queue_name="git", batch="clean_project_refs") == 1
    assert page.value("dead_letter_messages", queue_name="git", batch="unknown") == 2
    assert sum(page.series("dead_letter_messages").values()) == 3


def test_a_message_that_was_discarded_is_no_dead_letter_though_redis_keeps_it(look):
    quarantine.record_failure("unknown", "git", "a", "its body is not a message", reason="unreadable")
    client.zadd(queues.dead_letters_key("git"), {"a": 1})

    quarantine.discard(quarantine.Quarantined.select(quarantine.Quarantined.id))

    assert sum(look().series("dead_letter_messages").values()) == 0


@pytest.fixture
def refusing_receiver():
    """A webhook that refuses each event until a test changes its answer."""
    with run_receiver() as server:
        server.answer = answer_with(503)
        yield server


def watch_events(settings, receiver):
    """Find and send events once, in a thread as an exporter does; every event is due afterwards."""
    watch = EventWatch(settings, Webhook(receiver.url, "whsec_aHVudGVyMmh1bnRlcjJodW50ZXIyaHVudGVyMg=="))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(watch.watch_once).result()
    OperatorEvent.update(next_try_at=now()).where(OperatorEvent.next_try_at.is_null(False)).execute()


def test_an_event_that_the_webhook_refuses_has_an_age_until_it_is_accepted(look, settings, refusing_receiver):
    Hold.add(NAME, "breaker", by="w", reason="test")
    watch_events(settings, refusing_receiver)
    found = now() - timedelta(hours=3)
    OperatorEvent.update(at=found).execute()

    refused = look(webhook_url=SecretStr(refusing_receiver.url))
    refusing_receiver.answer = answer_with(204)
    watch_events(settings, refusing_receiver)
    accepted = look(webhook_url=SecretStr(refusing_receiver.url))

    assert refused.value("webhook_oldest_event_timestamp_seconds") == near(found, 0.001)
    assert accepted.value("webhook_oldest_event_timestamp_seconds") is None
    assert (refused.value("webhook_events_given_up"), accepted.value("webhook_events_given_up")) == (0, 0)


def test_an_event_that_the_webhook_refuses_for_a_day_is_counted_and_no_longer_awaited(
    look, settings, refusing_receiver
):
    Hold.add(NAME, "breaker", by="w", reason="test")
    watch_events(settings, refusing_receiver)
    OperatorEvent.update(at=now() - timedelta(hours=25)).execute()
    watch_events(settings, refusing_receiver)

    page = look(webhook_url=SecretStr(refusing_receiver.url))

    assert page.value("webhook_events_given_up") == 1
    assert page.value("webhook_oldest_event_timestamp_seconds") is None


def test_without_a_webhook_no_event_is_late(look, settings, refusing_receiver):
    Hold.add(NAME, "breaker", by="w", reason="test")
    watch_events(settings, refusing_receiver)

    assert look().value("webhook_oldest_event_timestamp_seconds") is None


def test_a_held_lease_is_known_by_its_family_and_says_when_it_ends(look):
    with (
        hold_lease(client, "clean_project_refs:7", ttl=timedelta(seconds=60), holder="a"),
        hold_lease(client, "clean_project_refs:8", ttl=timedelta(seconds=300), holder="b"),
    ):
        page = look()

    assert page.series("lease_held") == {("clean_project_refs",): 1}
    assert page.value("lease_expiry_timestamp_seconds", lease="clean_project_refs") == near(
        now() + timedelta(seconds=300)
    )


def test_buckets_are_counted_and_the_oldest_says_since_when(look):
    FeatureFlag.turn("bulk_delete_job_artifacts", on=True)
    buckets.tidy(client, 5)
    buckets.claim(client, 5)

    page = look()

    assert page.series("buckets") == {("available",): 4, ("occupied",): 1}
    assert page.value("buckets_limit") == 5
    assert page.value("bucket_oldest_occupied_timestamp_seconds") == near(now())


@pytest.mark.parametrize(
    ("hold_back", "limit"),
    [
        (lambda: None, 10),
        (lambda: FeatureFlag.turn("bulk_delete_job_artifacts", on=False), 0),
        (lambda: Hold.add("expired_job_artifacts", "pause", until=None, reason=None, by="test"), 0),
    ],
    ids=["on", "flag off", "paused"],
)
def test_a_batch_that_is_held_back_needs_no_buckets(look, hold_back, limit):
    FeatureFlag.turn("bulk_delete_job_artifacts", on=True)
    FeatureFlag.turn("bulk_delete_job_artifacts_high_concurrency", on=True)
    hold_back()

    assert look().value("buckets_limit") == limit


def test_a_root_is_readable_while_its_sentinel_is_there_and_is_ours(look, tmp_path, settings):
    for name, content in (("ours", INSTALLATION), ("another's", "d15c0"), ("nobody's", ""), ("bare", None)):
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / sentinel.SENTINEL_NAME).write_bytes(sentinel.build_content(content))
    names = ("ours", "another's", "nobody's", "bare", "gone")
    stores = json.dumps({name: (tmp_path / name).as_uri() for name in names})

    page = look(object_stores=type(settings)(object_stores=stores).object_stores, repositories_root=tmp_path / "away")

    assert page.series("root_readable") == {("repositories",): 0, **{(name,): float(name == "ours") for name in names}}
    assert page.value("exporter_collector_success", collector="roots") == 1


@pytest.mark.parametrize(("age", "stale"), [(timedelta(minutes=19), 0), (timedelta(minutes=21), 1)], ids=str)
def test_a_lock_that_outlives_every_deletion_is_stale(look, tmp_path, age, stale):
    sentinel.Folder(tmp_path).create_sentinel(INSTALLATION)
    for number in (1, 2):
        Project.create(id=number, disk_path=f"{number}.git")
        GitRefDeletion.create(project_id=number, ref="refs/heads/x")
        (tmp_path / f"{number}.git").mkdir()
    lock = tmp_path / "2.git" / "packed-refs.lock"
    lock.touch()
    left = time.time() - age.total_seconds()
    os.utime(lock, (left, left))

    assert look(repositories_root=tmp_path).value("git_stale_locks") == stale


def test_the_exporter_opens_no_file_of_a_repository_for_writing(look, tmp_path):
    sentinel.Folder(tmp_path).create_sentinel(INSTALLATION)
    Project.create(id=1, disk_path="1.git")
    GitRefDeletion.create(project_id=1, ref="refs/heads/x")
    (tmp_path / "1.git").mkdir()
    (tmp_path / "1.git" / "packed-refs.lock").touch()
    opened = {}

    def note(event, facts):
        # A hook stays for as long as the process: this one notes what lies in this test's own folder alone.
        if event == "open" and str(facts[0]).startswith(str(tmp_path)):
            opened[facts[0]] = facts[2]

    sys.addaudithook(note)

    look(repositories_root=tmp_path)

    assert opened
    assert not any(flags & (os.O_WRONLY | os.O_RDWR) for flags in opened.values())


def test_ticks_whose_time_has_not_come_are_counted(look):
    JobRun.record_ticks(NAME, [now() + timedelta(hours=1), now() - timedelta(hours=1)], "skipped", by="test")

    assert look().value("ticks_ahead", batch=NAME) == 1


def ago(**duration):
    return now() - timedelta(**duration)


def a_status(at):
    UserStatus.create(user_id=UserStatus.select().count() + 1, clear_status_at=at)


ARTIFACT = {"project_id": 1, "job_id": 1, "file_type": 1, "file_final_path": "x", "locked": 0}
ENTITY = {"source_full_path": "a", "destination_name": "b", "destination_namespace": "c", "bulk_import_id": 1}
BACKLOGS = {
    ("user_status_cleanup", "user_status"): a_status,
    ("delete_artifact_bucket", "expired_artifact"): lambda at: JobArtifact.create(**ARTIFACT, expire_at=at),
    ("clean_project_refs", "git_ref_deletion"): lambda at: GitRefDeletion.create(
        project_id=1, ref="refs/x", updated_at=at
    ),
    ("delete_objects", "deleted_object"): lambda at: DeletedObject.create(store_dir="a", file="b", pick_up_at=at),
    ("stale_imports", "bulk_import"): lambda at: BulkImport.create(user_id=1, updated_at=at - DAY),
    ("stale_imports", "entity"): lambda at: BulkImportEntity.create(**ENTITY, updated_at=at - DAY),
    ("stale_direct_uploads", "stale_upload"): lambda at: client.zadd(
        register.keys.pending, {f"s:{at}": int((at - timedelta(hours=3)).timestamp())}
    ),
}
"""How a record is added that is due since an instant."""


@pytest.mark.parametrize("kind", BACKLOGS, ids=lambda kind: kind[1])
def test_a_backlog_is_counted_and_as_old_as_its_oldest_record(look, kind):
    add = BACKLOGS[kind]
    add(ago(minutes=10))
    add(ago(minutes=30))
    if kind[1] != "git_ref_deletion":
        add(ago(minutes=-10))  # not due yet

    page = look()

    labels = dict(zip(("batch", "record"), kind, strict=True))
    assert page.value("backlog_records", **labels) == 2
    assert page.value("backlog_oldest_timestamp_seconds", **labels) == near(ago(minutes=30))


def test_a_count_goes_up_to_its_bound_and_no_further(look, monkeypatch):
    monkeypatch.setattr(queries, "MAX_COUNTED_ROWS", 3)
    for _ in range(5):
        a_status(ago(minutes=1))

    assert look().value("backlog_records", batch="user_status_cleanup", record="user_status") == 3


def test_what_failed_more_than_once_or_was_refused_is_in_quarantine(look):
    client.zadd(register.keys.failed, {"s:x": 1})
    DeletedObject.create(store_dir="a", file="b", attempts=MAX_OBJECT_ATTEMPTS)
    GitRefDeletion.create(project_id=1, ref="refs/x", status=3)
    for key in (1, 1, 2):
        quarantine.record_failure("user_status_cleanup", "user_status", str(key), "x", reason="record_failed")
    quarantine.record_failure("git_ref_cleanup", "clean_project_refs", "7", "x", reason="worker_lost")
    quarantine.record_failure("unknown", "cron", "8", "x", reason="unreadable")

    counted = look().series("quarantine_records")

    assert {labels: count for labels, count in counted.items() if count} == {
        ("stale_direct_uploads", "failed_upload"): 1,
        ("delete_objects", "dead_object"): 1,
        ("clean_project_refs", "rejected_ref"): 1,
        ("user_status_cleanup", "user_status"): 1,
        ("git_ref_cleanup", "clean_project_refs"): 1,
        ("unknown", "message"): 1,
    }


def test_expired_artifacts_that_wait_for_the_forge_are_counted(look):
    without_a_path = {"file_final_path": "", "file": "x.zip"}
    others = ({"locked": 2, "expire_at": ago(hours=-1)}, {"locked": 1}, {"file": None}, {"locked": 2, "file_type": 3})
    for facts in ({}, *others):
        JobArtifact.create(**ARTIFACT | {"expire_at": ago(hours=1)} | without_a_path | facts)
    for _ in range(2):
        JobArtifact.create(**ARTIFACT | {"expire_at": ago(hours=1), "locked": 2})

    assert look().series("waiting_artifacts") == {("no_path",): 1, ("unknown",): 2}
