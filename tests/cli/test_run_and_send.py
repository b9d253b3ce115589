"""`run`, with and without --dry-run, and `send`."""

import json
import re
import signal
import subprocess
import sys
from datetime import timedelta

import pytest

from demo import sample_data as sample
from forgekeeper.delivery.queues import count_messages
from forgekeeper.ledger.holds import Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import now
from forgekeeper.platform.installation import INSTALLATION_KEY
from forgekeeper.sources.outbox import DeletedObject
from models import UserStatus
from tests.harness.error_events import make_dsn, read_events
from tests.harness.performing import start_run
from tests.harness.receivers import run_receiver
from tests.harness.thorough import whole_only
from tests.harness.waiting import wait_until

NAME = "user_status_cleanup"
NOTHING = {"deleted": 0, "batches": 0, "stopped": "drained"}
LIMIT = 60.0

pytestmark = pytest.mark.usefixtures("database")


def last_run():
    return JobRun.select_newest_first(NAME).first()


def due():
    return UserStatus.select().where(UserStatus.clear_status_at <= now()).count()


def messages():
    return count_messages(client, "cron")["ready"]


def test_run_with_json_prints_one_object_and_its_logs_elsewhere(forgekeeper):
    sample.add_statuses(5)

    result = forgekeeper("run", NAME, "--json")

    assert (result.status, result.json) == (0, {"run": last_run().id} | NOTHING | {"deleted": 2, "batches": 1})
    assert [json.loads(line)["message"] for line in result.stderr.splitlines()] == ["run started", "run finished"]


def test_a_run_that_was_killed_is_taken_over_by_the_next_though_no_scheduler_lives(forgekeeper, main):
    sample.add_statuses(5)
    killed = forgekeeper("run", NAME, FAILPOINTS=f"{NAME}.deleted=kill")
    sample.add_statuses(5)
    JobRun.update(alive_at=now() - timedelta(minutes=3)).execute()
    waits = main("run", NAME, "--json", DEAD_AFTER="300")
    taken_over = main("run", NAME, "--json", DEAD_AFTER="60")

    assert (killed.status, waits.status, waits.json["skipped"]) == (-signal.SIGKILL, 3, "overlap")
    assert re.search(rf"run 1 of {NAME} on \S+ has been silent for .*: try again in ", waits.stderr)
    assert (taken_over.status, taken_over.json["run"], taken_over.json["deleted"], due()) == (0, 1, 2, 0)
    assert f"run 1 of {NAME} was lost with " in taken_over.stderr


def test_a_run_of_a_paused_batch_is_skipped_with_every_field_zero(main):
    sample.add_statuses(5)
    Hold.add(NAME, "pause", until=None, reason="the disk is full", by="ops:1")

    result = main("run", NAME, "--json")

    assert (result.status, result.json) == (0, {"run": None} | NOTHING | {"skipped": "paused"})
    assert (due(), last_run()) == (2, None)


@pytest.mark.parametrize("command", ["run", "send"])
def test_who_comes_second_learns_who_runs_the_batch_and_since_when(main, command):
    JobRun.start_here(NAME, by="elsewhere:42")

    result = main(command, NAME)

    since = last_run().started_at.strftime("%Y-%m-%d %H:%M:%S")
    assert result.status == 0
    assert result.sentences == [f"{NAME} is running on elsewhere:42 since {since}; wait until it ends"]


@whole_only
def test_a_failed_run_is_reported_as_in_a_worker(forgekeeper, own_database, query):
    query(own_database, "alter table forgekeeper.quarantine rename to gone")
    with run_receiver() as receiver:
        forgekeeper("run", NAME, DATABASE_URL=own_database, SENTRY_DSN=make_dsn(receiver))

        (event,) = read_events(receiver)
    assert (event["message"], event["tags"]["batch"]) == ("run failed", NAME)


@whole_only
def test_a_failed_run_ends_with_one_sentence_and_exit_status_1(forgekeeper, own_database, query):
    query(own_database, "alter table forgekeeper.quarantine rename to gone")

    result = forgekeeper("run", NAME, "--json", DATABASE_URL=own_database)

    assert (result.status, result.stdout) == (1, "")
    assert result.sentences == [
        (
            f'forgekeeper: {NAME} failed: cannot use PostgreSQL: relation "quarantine" does not exist;'
            " run `forgekeeper check`, and set FORGEKEEPER_OWN_SCHEMA and FORGEKEEPER_FORGE_SCHEMA to the schemas of the tables"
        )
    ]


