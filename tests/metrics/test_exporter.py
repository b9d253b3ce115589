"""What the exporter says of rows, keys and disks, and that it says it whatever is away."""

import json
import os
import socket
import threading
import time
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import psycopg2
import pytest
from forgekeeper.delivery.enqueue_unique import enqueue_unique
from forgekeeper.delivery.sizes import LARGEST_FETCHED
from prometheus_client import generate_latest

from forgekeeper import collectors
from forgekeeper.connections import client
from forgekeeper.database import backlog, database, now
from forgekeeper.delivery.broker import NAMESPACE, broker
from forgekeeper.flags import FeatureFlag
from forgekeeper.locks import lease
from forgekeeper.probe import Probe
from forgekeeper.runs import quarantine
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.holds import BY_PEOPLE, Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.storage import sentinel
from forgekeeper.storage.outbox import MAX_ATTEMPTS, DeletedObject
from metrics import exporter
from metrics.catalogue.labels import CLOCKS
from models import WAITS, BulkImport, BulkImportEntity, GitRefDeletion, JobArtifact, Project, UserStatus
from tests.harness.catalogue import LABELS, METRICS, of
from tests.harness.installation import INSTALLATION
from tests.harness.ledger import start_run
from tests.harness.ports import free_ports
from tests.harness.programs import Program
from tests.harness.waiting import wait_until
from workers.expired_job_artifacts import buckets
from workers.stale_direct_uploads import by_hand, register

from ..system.proxy import postgres_through, redis_through  # noqa: TID252, pytest puts no folder on the path
from .pages import read

ROOT = Path(__file__).parents[2]
IN_REDIS = {"queues", "dead_letters", "leases", "uploads"}
IN_BOTH = {"buckets", "clocks"}
WITHOUT_BOTH = {"roots"}
PROMISED = 2.0
"""Seconds that a scrape takes at most, whatever is away."""
TRIES = 4
"""So often may the machine be busy elsewhere for some of them."""
LIMIT = 30.0
FOREVER = timedelta(days=1)
NAME = "user_status_cleanup"
ALWAYS_THERE = {
    metric.name
    for metric in of("exporter")
    if not metric.name.endswith(("_timestamp_seconds", "last_run_duration_seconds", "root_readable"))
}


@pytest.fixture
def look(database, settings, monkeypatch):
    """Scrape an exporter of our own, with settings of one's choice; it waits for a busy machine."""

    def collect(*, patience=LIMIT, **changed):
        monkeypatch.setattr(exporter, "PATIENCE", patience)
        return read(generate_latest(exporter.registry(settings.model_copy(update=changed))).decode())

    return collect


@pytest.fixture
def start(database, settings, tmp_path):
    """Start `forgekeeper exporter` as a process; return it and its URL."""
    running = []

    def begin(**changed):
        (port,) = free_ports(1)
        environment = {"METRICS_PORT_EXPORTER": port, **changed}
        running.append(
            Program(tmp_path / f"exporter-{len(running)}.log", "-m", "forgekeeper.cli", "exporter", **environment)
        )
        return running[-1], f"http://127.0.0.1:{port}/metrics"

    yield begin
    for program in running:
        program.kill()


