"""Batch 100 against real stores: a folder and S3, with entries, stores and runs that fail."""

import os
import sys
import time
from contextlib import closing
from datetime import timedelta

import psycopg2
import pytest
from structlog.testing import capture_logs

from forgekeeper import shutdown
from forgekeeper.connections import client
from forgekeeper.database import database
from forgekeeper.database import now as database_now
from forgekeeper.failpoints import Failpoints, Fault, arm
from forgekeeper.runs.deadline import Deadline
from forgekeeper.runs.ledger import JobRun
from forgekeeper.storage import owners, sentinel, settled, stores
from forgekeeper.storage.objects import OUTSIDE, StoreUnavailable
from forgekeeper.storage.outbox import DeletedObject
from forgekeeper.storage.settled import SettledUpload
from metrics.counting import WORKER
from models import JobArtifact
from tests.harness.catalogue import METRICS
from tests.harness.installation import INSTALLATION
from tests.harness.performing import perform, recorded
from tests.harness.settings import settings_with
from tests.harness.thorough import examples
from workers import stale_direct_uploads
from workers.stale_direct_uploads import (
    CHUNK,
    MAX_EXEC_DURATION,
    MAX_UPLOAD_DURATION,
    Outcome,
    by_hand,
    producer,
)
from workers.stale_direct_uploads import register as uploads

STALE = MAX_UPLOAD_DURATION.total_seconds() + 60
SECOND = timedelta(seconds=1)
BATCH = stale_direct_uploads.stale_direct_uploads
HERE = "artifacts"
ELSEWHERE = "lfs"
INSERT_ARTIFACT = "insert into ci_job_artifacts (project_id, job_id, file_type, file_final_path) values (1, 1, 1, %s)"
CLOSED_PORT = "http://127.0.0.1:1"

pytestmark = pytest.mark.usefixtures("database")


class Clock:
    """A monotonic clock that stands still until it is told to go on."""

    def __init__(self):
        self._seconds = 0.0

    def __call__(self):
        return self._seconds

    def go_past_the_budget(self):
        self._seconds += MAX_EXEC_DURATION.total_seconds()


@pytest.fixture(autouse=True)
def restarted():
    """The stores of a process that has just started; call it to start anew."""
    stores._opened.clear()
    yield stores._opened.clear
    stores._opened.clear()


@pytest.fixture
def other(tmp_path, store):
    """A second store, a folder, for the location `lfs`."""
    (tmp_path / "other").mkdir()
    other = type("Other", (), {"root": tmp_path / "other", "url": f"file://{tmp_path / 'other'}"})()
    sentinel.Store(ELSEWHERE, other.url).create_sentinel(INSTALLATION)
    other.put = lambda *paths: [(other.root / path).write_bytes(b"") for path in paths]
    other.keys = lambda: {file.name for file in other.root.iterdir()} - {sentinel.NAME}
    return other


def run(*options, prefixes=None, **locations):
    settings = settings_with(object_stores=locations, object_prefixes=prefixes or {})
    return perform(BATCH, deadline=options[0] if options else None, settings=settings)


def fail(*options, **locations):
    """Let a run end because stores are away; return what it came to, and what it says."""
    outcome = Outcome()
    with pytest.raises(StoreUnavailable) as failure:
        perform(
            BATCH,
            deadline=options[0] if options else None,
            settings=settings_with(object_stores=locations),
            outcome=outcome,
        )
    return outcome, str(failure.value)


def now():
    return client.time()[0]


def register(*paths, location=HERE, age=STALE):
    register_members(*(f"{location}:{path}" for path in paths), age=age)


def register_members(*members, age=STALE):
    client.zadd(uploads.PENDING, dict.fromkeys(members, now() - age))


def begin(store, *paths, location=HERE, age=STALE):
    """Begin uploads: the objects and their entries."""
    store.put(*paths)
    register(*paths, location=location, age=age)


def time_passes(duration):
    """Let *duration* pass for what lies in deleting."""
    for member, score in client.zrange(uploads.DELETING, 0, -1, withscores=True):
        client.zadd(uploads.DELETING, {member: score - duration.total_seconds()})


def said(lines, sentence):
    return [line for line in lines if line["event"] == sentence]


def members(key):
    return {member.decode(errors="surrogateescape") for member in client.zrange(key, 0, -1)}


def registered():
    """All entries, whatever has become of them."""
    return members(uploads.PENDING) | members(uploads.DELETING) | members(uploads.FAILED)