@whole_only
def test_a_tick_taken_over_that_fails_is_left_to_the_workers(main, own_database, query):
    query(own_database, "alter table forgekeeper.quarantine rename to gone")
    query(own_database, f"insert into job_runs (batch, tick, state) values ('{NAME}', '2026-01-01', 'enqueued')")

    result = main("run", NAME, DATABASE_URL=own_database)

    assert result.status == 1
    assert result.sentences[-1].endswith("; workers will retry it")
    assert query(own_database, "select state, failures from job_runs") == [("enqueued", 1)]


@whole_only
def test_ctrl_c_ends_a_run_at_the_next_chunk(environment):
    sample.add_statuses(1_000)
    running = subprocess.Popen(
        [sys.executable, "-m", "forgekeeper.cli", "run", NAME, "--json"],
        env=environment(PACE_USER_STATUS_CLEANUP="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: due() == 300, LIMIT)

    running.send_signal(signal.SIGINT)
    stdout, _ = running.communicate(timeout=LIMIT)

    assert (running.returncode, json.loads(stdout)["deleted"]) == (0, 100)
    assert (due(), last_run().state) == (300, "succeeded")


def test_send_queues_a_run_and_says_how_to_follow_it(forgekeeper):
    result = forgekeeper("send", NAME)

    run_id = last_run().id
    assert result.status == 0
    assert result.stdout == f"{NAME} is queued as run {run_id}; `forgekeeper why {NAME}` shows its progress\n"
    assert (last_run().state, messages()) == ("enqueued", 1)


def test_send_twice_queues_once_and_says_since_when(main):
    main("send", NAME)

    second = main("send", NAME)

    since = last_run().claimed_at.strftime("%Y-%m-%d %H:%M:%S")
    assert (second.status, second.sentences) == (0, [f"{NAME} is queued already, since {since}"])
    assert (JobRun.select().count(), messages()) == (1, 1)


def test_send_lets_a_run_that_waits_for_its_retry_start_at_once(main):
    JobRun.fail(JobRun.start_here(NAME, by="elsewhere:42"), "Oops", delay=timedelta(hours=1))

    sent = main("send", NAME, "--json").json

    assert (sent["run"], messages()) == (last_run().id, 1)
    assert start_run(NAME, sent["run"]) is not None


# --dry-run


def preview(main, *options, batch=NAME, **settings):
    result = main("run", batch, "--dry-run", "--json", *options, **settings)
    assert result.status == 0, result.stderr
    return result.json


def test_a_preview_says_how_many_would_go_to_people_and_programs(main):
    sample.add_statuses(5)

    said, found = main("run", NAME, "--dry-run"), preview(main)

    assert f"\n  user_status of {NAME}: 2 would be deleted\n" in said.stdout
    assert (found["batch"], found["dry_run"], found["notes"]) == (NAME, True, [])
    assert (found["parts"][0]["records"], found["parts"][0]["estimate"]) == (2, False)


def test_a_preview_names_as_many_records_as_it_is_told(main):
    sample.add_statuses(100)

    assert len(preview(main, "--sample", "3")["parts"][0]["sample"]) == 3


def test_a_preview_of_artifacts_says_how_much_whose_and_what_stays(main):
    sample.add_artifacts(10)

    (part,) = preview(main, batch="expired_job_artifacts")["parts"]

    assert (part["records"], part["bytes"], sum(part["projects"].values())) == (6, 615, 6)
    assert part["kept"] == {"locked": 1, "unknown": 1, "trace": 1}


def test_a_preview_of_objects_needs_no_store(main, tmp_path):
    DeletedObject.create(store_dir="@final", file="a")

    found = preview(
        main, batch="delete_objects", OBJECT_STORES=json.dumps({"artifacts": f"file://{tmp_path}/not-mounted"})
    )

    assert found["parts"][0]["records"] == 1


def test_a_preview_says_that_the_breaker_would_hold_it(main):
    sample.add_statuses(100)

    found = preview(main, BREAKER_SHARE="0.3", BREAKER_LEAST="30")

    (note,) = found["notes"]
    assert note == (
        "the circuit breaker would hold the batch: a run would delete 40 of about 100 records (40%), and no earlier run has"
        " deleted any"
    )


def test_a_paused_batch_can_be_previewed(main):
    sample.add_statuses(5)
    Hold.add(NAME, "pause", until=None, reason="the disk is full", by="ops:1")

    found = preview(main)

    (note,) = found["notes"]
    assert found["parts"][0]["records"] == 2
    assert note.startswith(f"{NAME} has been paused by ops:1 since ")


def test_a_preview_says_of_another_s_redis_that_a_run_would_be_blocked(main):
    client.set(INSTALLATION_KEY, "another")

    (note,) = preview(main)["notes"]

    assert note.startswith("a run would be blocked: the database belongs to installation ")