@pytest.fixture
def black_hole():
    """The port of a server that accepts everybody and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        yield silent.getsockname()[1]


def ended_run(state="succeeded", *, failures=0, batch=NAME):
    run_id = JobRun.claim_manual(batch, by="test")
    started = start_run(batch, run_id, by="test")
    for _ in range(failures):
        JobRun.fail(started, "x", delay=timedelta(0), retries=99)
        started = start_run(batch, run_id, by="test")
    if state == "succeeded":
        JobRun.succeed(started, {})
    elif state == "failed":
        JobRun.fail(started, "x", delay=timedelta(0), retries=0)
    return run_id


def near(instant, tolerance=20.0):
    return pytest.approx(instant.timestamp(), abs=tolerance)


# The first scrape


def bury(queue, letter, body):
    client.zadd(f"{NAMESPACE}:{queue}.XQ", {letter: 1})
    client.hset(f"{NAMESPACE}:{queue}.XQ.msgs", letter, body)


def test_every_series_that_can_be_zero_is_there_on_the_first_scrape(look):
    page = look()

    assert {name: set(page.series(name.removeprefix("forgekeeper_"))) for name in ALWAYS_THERE} == {
        name: {
            tuple(value for _, value in sorted(zip(METRICS[name].labels, child, strict=True)))
            for child in METRICS[name].children
        }
        for name in ALWAYS_THERE
        if name != "forgekeeper_backlog_age_objective_seconds"
    } | {
        "forgekeeper_backlog_age_objective_seconds": set(LABELS.objectives)
        - {("delete_artifact_bucket", "expired_artifact")}
    }


def test_every_collector_works_on_empty_servers(look):
    assert look().series("exporter_collector_success") == {(name,): 1 for name in LABELS.collectors}


def test_nothing_is_shown_that_the_catalogue_does_not_have(look):
    ended_run()

    assert look().names <= {metric.name for metric in of("exporter")}


def test_promtool_has_nothing_against_the_page(look, promtool):
    ended_run()

    assert promtool(look().text) == ""


# batches


def test_the_interval_is_the_longest_gap_of_the_configured_schedule(look, settings):
    page = look(cron_stale_imports=settings.cron_user_status_cleanup)

    assert page.value("schedule_interval_seconds", batch="stale_imports") == 60
    assert page.value("schedule_interval_seconds", batch="stale_direct_uploads") == 360
    assert page.value("schedule_interval_seconds", batch="expired_job_artifacts") == 300


def test_of_a_paused_batch_nothing_is_expected(look):
    Hold.add("git_ref_cleanup", "pause", until=None, reason=None, by="test")
    FeatureFlag.turn("bulk_delete_job_artifacts", on=True)

    page = look()

    assert page.value("schedule_interval_seconds", batch="git_ref_cleanup") is None
    assert set(page.series("backlog_age_objective_seconds")) == set(LABELS.objectives) - {
        ("clean_project_refs", "git_ref_deletion")
    }
    assert page.value("batch_paused_since_timestamp_seconds", batch="git_ref_cleanup") == near(now())


@pytest.mark.parametrize(
    ("hold_back", "name", "labels"),
    [
        (lambda: Hold.add("git_ref_cleanup", "stop", reason="test", by="test"), "stopped", {}),
        (lambda: Hold.add("git_ref_cleanup", "breaker", by="worker-1:9", reason="test"), "held", {"reason": "breaker"}),
    ],
    ids=["stopped", "held"],
)
def test_of_a_batch_that_is_stopped_or_held_nothing_is_expected(look, hold_back, name, labels):
    hold_back()
    FeatureFlag.turn("bulk_delete_job_artifacts", on=True)

    page = look()

    assert page.value("schedule_interval_seconds", batch="git_ref_cleanup") is None
    assert ("clean_project_refs", "git_ref_deletion") not in page.series("backlog_age_objective_seconds")
    assert page.value(f"batch_{name}_since_timestamp_seconds", batch="git_ref_cleanup", **labels) == near(now())


def test_pausing_again_does_not_make_a_pause_younger(look):
    Hold.add(NAME, "pause", until=None, reason=None, by="test")
    Hold.update(since=now() - FOREVER).execute()
    Hold.add(NAME, "pause", until=now() + FOREVER, reason="still", by="test")

    since = look().value("batch_paused_since_timestamp_seconds", batch=NAME)

    assert since == near(now() - FOREVER)


def test_a_new_pause_after_one_that_has_ended_counts_from_its_own_beginning(look):
    Hold.add(NAME, "pause", until=now() - timedelta(seconds=1), reason=None, by="test")
    Hold.update(since=now() - FOREVER).execute()
    Hold.add(NAME, "pause", until=None, reason=None, by="test")

    assert look().value("batch_paused_since_timestamp_seconds", batch=NAME) == near(now())


def test_a_resumed_batch_is_expected_again(look):
    Hold.add(NAME, "pause", until=None, reason=None, by="test")
    Hold.lift(NAME, BY_PEOPLE)

    page = look()

    assert page.value("schedule_interval_seconds", batch=NAME) == 60
    assert page.value("batch_paused_since_timestamp_seconds", batch=NAME) is None


def blocked_run(batch):
    started = start_run(batch, JobRun.claim_manual(batch, by="test"), by="test")
    JobRun.block(started, {}, reason="no_repositories", sentence="there are none")


def test_a_blocked_batch_says_since_when_and_why_and_its_records_may_wait(look):
    blocked_run("git_ref_cleanup")
    FeatureFlag.turn("bulk_delete_job_artifacts", on=True)

    page = look()

    since = page.value("batch_blocked_since_timestamp_seconds", batch="git_ref_cleanup", reason="no_repositories")
    assert since == near(now())
    assert page.value("schedule_interval_seconds", batch="git_ref_cleanup") is not None
    assert set(page.series("backlog_age_objective_seconds")) == set(LABELS.objectives) - {
        ("clean_project_refs", "git_ref_deletion")
    }


def test_rows_of_no_batch_make_no_series_and_reasons_of_any_length_short_ones(look):
    nobody = "\x1b" + "x" * 100_000
    Batch.create(name=nobody, blocked_reason="x", blocked_since=now())
    Hold.add(nobody, "pause", reason=None, by="test")
    Batch.create(name=NAME, blocked_since=now(), blocked_reason="\x1b" + "x" * 100_000)

    page = look()

    assert page.series("batch_paused_since_timestamp_seconds") == {}
    ((batch, reason),) = page.series("batch_blocked_since_timestamp_seconds")
    assert (batch, len(reason), reason[:6]) == (NAME, collectors.LABEL, r"\x1bxx")


def test_a_message_that_is_too_large_hides_nothing(look):
    large = b"x" * (LARGEST_FETCHED + 1)
    client.hset(f"{NAMESPACE}:git.msgs", "7", large)
    client.rpush(f"{NAMESPACE}:git", "7")
    bury("git", "7", large)

    page = look()

    assert page.value("dead_letter_messages", queue_name="git", batch="unknown") == 1
    assert page.value("queue_messages", queue_name="git", state="ready") == 1
    assert all(page.value("exporter_collector_success", collector=name) == 1 for name in ("queues", "dead_letters"))


def test_a_blocked_run_is_no_success(look):
    blocked_run(NAME)

    page = look()

    assert page.value("last_run_timestamp_seconds", batch=NAME) == near(now())
    assert page.value("last_success_timestamp_seconds", batch=NAME) is None
    assert page.value("consecutive_failures", batch=NAME) == 0


def test_a_blocked_batch_that_is_paused_is_not_told_of(look):
    blocked_run(NAME)
    Hold.add(NAME, "pause", until=None, reason=None, by="test")

    assert look().series("batch_blocked_since_timestamp_seconds") == {}


def test_a_batch_that_is_on_no_timetable_says_since_when(look):
    Batch.register(["stale_imports"])

    page = look(cron_stale_imports=None)

    assert page.value("batch_off_since_timestamp_seconds", batch="stale_imports", reason="cron_off") == near(now())


def test_a_batch_whose_flag_is_off_says_since_when(look):
    Batch.register(["expired_job_artifacts"])
    since = now() - FOREVER
    FeatureFlag.insert(name="bulk_delete_job_artifacts", enabled=False, updated_at=since).execute()

    page = look()

    assert page.series("batch_off_since_timestamp_seconds") == {("expired_job_artifacts", "flag_off"): near(since)}


def test_of_a_batch_whose_schedule_is_off_nothing_is_expected(look):
    page = look(cron_stale_imports=None)

    assert page.value("schedule_interval_seconds", batch="stale_imports") is None
    assert page.value("backlog_age_objective_seconds", batch="stale_imports", record="entity") is None


def test_expired_artifacts_may_wait_for_as_long_as_their_flag_is_off(look):
    assert (
        look().value("backlog_age_objective_seconds", batch="delete_artifact_bucket", record="expired_artifact") is None
    )


def test_a_registered_batch_says_since_when(look):
    Batch.register([NAME])

    page = look()

    assert page.value("registered_timestamp_seconds", batch=NAME) == near(now())
    assert page.value("registered_timestamp_seconds", batch="prune") is None


# runs


def test_a_run_that_has_ended_well_is_the_last_run_and_the_last_success(look):
    ended_run()
    ended = now() - timedelta(seconds=10)
    JobRun.update(started_at=ended - timedelta(seconds=30), finished_at=ended).execute()

    page = look()

    assert page.value("last_run_timestamp_seconds", batch=NAME) == near(ended, 0.001)
    assert page.value("last_success_timestamp_seconds", batch=NAME) == near(ended, 0.001)
    assert page.value("last_run_duration_seconds", batch=NAME) == 30
    assert page.value("running_since_timestamp_seconds", batch=NAME) is None


def test_failures_are_counted_over_runs_and_retries_since_the_last_success(look):
    ended_run(failures=7)
    ended_run("failed", failures=1)
    ended_run("open", failures=3)

    assert look().value("consecutive_failures", batch=NAME) == 5


def test_a_success_sets_the_failures_back(look):
    ended_run("failed", failures=2)
    ended_run(failures=1)

    assert look().value("consecutive_failures", batch=NAME) == 0


def test_a_failed_run_is_the_last_run_but_no_success(look):
    ended_run("failed")

    page = look()

    assert page.value("last_run_timestamp_seconds", batch=NAME) == near(now())
    assert page.value("last_success_timestamp_seconds", batch=NAME) is None


def test_a_tick_that_never_ran_is_no_run(look):
    JobRun.record(NAME, [now()], "missed", by="test")

    assert look().value("last_run_timestamp_seconds", batch=NAME) is None


def test_a_run_in_progress_says_since_when(look):
    ended_run("open")

    page = look()

    assert page.value("running_since_timestamp_seconds", batch=NAME) == near(now())
    assert page.value("running_since_timestamp_seconds", batch="prune") is None


# flags


def test_a_flag_that_is_on_is_one(look):
    FeatureFlag.turn("bulk_delete_job_artifacts", on=True)

    assert look().series("feature_flag_enabled") == {
        ("bulk_delete_job_artifacts",): 1,
        ("bulk_delete_job_artifacts_high_concurrency",): 0,
    }


# queues and dead letters


def send(batch=NAME, *, message_id="1", **options):
    message = broker.actors[batch].message().copy(message_id=message_id, options=options)
    enqueue_unique(broker, message)
    return message


def test_messages_are_counted_by_state_without_asking_the_broker(look):
    for number in range(3):
        send(message_id=str(number))
    client.lpop(f"{NAMESPACE}:cron")  # what a worker does when it fetches
    client.hset(f"{NAMESPACE}:git.DQ.msgs", "x", b"{}")

    page = look()

    assert page.value("queue_messages", queue_name="cron", state="ready") == 2
    assert page.value("queue_messages", queue_name="cron", state="unacked") == 1
    assert page.value("queue_messages", queue_name="git", state="delayed") == 1
    assert not client.exists(f"{NAMESPACE}:__heartbeats__")


def test_the_oldest_message_is_the_head_of_the_queue(look):
    message = send()
    send(message_id="2")

    oldest = look().series("queue_oldest_message_timestamp_seconds")

    assert oldest == {("cron",): message.message_timestamp / 1000}


def test_a_message_that_was_delayed_is_as_old_as_the_end_of_its_delay(look):
    send(forgekeeper_due_ms=1_700_000_000_000)

    assert look().value("queue_oldest_message_timestamp_seconds", queue_name="cron") == 1_700_000_000


@pytest.mark.parametrize("body", [b"\xff", b"[]", b'{"options": 3}', b'{"message_timestamp": "x"}'])
def test_a_body_that_is_no_message_breaks_nothing(look, body):
    client.rpush(f"{NAMESPACE}:cron", "x")
    client.hset(f"{NAMESPACE}:cron.msgs", "x", body)
    bury("cron", "x", body)

    page = look()

    assert page.value("exporter_collector_success", collector="queues") == 1
    assert page.value("exporter_collector_success", collector="dead_letters") == 1
    assert page.value("queue_messages", queue_name="cron", state="ready") == 1


def test_dead_letters_are_counted_by_queue_and_batch(look):
    for number in range(1_500):
        bury("git", str(number), broker.actors["clean_project_refs"].message(number).encode())
    bury("cron", "1", broker.actors["prune"].message().encode())

    page = look()

    assert page.value("dead_letter_messages", queue_name="git", batch="clean_project_refs") == 1_500
    assert page.value("dead_letter_messages", queue_name="cron", batch="prune") == 1
    assert page.value("dead_letter_messages", queue_name="cron", batch=NAME) == 0


@pytest.mark.parametrize("body", [b"\xff", b"[]", b'{"actor_name": 3}', b'{"actor_name": "of_long_ago"}'])
def test_a_dead_letter_that_is_of_no_batch_is_counted_as_unknown(look, body):
    bury("git", "x", body)
    bury("git", "y", broker.actors["clean_project_refs"].message(1).encode())

    page = look()

    assert page.value("dead_letter_messages", queue_name="git", batch="unknown") == 1
    assert page.value("dead_letter_messages", queue_name="cron", batch="unknown") == 0


def test_a_dead_letter_in_a_queue_that_is_not_its_batch_s_is_not_overlooked(look):
    bury("objects", "x", broker.actors["clean_project_refs"].message(1).encode())

    assert look().value("dead_letter_messages", queue_name="objects", batch="unknown") == 1


# leases and buckets


def test_a_held_lease_is_known_by_its_family_and_says_when_it_ends(look):
    with (
        lease(client, "clean_project_refs:7", ttl=timedelta(seconds=60), holder="a"),
        lease(client, "clean_project_refs:8", ttl=timedelta(seconds=300), holder="b"),
    ):
        page = look()

    assert page.series("lease_held") == {("clean_project_refs",): 1}
    assert page.value("lease_expiry_timestamp_seconds", lease="clean_project_refs") == near(
        now() + timedelta(seconds=300)
    )


def test_a_lease_that_nobody_holds_has_no_end(look):
    page = look()

    assert page.series("lease_held") == {("clean_project_refs",): 0}
    assert page.series("lease_expiry_timestamp_seconds") == {}


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


# roots and locks


def test_a_root_is_readable_while_its_sentinel_is_there(look, tmp_path, settings):
    stores = {}
    for name in ("good", "bare"):
        (tmp_path / name).mkdir()
        stores[name] = (tmp_path / name).as_uri()
    sentinel.Folder(tmp_path / "good").create_sentinel(INSTALLATION)
    stores["gone"] = (tmp_path / "gone").as_uri()
    configured = type(settings)(object_stores=json.dumps(stores)).object_stores

    page = look(object_stores=configured, repositories_root=tmp_path / "unmounted")

    assert page.series("root_readable") == {("good",): 1, ("bare",): 0, ("gone",): 0, ("repositories",): 0}
    assert page.value("exporter_collector_success", collector="roots") == 1


def test_a_root_of_another_installation_or_of_nobody_is_none_of_ours(look, tmp_path, settings):
    stores = {}
    for name, content in (("ours", INSTALLATION), ("another's", "d15c0"), ("nobody's", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / sentinel.NAME).write_bytes(sentinel.text(content))
        stores[name] = (tmp_path / name).as_uri()
    configured = type(settings)(object_stores=json.dumps(stores)).object_stores

    page = look(object_stores=configured)

    assert page.series("root_readable") == {("ours",): 1, ("another's",): 0, ("nobody's",): 0}


def test_a_store_that_never_answers_is_unreadable_and_hides_no_other(look, tmp_path, settings, black_hole):
    sentinel.Folder(tmp_path).create_sentinel(INSTALLATION)
    silent = f"s3://bucket?endpoint=http://127.0.0.1:{black_hole}&allow_http=true&region=x&access_key_id=a&secret_access_key=b"
    configured = type(settings)(object_stores=json.dumps({"s": silent, "f": tmp_path.as_uri()})).object_stores

    page = look(object_stores=configured)

    assert page.series("root_readable") == {("s",): 0, ("f",): 1}
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


def test_of_locks_below_an_unmounted_root_nothing_is_said(look, tmp_path):
    Project.create(id=1, disk_path="1.git")
    GitRefDeletion.create(project_id=1, ref="refs/heads/x")

    page = look(repositories_root=tmp_path)

    assert page.value("git_stale_locks") is None
    assert page.value("exporter_collector_success", collector="git_locks") == 1


# backlogs


def ago(**duration):
    return now() - timedelta(**duration)


def a_status(**duration):
    UserStatus.create(user_id=UserStatus.select().count() + 1, clear_status_at=ago(**duration))


def an_artifact(**duration):
    JobArtifact.create(
        project_id=1,
        job_id=JobArtifact.select().count(),
        file_type=1,
        file_final_path="x",
        locked=0,
        expire_at=ago(**duration),
    )


BACKLOGS = {
    ("user_status_cleanup", "user_status"): a_status,
    ("delete_artifact_bucket", "expired_artifact"): an_artifact,
    ("clean_project_refs", "git_ref_deletion"): lambda **duration: GitRefDeletion.create(
        project_id=1, ref="refs/x", updated_at=ago(**duration)
    ),
    ("delete_objects", "deleted_object"): lambda **duration: DeletedObject.create(
        store_dir="a", file="b", pick_up_at=ago(**duration)
    ),
    ("stale_imports", "bulk_import"): lambda **duration: BulkImport.create(
        user_id=1, updated_at=ago(days=1, **duration)
    ),
    ("stale_imports", "entity"): lambda **duration: BulkImportEntity.create(
        bulk_import_id=1,
        source_full_path="a",
        destination_name="b",
        destination_namespace="c",
        updated_at=ago(days=1, **duration),
    ),
    ("stale_direct_uploads", "stale_upload"): lambda **duration: client.zadd(
        register.PENDING, {f"s:{duration}": int(ago(hours=3, **duration).timestamp())}
    ),
}


@pytest.mark.parametrize("kind", BACKLOGS, ids=lambda kind: kind[1])
def test_a_backlog_is_counted_and_as_old_as_its_oldest_record(look, kind):
    add = BACKLOGS[kind]
    add(minutes=10)
    add(minutes=30)

    page = look()

    labels = dict(zip(("batch", "record"), kind, strict=True))
    assert page.value("backlog_records", **labels) == 2
    assert page.value("backlog_oldest_timestamp_seconds", **labels) == near(ago(minutes=30))


@pytest.mark.parametrize("kind", [kind for kind in BACKLOGS if kind[1] != "git_ref_deletion"], ids=lambda kind: kind[1])
def test_what_is_not_due_yet_is_no_backlog(look, kind):
    add = BACKLOGS[kind]
    add(minutes=-10)

    page = look()

    labels = dict(zip(("batch", "record"), kind, strict=True))
    assert page.value("backlog_records", **labels) == 0
    assert page.value("backlog_oldest_timestamp_seconds", **labels) is None


def test_the_oldest_artifact_is_found_whatever_its_class(look):
    for number in range(20):
        an_artifact(minutes=1 + number)

    oldest = look().value("backlog_oldest_timestamp_seconds", batch="delete_artifact_bucket", record="expired_artifact")

    assert oldest == near(ago(minutes=20))


def test_pending_uploads_are_counted_fresh_ones_too(look):
    register.prepare(client, "s", "fresh")

    page = look()

    assert page.value("backlog_records", batch="stale_direct_uploads", record="pending_upload") == 1
    assert page.value("backlog_records", batch="stale_direct_uploads", record="stale_upload") == 0


def test_what_is_being_deleted_is_pending_too_and_what_waits_for_its_day_is_not(look):
    client.zadd(register.DELETING, {"s:claimed": int(ago(hours=-1).timestamp())})
    by_hand.adopt(client, "s", ["orphan"], stale_after=timedelta(hours=3))

    page = look()

    assert page.value("backlog_records", batch="stale_direct_uploads", record="pending_upload") == 1
    assert page.value("backlog_records", batch="stale_direct_uploads", record="stale_upload") == 0


def test_a_count_goes_up_to_its_bound_and_no_further(look, monkeypatch):
    monkeypatch.setattr(backlog, "BOUND", 3)
    for _ in range(5):
        a_status(minutes=1)

    assert look().value("backlog_records", batch="user_status_cleanup", record="user_status") == 3


def test_what_was_given_up_is_counted(look):
    client.zadd(register.FAILED, {"s:x": 1})
    DeletedObject.create(store_dir="a", file="b", attempts=MAX_ATTEMPTS)
    GitRefDeletion.create(project_id=1, ref="refs/x", status=3)

    assert quarantined(look) == {
        ("stale_direct_uploads", "failed_upload"): 1,
        ("delete_objects", "dead_object"): 1,
        ("clean_project_refs", "rejected_ref"): 1,
    }


def quarantined(look):
    return {labels: count for labels, count in look().series("quarantine_records").items() if count}


def waiting(look):
    counted = look().series("waiting_artifacts")
    return [counted.get((reason,)) for reason in ("no_path", "unknown")]


def test_expired_artifacts_that_wait_for_the_forge_are_counted(look):
    due = {"project_id": 1, "job_id": 1, "file_type": 1, "expire_at": ago(hours=1)}
    JobArtifact.create(file_final_path="", file="x.zip", locked=0, **due)
    for _ in range(2):
        JobArtifact.create(file_final_path="x", locked=2, **due)
    JobArtifact.create(file_final_path="x", locked=2, **due | {"expire_at": ago(hours=-1)})
    JobArtifact.create(file_final_path="", file="x.zip", locked=1, **due)
    JobArtifact.create(file_final_path="", locked=0, **due)
    JobArtifact.create(file_final_path="", file="x.zip", locked=2, **due | {"file_type": 3})

    assert waiting(look) == [1, 2]


def test_of_artifacts_that_take_too_long_to_count_nothing_is_said(look, monkeypatch):
    an_artifact(hours=1)
    monkeypatch.setitem(WAITS, "no_path", "pg_sleep(60) is not null")

    assert waiting(look) == [None, 0]


def test_what_failed_more_than_once_is_counted_by_what_it_is(look):
    for key, times in (("1", 1), ("2", 2), ("3", 30)):
        for _ in range(times):
            quarantine.fail("user_status_cleanup", "user_status", key, "InternalError: spoilt", reason="record_failed")
    quarantine.fail("git_ref_cleanup", "clean_project_refs", "7", "its workers died", reason="worker_lost")
    quarantine.fail("cron", "cron", "x", "no actor of that name", reason="unreadable")

    assert quarantined(look) == {
        ("user_status_cleanup", "user_status"): 2,
        ("git_ref_cleanup", "clean_project_refs"): 1,
        ("unknown", "message"): 1,
    }


# Whatever is away


def away(page):
    return {name for (name,), worked in page.series("exporter_collector_success").items() if not worked}


def timed(scrape, url):
    began = time.monotonic()
    page = scrape(url)
    return page, time.monotonic() - began


@pytest.fixture
def first_scrape(start, scrape):
    """Ask an exporter for the first time; another, where the machine did not let it *miss* just that in time."""

    def ask(miss, **changed):
        for _ in range(TRIES):
            _, url = start(**changed)
            assert listening(url)
            page, seconds = timed(scrape, url)
            if (away(page), seconds < PROMISED) == (miss, True):
                break
        return page, seconds

    return ask


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_with_the_database_away_a_scrape_takes_two_seconds_and_says_what_is_missing(first_scrape, black_hole, how):
    port = black_hole if how == "silent" else 1
    missing = set(LABELS.collectors) - IN_REDIS - WITHOUT_BOTH

    page, seconds = first_scrape(missing, DATABASE_URL=f"postgresql://forge:hunter2@127.0.0.1:{port}/x")

    assert seconds < PROMISED
    assert away(page) == missing
    assert page.value("queue_messages", queue_name="cron", state="ready") == 0


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_with_redis_away_a_scrape_takes_two_seconds_and_says_what_is_missing(first_scrape, black_hole, how):
    port = black_hole if how == "silent" else 1
    missing = IN_REDIS | IN_BOTH

    page, seconds = first_scrape(missing, REDIS_URL=f"redis://127.0.0.1:{port}/0")

    assert seconds < PROMISED
    assert away(page) == missing
    assert page.value("backlog_records", batch="user_status_cleanup", record="user_status") == 0


def goes_dark(scrape, url):
    """Scrape until something is missing; return what, and how long the slowest scrape took."""
    slowest, missing = 0.0, set()
    until = time.monotonic() + exporter.CACHE + LIMIT
    while not missing and time.monotonic() < until:
        page, seconds = timed(scrape, url)
        slowest, missing = max(slowest, seconds), away(page)
        threading.Event().wait(0.1)  # what was asked a moment ago is not asked again
    return missing, slowest


@pytest.mark.parametrize(
    ("server", "blind"),
    [("database", set(LABELS.collectors) - IN_REDIS - WITHOUT_BOTH), ("redis", IN_REDIS | IN_BOTH)],
    ids=["database", "redis"],
)
def test_a_server_that_falls_silent_between_two_scrapes_costs_two_seconds_until_it_speaks_again(
    urls, start, scrape, server, blind
):
    through = {"database": postgres_through, "redis": redis_through}[server]
    proxy, url_through = through(getattr(urls, server))
    with proxy:
        _, url = start(**{f"{server.upper()}_URL": url_through})
        assert listening(url)
        for _ in range(TRIES):
            assert wait_until(lambda: away(scrape(url)) == set(), exporter.CACHE + LIMIT)
            proxy.black_hole()
            missing, slowest = goes_dark(scrape, url)
            proxy.passing()
            if (missing, slowest < PROMISED) == (blind, True):
                break

        assert (missing, slowest < PROMISED) == (blind, True)
        assert wait_until(lambda: away(scrape(url)) == set(), exporter.CACHE + LIMIT)


def listening(url):
    """Wait for somebody to listen there; nothing is asked of him yet."""

    def connects():
        with suppress(OSError), socket.create_connection(("127.0.0.1", urlsplit(url).port)):
            return True
        return False

    return wait_until(connects, LIMIT)


def test_a_table_that_is_locked_takes_one_collector_away(urls, look):
    patience = exporter.PATIENCE
    with closing(psycopg2.connect(urls.database)) as other, other.cursor() as cursor:
        cursor.execute("lock table user_statuses in access exclusive mode")

        for _ in range(TRIES):
            began = time.monotonic()
            page = look(patience=patience)
            seconds = time.monotonic() - began
            if (away(page), seconds < PROMISED) == ({"user_statuses"}, True):
                break

    assert seconds < PROMISED
    assert away(page) == {"user_statuses"}


def test_a_table_that_is_missing_takes_one_collector_away(look):
    database.execute_sql("alter table bulk_imports rename to elsewhere")
    try:
        page = look()
    finally:
        database.execute_sql("alter table elsewhere rename to bulk_imports")

    assert away(page) == {"imports"}


def test_two_exporters_at_once_agree(start, scrape_when_up):
    a_status(minutes=1)
    ended_run("failed")
    (_, one), (_, two) = start(), start()
    own = {"forgekeeper_exporter_collector_duration_seconds", "forgekeeper_clock_offset_seconds"}

    def shown(url):
        return {key: value for key, value in scrape_when_up(url).samples.items() if key[0] not in own}

    # On a busy machine a collector of one of them may be missing for a while.
    assert wait_until(lambda: shown(one) == shown(two), LIMIT), (shown(one), shown(two))
    assert away(scrape_when_up(one)) == set()


def test_many_scrapes_at_once_ask_the_servers_once(database, settings, monkeypatch):
    monkeypatch.setattr(exporter, "CACHE", LIMIT)
    shown = exporter.registry(settings)
    pages = []
    threads = [threading.Thread(target=lambda: pages.append(generate_latest(shown))) for _ in range(8)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(pages)) == 1


def test_an_exporter_ends_when_told_to(start, scrape_when_up):
    program, url = start()
    scrape_when_up(url)

    assert program.end() == 0


def test_the_age_of_a_record_is_measured_by_the_database_s_clock(look):
    a_status(seconds=1)

    oldest = look().value("backlog_oldest_timestamp_seconds", batch="user_status_cleanup", record="user_status")

    assert datetime.fromtimestamp(oldest, UTC) <= now()


# Clocks


def test_clocks_that_are_right_are_not_apart(look):
    offsets = look().series("clock_offset_seconds")

    assert set(offsets) == set(CLOCKS)
    assert all(abs(seconds) < 1 for seconds in offsets.values())


def test_a_clock_of_the_database_that_is_ahead_is_measured_against_redis_and_the_host(start, scrape_when_up, ahead):
    _, url = start(DATABASE_URL=ahead(timedelta(days=1)))

    offsets = scrape_when_up(url).series("clock_offset_seconds")

    assert offsets["postgresql", "host"] == pytest.approx(86400, abs=5)
    assert offsets["postgresql", "redis"] == pytest.approx(86400, abs=5)
    assert offsets["redis", "host"] == pytest.approx(0, abs=5)


def test_ticks_whose_time_has_not_come_are_counted(look):
    JobRun.record(NAME, [now() + timedelta(hours=1), now() - timedelta(hours=1)], "skipped", by="test")

    assert look().value("ticks_ahead", batch=NAME) == 1


def test_a_probe_for_which_no_thread_can_be_had_has_no_answer_and_is_asked_the_next_time():
    probe = Probe("queues", lambda: "answer")
    ordinary = threading.stack_size(1 << 46)  # more memory than there is
    try:
        probe.begin()
    finally:
        threading.stack_size(ordinary)
    until = time.monotonic() + PROMISED
    without = probe.wait(until)

    probe.begin()

    assert (without, probe.wait(until)) == (None, "answer")