def attempts():
    return {member.decode(): int(number) for member, number in client.hgetall(uploads.ATTEMPTS).items()}


def away(store):
    """The URL of the same store where nobody listens."""
    proxy = getattr(store, "proxy", None)
    return store.url.replace(proxy.url, CLOSED_PORT) if proxy else f"{store.url}/not/there"


def numbered(count):
    return [f"@final/{number:05}" for number in range(count)]


# What it deletes


def test_with_nothing_registered_nothing_is_done(store):
    assert run(artifacts=store.url) == Outcome(0, 0, False, 0)


def test_a_stale_upload_is_deleted_with_its_entry(store):
    begin(store, "a/b")

    outcome = run(artifacts=store.url)

    assert (outcome, store.keys(), registered(), attempts()) == (Outcome(1, 1, False, 0), set(), set(), {})


def test_fresh_uploads_are_counted_and_left_alone(store):
    begin(store, "old")
    begin(store, "fresh", age=60)

    outcome = run(artifacts=store.url)

    assert (outcome, store.keys(), registered()) == (Outcome(2, 1, False, 0), {"fresh"}, {"artifacts:fresh"})


def test_an_upload_of_exactly_three_hours_is_not_stale(folder):
    while True:
        client.delete(uploads.PENDING)
        begin(folder, "a", age=MAX_UPLOAD_DURATION.total_seconds())
        second = now()
        outcome = run(artifacts=folder.url)
        if now() == second:
            break

    assert (outcome, folder.keys()) == (Outcome(1, 0, False, 0), {"a"})


def test_an_upload_is_stale_two_seconds_after_its_three_hours(folder):
    # Redis tells whole seconds: after one more it may still be a fraction too early.
    begin(folder, "a", age=(MAX_UPLOAD_DURATION + 2 * SECOND).total_seconds())

    assert run(artifacts=folder.url).total_deleted_stale_entries == 1


def test_a_path_is_not_cut_at_its_second_colon(store):
    begin(store, "a:b:c")
    store.put("a", "a:b", "b:c", "c")

    outcome = run(artifacts=store.url)

    assert (outcome.total_deleted_stale_entries, store.keys()) == (1, {"a", "a:b", "b:c", "c"})


def test_an_object_that_is_missing_is_a_success(store):
    register("never/arrived")

    outcome = run(artifacts=store.url)

    assert (outcome, registered()) == (Outcome(1, 1, False, 0), set())


def test_each_location_deletes_in_its_own_store(store, other):
    begin(store, "a")
    begin(other, "a", location=ELSEWHERE)
    store.put("b")
    begin(other, "b", location=ELSEWHERE)

    run(artifacts=store.url, lfs=other.url)

    assert (store.keys(), other.keys()) == ({"b"}, set())


def test_more_than_a_chunk_is_deleted_in_one_run(s3):
    register(*numbered(CHUNK + 1))

    outcome = run(artifacts=s3.url)

    assert (outcome, registered()) == (Outcome(CHUNK + 1, CHUNK + 1, False, 0), set())


# Bad entries


@pytest.mark.parametrize(
    "member",
    [
        "no colon at all",
        "artifacts:",
        ":path",
        "artifacts:..",
        "artifacts:../../etc/passwd",
        "artifacts:a/./b",
        "artifacts:a//b",
        "artifacts:/a",
        "artifacts:a/",
        f"artifacts:{sentinel.NAME}",
        f"artifacts:a/{sentinel.NAME}",
        "artifacts:a\x00b",
        "artifacts:a#1",
        f"artifacts:{'a' * 2000}",
        b"artifacts:\xff",
    ],
)
def test_an_entry_that_no_object_can_bear_is_failed_at_once_and_the_rest_goes_on(store, member):
    register_members(member, age=STALE + 60)
    begin(store, "good")

    outcome = run(artifacts=store.url)

    text = member.decode(errors="surrogateescape") if isinstance(member, bytes) else member
    assert (outcome, store.keys()) == (Outcome(2, 1, False, 1), set())
    assert (members(uploads.PENDING), members(uploads.DELETING), members(uploads.FAILED)) == (set(), set(), {text})


def test_an_entry_named_as_the_sentinel_leaves_the_sentinel(folder):
    register(sentinel.NAME)

    run(artifacts=folder.url)

    assert (folder.root / sentinel.NAME).exists()


def test_malformed_entries_are_not_tried_again(store):
    register("..")
    run(artifacts=store.url)

    assert run(artifacts=store.url) == Outcome(0, 0, False, 0)


def test_a_chunk_full_of_malformed_entries_stops_nobody(store):
    register_members(*(f"bad {number}" for number in range(CHUNK + 1)), age=STALE + 60)
    begin(store, "good")

    outcome = run(artifacts=store.url)

    assert (outcome, store.keys()) == (Outcome(CHUNK + 2, 1, False, CHUNK + 1), set())


def test_an_unknown_location_costs_each_of_its_entries_an_attempt_and_the_others_go_on(store):
    register("a", "b", location="unknown", age=STALE + 60)
    begin(store, "good")

    outcome = run(artifacts=store.url)

    assert (outcome, store.keys()) == (Outcome(3, 1, False, 2), set())
    assert attempts() == {"unknown:a": 1, "unknown:b": 1}


def test_what_failed_waits_for_the_next_run_and_then_twice_as_long(store):
    register("a", location="unknown")
    run(artifacts=store.url)
    first = client.zscore(uploads.DELETING, "unknown:a") - now()
    time_passes(timedelta(minutes=6))

    run(artifacts=store.url)

    second = client.zscore(uploads.DELETING, "unknown:a") - now()
    assert (first, second) == (pytest.approx(360, abs=2), pytest.approx(720, abs=2))


def test_what_failed_is_left_alone_while_it_waits(store):
    register("a", location="unknown")
    run(artifacts=store.url)

    assert run(artifacts=store.url) == Outcome(1, 0, False, 0)
    assert attempts() == {"unknown:a": 1}


def test_after_five_attempts_an_entry_is_given_up(store):
    register("a", location="unknown")

    failures = []
    for _ in range(5):
        failures.append(run(artifacts=store.url).failed_entries)
        time_passes(timedelta(hours=2))

    assert failures == [1, 1, 1, 1, 1]
    assert (members(uploads.DELETING), members(uploads.FAILED)) == (set(), {"unknown:a"})


def test_an_entry_that_was_given_up_is_not_tried_again_until_somebody_asks_for_it(store, other):
    begin(other, "a", location=ELSEWHERE)
    for _ in range(5):
        run(artifacts=store.url)
        time_passes(timedelta(hours=2))
    given_up = run(artifacts=store.url, lfs=other.url)
    by_hand.retry(client)

    revived = run(artifacts=store.url, lfs=other.url)

    assert (given_up, revived.total_deleted_stale_entries) == (Outcome(0, 0, False, 0), 1)
    assert (other.keys(), registered(), attempts()) == (set(), set(), {})


def test_one_object_that_cannot_be_deleted_costs_an_attempt_and_keeps_no_other(s3):
    paths = numbered(20)
    begin(s3, *paths)
    s3.proxy.refuse_key(paths[3], "AccessDenied")

    outcome = run(artifacts=s3.url)

    assert (outcome, s3.keys()) == (Outcome(20, 19, False, 1), {paths[3]})
    assert attempts() == {f"artifacts:{paths[3]}": 1}


def test_what_could_not_be_deleted_is_deleted_later(s3):
    begin(s3, "a", "b")
    s3.proxy.refuse_key("b", "AccessDenied")
    run(artifacts=s3.url)
    s3.proxy._refused_keys.clear()
    time_passes(timedelta(minutes=6))

    outcome = run(artifacts=s3.url)

    assert (outcome.total_deleted_stale_entries, s3.keys(), registered(), attempts()) == (1, set(), set(), {})


# Artifacts that are alive


def test_an_upload_that_a_live_artifact_names_is_kept_and_forgotten(store):
    begin(store, "kept", "stale")
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path="kept")

    with capture_logs() as logs:
        outcome = run(artifacts=store.url)

    assert (outcome, store.keys(), registered()) == (Outcome(2, 1, False, 0), {"kept"}, set())
    assert [line["path"] for line in logs if line["log_level"] == "error"] == ["kept"]


def test_an_artifact_keeps_no_object_of_another_location(store, other):
    begin(other, "a", location=ELSEWHERE)
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path="a")

    run(artifacts=store.url, lfs=other.url)

    assert other.keys() == set()


def test_an_upload_that_lies_in_the_outbox_is_left_to_it(store):
    begin(store, "a/kept", "stale")
    DeletedObject.create(store_dir="a", file="kept", pick_up_at=database_now() + SECOND * 3600)

    outcome = run(artifacts=store.url)

    assert (outcome, store.keys(), registered()) == (Outcome(2, 1, False, 0), {"a/kept"}, set())


@pytest.mark.parametrize(
    ("ours", "entry"), [("", "packages:a/live"), ("/a", "packages:a/live"), ("/a/b", "packages:a/b/live")]
)
def test_an_artifact_keeps_its_object_under_every_location_that_leads_to_it(folder, ours, entry):
    place = folder.root / ours.strip("/")
    place.mkdir(parents=True, exist_ok=True)
    sentinel.Store(HERE, f"{folder.url}{ours}").create_sentinel(INSTALLATION)
    name = entry.partition(":")[2].removeprefix(ours.lstrip("/")).lstrip("/")
    folder.put(f"{ours}/{name}".lstrip("/"))
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path=name)
    register_members(entry)

    run(artifacts=f"{folder.url}{ours}", packages=folder.url)

    assert (place / name).exists()
    assert registered() == set()


def test_an_artifact_keeps_its_object_under_a_location_that_leads_to_a_folder_of_its_store(folder):
    folder.put("a/live", "a/stale")
    sentinel.Store("packages", f"{folder.url}/a").create_sentinel(INSTALLATION)
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path="a/live")
    register("live", "stale", location="packages")

    run(artifacts=folder.url, packages=f"{folder.url}/a")

    assert folder.keys() - {f"a/{sentinel.NAME}"} == {"a/live"}


# Redis goes back


@pytest.fixture
def back():
    """Call it to note the register as it is; call what that returns to let it be so again."""

    def note():
        then = {key: client.dump(key) for key in client.keys("{pending_direct_uploads}:*")}

        def restore():
            client.delete(*client.keys("{pending_direct_uploads}:*") or ["none"])
            for key, value in then.items():
                client.restore(key, 0, value)

        return restore

    return note


def complete(location, path):
    with database.atomic():
        return producer.complete(client, location, path)


def test_an_upload_that_was_reaped_never_completes_though_redis_goes_back(store, back):
    begin(store, "a/b")
    go_back = back()
    run(artifacts=store.url)

    go_back()

    assert (complete(HERE, "a/b"), uploads.count(client)) == (False, 1)


def test_what_was_reaped_and_comes_back_is_settled_by_the_next_run(store, back):
    begin(store, "a/b")
    go_back = back()
    run(artifacts=store.url)
    go_back()

    outcome = run(artifacts=store.url)

    assert (outcome, registered(), SettledUpload.select().count()) == (Outcome(1, 1, False, 0), set(), 1)


@pytest.mark.parametrize("location", [HERE, ELSEWHERE])
def test_what_has_completed_stays_though_redis_goes_back(folder, other, back, location):
    begin(folder if location == HERE else other, "kept", location=location)
    go_back = back()
    with database.atomic():
        assert producer.complete(client, location, "kept")
        if location == HERE:
            JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path="kept")
    go_back()

    outcome = run(artifacts=folder.url, lfs=other.url)

    assert (outcome, folder.keys() | other.keys(), registered()) == (Outcome(1, 0, False, 0), {"kept"}, set())


def test_what_is_to_go_is_remembered_before_it_goes(folder, restarted):
    begin(folder, "a", "b")
    folder.remove_sentinel()

    fail(artifacts=folder.url)

    assert (folder.keys(), SettledUpload.named(HERE, ["a", "b"], reaped=True)) == ({"a", "b"}, {"a", "b"})


def test_what_a_producer_is_just_completing_waits_for_a_later_run(folder, urls):
    begin(folder, "late", "stale")
    with closing(psycopg2.connect(urls.database)) as connection, connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock(hashtextextended(%s, %s))", (f"{HERE}:late", settled.LOCKS))
        outcome = run(artifacts=folder.url)

    time_passes(settings_with().upload_visibility + SECOND)
    later = run(artifacts=folder.url)
    assert (outcome, attempts(), later) == (Outcome(2, 1, False, 0), {}, Outcome(1, 1, False, 0))


def test_a_row_that_is_committed_just_before_the_look_is_seen_whatever_the_isolation(urls):
    database.execute_sql("set session characteristics as transaction isolation level repeatable read")

    with database.atomic():
        free = SettledUpload.lock_free(HERE, ["live"])
        with closing(psycopg2.connect(urls.database)) as other, other, other.cursor() as cursor:
            cursor.execute(INSERT_ARTIFACT, ("live",))
        kept = owners.answered_for(JobArtifact, HERE, free, settings_with())

    database.execute_sql("set session characteristics as transaction isolation level read committed")
    assert kept == {"live": "an artifact names it"}


def test_the_run_that_reaped_an_upload_is_remembered(away_here, other):
    begin(other, "b", location=ELSEWHERE)

    row = recorded(BATCH, away_here)

    assert [reaped.run for reaped in SettledUpload.select()] == [row.id]


# Where objects may be deleted


def test_outside_the_folders_nothing_is_deleted_and_the_entry_is_put_aside(store):
    begin(store, "up/a", "up2/a", "backup/db")

    with capture_logs() as logs:
        outcome = run(prefixes={HERE: ("up",)}, artifacts=store.url)

    assert (outcome, store.keys()) == (Outcome(3, 1, False, 2), {"up2/a", "backup/db"})
    assert members(uploads.FAILED) == {"artifacts:up2/a", "artifacts:backup/db"}
    assert [(line["entries"], line["reason"]) for line in logs] == [(2, OUTSIDE)]


def test_what_was_put_aside_goes_once_its_folder_is_named_and_somebody_asks(folder):
    begin(folder, "up/a")
    run(prefixes={HERE: ("elsewhere",)}, artifacts=folder.url)

    by_hand.retry(client)
    outcome = run(prefixes={HERE: ("up",)}, artifacts=folder.url)

    assert (outcome.total_deleted_stale_entries, folder.keys()) == (1, set())


def test_folders_of_one_location_bind_no_other(folder, other):
    begin(other, "a", location=ELSEWHERE)

    run(prefixes={HERE: ("up",)}, artifacts=folder.url, lfs=other.url)

    assert other.keys() == set()


# Objects that were adopted


def adopt(*paths, ago=uploads.ADOPTION + 5 * SECOND):
    """Adopt objects, that long ago."""
    by_hand.adopt(client, HERE, paths, stale_after=MAX_UPLOAD_DURATION)
    for key in (uploads.PENDING, uploads.ADOPTED):
        for path in paths:
            client.zincrby(key, -ago.total_seconds(), f"{HERE}:{path}")


def test_of_the_adopted_those_that_were_written_since_are_kept(store):
    # A bucket knows no other time of writing than that of the server: all of its objects were written just now.
    store.put("changed")
    adopt("changed", "never/there")

    with capture_logs() as logs:
        outcome = run(artifacts=store.url)

    assert (outcome.failed_entries, store.keys(), registered()) == (0, {"changed"}, set())
    assert outcome.total_deleted_stale_entries == 1
    assert [line["path"] for line in logs if line["log_level"] == "error"] == ["changed"]


def test_the_adopted_that_were_not_written_since_are_deleted(folder):
    paths = numbered(120)
    folder.put(*paths, "bystander")
    days_ago = time.time() - 3 * 86_400
    for path in paths:
        os.utime(folder.root / path, (days_ago, days_ago))
    adopt(*paths)

    outcome = run(artifacts=folder.url)

    assert (outcome, folder.keys(), registered()) == (Outcome(120, 120, False, 0), {"bystander"}, set())


def test_the_adopted_are_looked_at_again_at_each_try(folder):
    folder.put("changed")
    adopt("changed")
    fail(artifacts=away(folder))

    run(artifacts=folder.url)

    assert folder.keys() == {"changed"}


def test_a_store_that_lets_nobody_look_costs_the_adopted_no_attempt(s3):
    s3.put("a")
    adopt("a")
    s3.proxy.before("head", 2, lambda: s3.proxy.answer(403, "AccessDenied", kinds=["head"]))

    outcome, _ = fail(artifacts=s3.url)

    assert (outcome.failed_entries, s3.keys(), attempts()) == (0, {"a"}, {})
    assert registered() == {f"{HERE}:a"}


def test_an_adopted_object_that_alone_cannot_be_looked_at_costs_an_attempt_and_stays(s3):
    s3.put("a")
    adopt("a")
    s3.proxy.before("head", 2, lambda: s3.proxy.answer(403, "AccessDenied", kinds=["head"], times=1))

    outcome = run(artifacts=s3.url)

    assert (outcome.failed_entries, s3.keys(), attempts()) == (1, {"a"}, {f"{HERE}:a": 1})


# Stores that are away


def test_a_store_that_is_away_costs_no_attempt_and_stops_no_other(store, other):
    begin(store, "a", "b", age=STALE + 60)
    begin(other, "c", location=ELSEWHERE)

    outcome, sentence = fail(artifacts=away(store), lfs=other.url)

    assert sentence.startswith("artifacts: ")
    assert (outcome, other.keys(), attempts()) == (Outcome(3, 1, False, 0), set(), {})
    assert (store.keys(), registered()) == ({"a", "b"}, {"artifacts:a", "artifacts:b"})


def test_of_several_stores_that_are_away_each_is_named(folder, other):
    begin(folder, "a")
    begin(other, "b", location=ELSEWHERE)

    _, sentence = fail(artifacts=away(folder), lfs=f"{other.url}/not/there")

    assert sentence.startswith("artifacts, lfs: artifacts: ")
    assert "; lfs: " in sentence


def test_a_store_that_answers_nothing_while_the_claim_lasts_keeps_the_others_waiting_for_one_claim_only(s3, other):
    begin(s3, "a", age=STALE + 60)
    begin(other, "b", location=ELSEWHERE)
    s3.proxy.hang("head", "bulk", "single")
    outcome = Outcome()
    settings = settings_with(object_stores={HERE: s3.url, ELSEWHERE: other.url}, upload_visibility=timedelta(seconds=5))

    with pytest.raises(StoreUnavailable, match="artifacts: no answer while the claim lasted"):
        perform(BATCH, settings=settings, outcome=outcome)

    assert (outcome, other.keys(), registered()) == (Outcome(2, 1, False, 0), set(), {"artifacts:a"})


@pytest.fixture
def away_here(settings, folder, other):
    """The settings of a process whose store `artifacts` is away."""
    places = settings_with(object_stores={HERE: away(folder), ELSEWHERE: other.url}).object_stores
    return settings.model_copy(update={"object_stores": places})


def attempt(settings):
    """Make an attempt at the open run, or else at a new one; return its row."""
    with pytest.raises(StoreUnavailable):
        recorded(BATCH, settings)
    return JobRun.select().order_by(JobRun.id.desc()).get()


def counted(metric, *labels):
    names = dict(zip(METRICS[f"forgekeeper_{metric}"].labels, ("stale_direct_uploads", *labels), strict=True))
    return WORKER.registry.get_sample_value(f"forgekeeper_{metric}", names) or 0


def test_a_run_whose_store_is_away_waits_for_a_retry_with_what_it_did_in_its_row(away_here, folder, other):
    begin(folder, "a")
    begin(other, "b", location=ELSEWHERE)
    before = counted("records_processed_total", "stale_upload")

    row = attempt(away_here)

    assert (row.state, row.retry_at is not None, row.failures) == ("enqueued", True, 1)
    assert (row.result["total_pending_entries"], row.result["total_deleted_stale_entries"]) == (2, 1)
    assert counted("records_processed_total", "stale_upload") - before == 1


def test_a_store_that_stays_away_is_a_failure_in_a_row_each_time(away_here, folder):
    begin(folder, "a")
    breaches = counted("threshold_breaches_total", "consecutive_failures")
    failures = counted("run_failures_total", "object_storage")

    for _ in range(2):
        attempt(away_here)

    assert JobRun.health("stale_direct_uploads").failures == 2
    assert counted("threshold_breaches_total", "consecutive_failures") - breaches == 1
    assert counted("run_failures_total", "object_storage") - failures == 2


def test_more_than_a_chunk_at_a_store_that_is_away_stops_no_other(folder, other):
    register(*numbered(CHUNK + 1), age=STALE + 60)
    begin(other, "c", location=ELSEWHERE)

    outcome, _ = fail(artifacts=away(folder), lfs=other.url)

    assert (outcome, other.keys(), attempts()) == (Outcome(CHUNK + 2, 1, False, 0), set(), {})


def test_everything_is_done_once_the_store_is_back(store, restarted):
    begin(store, "a", "b")
    fail(artifacts=away(store))
    restarted()

    outcome = run(artifacts=store.url)

    assert (outcome, store.keys(), registered()) == (Outcome(2, 2, False, 0), set(), set())


def test_a_store_that_denies_everything_costs_no_attempt(s3):
    begin(s3, "a")
    s3.proxy.answer(403, "AccessDenied")

    outcome, _ = fail(artifacts=s3.url)

    assert (outcome, s3.keys(), attempts()) == (Outcome(1, 0, False, 0), {"a"}, {})
    assert registered() == {"artifacts:a"}


def test_a_store_that_comes_back_is_found_by_the_same_process(s3):
    begin(s3, "a")
    s3.proxy.answer(403, "AccessDenied")
    fail(artifacts=s3.url)
    s3.proxy._answers.clear()

    assert run(artifacts=s3.url).total_deleted_stale_entries == 1
    assert s3.keys() == set()


def test_without_its_sentinel_a_store_loses_nothing(store):
    begin(store, "a", "b")
    store.remove_sentinel()

    with capture_logs() as logs:
        outcome, _ = fail(artifacts=store.url)

    assert (outcome, store.keys(), attempts()) == (Outcome(2, 0, False, 0), {"a", "b"}, {})
    assert registered() == {"artifacts:a", "artifacts:b"}
    assert [line["event"] for line in logs] == ["object store unavailable"]


def test_an_entry_whose_store_vanished_is_not_taken_for_missing(folder):
    begin(folder, *numbered(CHUNK + 1))
    gone = folder.root.with_name("unmounted")

    outcome, _ = fail(
        Deadline(MAX_EXEC_DURATION, safe_point=lambda: folder.root.exists() and folder.root.rename(gone)),
        artifacts=folder.url,
    )

    gone.rename(folder.root)
    (left,) = folder.keys()
    assert (outcome, registered()) == (Outcome(CHUNK + 1, CHUNK, False, 0), {f"artifacts:{left}"})


# Claims and deadlines


def test_what_a_crashed_run_had_claimed_belongs_to_nobody_else_for_five_minutes(store):
    begin(store, "a")
    uploads.claim(client, stale_after=MAX_UPLOAD_DURATION, visibility=settings_with().upload_visibility, limit=CHUNK)
    time_passes(settings_with().upload_visibility - 30 * SECOND)

    assert run(artifacts=store.url) == Outcome(1, 0, False, 0)
    assert store.keys() == {"a"}


def test_what_a_crashed_run_had_claimed_is_deleted_by_a_later_one(store):
    begin(store, "a", "b")
    uploads.claim(client, stale_after=MAX_UPLOAD_DURATION, visibility=settings_with().upload_visibility, limit=CHUNK)
    time_passes(settings_with().upload_visibility + SECOND)

    outcome = run(artifacts=store.url)

    assert (outcome, store.keys(), registered()) == (Outcome(2, 2, False, 0), set(), set())


def test_a_worker_that_was_paused_for_longer_than_its_claim_deletes_nothing(store):
    begin(store, "a")
    clock = Clock()
    deadline = Deadline(MAX_EXEC_DURATION, clock=clock, safe_point=clock.go_past_the_budget)
    settings = settings_with(object_stores={HERE: store.url}, upload_visibility=5 * SECOND)
    arm(Failpoints({"stale_direct_uploads.claimed": Fault("sleep", seconds=1.1)}))
    try:
        outcome = perform(BATCH, deadline=deadline, settings=settings)
    finally:
        arm(Failpoints())

    assert (outcome, store.keys(), attempts()) == (Outcome(1, execution_timeout=True), {"a"}, {})


def test_a_location_whose_turn_comes_after_a_stop_is_given_back(store):
    begin(store, "a")
    deadline = Deadline(MAX_EXEC_DURATION, brake=lambda: "stopped")

    assert run(deadline, artifacts=store.url) == Outcome(1)
    assert store.keys() == {"a"}
    assert run(artifacts=store.url) == Outcome(1, 1, False, 0)


def test_a_run_that_dies_between_two_chunks_leaves_the_rest_to_the_next(s3):
    begin(s3, "last", age=STALE)
    register(*numbered(CHUNK), age=STALE + 60)

    with pytest.raises(ZeroDivisionError):
        run(Deadline(MAX_EXEC_DURATION, safe_point=lambda: 1 / 0), artifacts=s3.url)

    assert (registered(), s3.keys()) == ({"artifacts:last"}, {"last"})
    assert run(artifacts=s3.url) == Outcome(1, 1, False, 0)


def test_at_the_deadline_a_run_says_so_and_leaves_the_rest(s3):
    register(*numbered(CHUNK + 1))
    clock = Clock()
    deadline = Deadline(MAX_EXEC_DURATION, clock=clock, safe_point=clock.go_past_the_budget)

    assert run(deadline, artifacts=s3.url) == Outcome(CHUNK + 1, CHUNK, True, 0)
    assert run(artifacts=s3.url) == Outcome(1, 1, False, 0)


def test_a_run_that_reaches_its_deadline_says_so_also_where_a_store_is_away(s3):
    register(*numbered(3))
    clock = Clock()
    deadline = Deadline(MAX_EXEC_DURATION, clock=clock, safe_point=clock.go_past_the_budget)

    outcome, said = fail(deadline, artifacts=CLOSED_PORT)

    assert (outcome, said.startswith("artifacts: ")) == (Outcome(3, 0, True, 0), True)


def test_a_run_that_is_asked_to_stop_has_not_timed_out(s3):
    register(*numbered(CHUNK + 1))
    shutdown.requested.set()
    try:
        outcome = run(artifacts=s3.url)
    finally:
        shutdown.requested.clear()

    assert outcome == Outcome(CHUNK + 1, 0, False, 0)


def test_a_store_that_hangs_ends_with_the_budget_and_costs_no_attempt(s3):
    begin(s3, "a", "b")
    s3.proxy.hang("bulk")

    outcome = run(Deadline(SECOND), artifacts=s3.url)

    assert (outcome, s3.keys(), attempts()) == (Outcome(2, 0, True, 0), {"a", "b"}, {})
    assert registered() == {"artifacts:a", "artifacts:b"}


# Many


def test_twenty_thousand_stale_among_two_hundred_thousand_take_twenty_requests(s3, capsys):
    count, real = examples(20_000), examples(300)
    stale = [f"stale/{number:06}" for number in range(count)]
    s3.put(*stale[:: len(stale) // real], "fresh/000000")
    moment = now()
    client.zadd(uploads.PENDING, {f"artifacts:{path}": moment - STALE - 60 for path in stale})
    client.zadd(uploads.PENDING, {f"artifacts:fresh/{number:06}": moment - 60 for number in range(9 * count)})

    began = time.monotonic()
    outcome = run(artifacts=s3.url)
    seconds = time.monotonic() - began

    with capsys.disabled():
        sys.stdout.write(f"\n{count:,} stale of {10 * count:,} uploads: {seconds:.1f} s, {dict(s3.proxy.counts)}\n")
    assert outcome == Outcome(10 * count, count, False, 0)
    assert (s3.proxy.counts["bulk"], s3.proxy.counts["single"]) == (count // 1_000, 0)
    assert (s3.keys(), client.zcard(uploads.PENDING)) == ({"fresh/000000"}, 9 * count)


def test_locations_that_no_store_is_configured_for_are_one_line_of_a_run(store):
    begin(store, "a")
    for location in ("gone", "away"):
        register(*map(str, range(CHUNK)), location=location)

    with capture_logs() as lines:
        outcome = run(artifacts=store.url)

    (line,) = said(lines, "no store is configured")
    assert (sorted(line["locations"]), line["entries"]) == (["away", "gone"], 2 * CHUNK)
    assert line["first"].partition(":")[0] in {"away", "gone"}
    assert (len(lines), outcome.failed_entries, store.keys()) == (1, 2 * CHUNK, set())


def test_of_many_unknown_locations_some_are_named(store):
    register_members(*(f"{number}:path" for number in range(100)))

    with capture_logs() as lines:
        run(artifacts=store.url)

    (line,) = said(lines, "no store is configured")
    assert (len(line["locations"]), line["entries"]) == (stale_direct_uploads.NAMED + 1, 100)


def test_what_was_unknown_is_said_of_a_run_that_fails(store):
    register("a", location="gone")
    register("b", location=ELSEWHERE)

    with capture_logs() as lines:
        fail(artifacts=store.url, lfs=CLOSED_PORT)

    assert [line["entries"] for line in said(lines, "no store is configured")] == [1]


def test_of_what_is_unknown_it_is_said_how_much_was_given_up(store):
    register("a", "b", location="gone")
    client.hset(uploads.ATTEMPTS, mapping={"gone:a": uploads.MAX_ATTEMPTS - 1})

    with capture_logs() as lines:
        run(artifacts=store.url)

    assert [line["given_up"] for line in said(lines, "no store is configured")] == [1]
