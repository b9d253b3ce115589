"""`pause`, `stop`, `cancel` and `resume`: what holds batches back, what is in their way, and what the audit has of it."""

import time
from datetime import UTC, datetime, timedelta

import pytest

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit.acts import Act
from forgekeeper.delivery.boot import load_settings
from forgekeeper.delivery.messages import enqueue_run
from forgekeeper.delivery.queues import count_messages
from forgekeeper.ledger import reconcile
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import now
from tests.harness.thorough import whole_only

NAME, OTHER = "user_status_cleanup", "prune"
ME = "ops"
CLOSED_REDIS = "redis://127.0.0.1:1/0"
WHY = ("--reason", "wrong rows go")


def hold():
    """Return the one thing that holds a batch back."""
    (found,) = Hold.list_active()
    return found


def stopped():
    return {hold.batch for hold in Hold.list_active("stop")}


def ready():
    return count_messages(client, "cron")["ready"]


def acts():
    return list(Act.select().order_by(Act.id))


# pause


@whole_only
def test_a_pause_holds_a_batch_back_until_it_is_resumed(forgekeeper, database):
    said = forgekeeper("pause", NAME, "--reason", "moving disks")
    held = hold()
    resumed = forgekeeper("resume", NAME)

    assert (said.status, said.stdout) == (0, f"{NAME} is paused until `forgekeeper resume {NAME}`\n")
    assert (held.until, held.reason) == (None, "moving disks")
    assert (resumed.status, resumed.stdout.splitlines()[-1]) == (0, f"{NAME} runs again from its next tick")
    assert Hold.find_state(NAME) is None


def test_a_pause_until_a_time_ends_by_itself(main, database):
    answer = main("pause", NAME, "--until", "2099-01-01T08:30+02:00", "--reason", "a full disk", "--json").json

    assert answer == {"batch": NAME, "paused": True, "until": "2099-01-01T06:30:00+00:00", "reason": "a full disk"}
    assert hold().until == datetime(2099, 1, 1, 6, 30, tzinfo=UTC)


@pytest.mark.parametrize("command", ["pause", "stop"])
def test_a_longer_hold_of_ones_own_stays_and_the_command_says_how_it_is_shortened(main, database, command):
    main(command, NAME, "--reason", "legal hold")
    kept = main(command, "--all", "--until", "1h", "--reason", "an hour")
    (sentence,) = (line for line in kept.stdout.splitlines() if line.startswith(f"{NAME} "))
    shortened = main(command, NAME, "--until", "1h", "--replace", "--reason", "an hour", "--json").json

    word = "paused" if command == "pause" else "stopped"
    assert sentence == (
        f"{NAME} is already {word} until `forgekeeper resume {NAME}` (legal hold);"
        f" `forgekeeper {command} {NAME} --replace` with your --until shortens that"
    )
    assert (shortened["reason"], Hold.get(Hold.batch == NAME).reason) == ("an hour", "an hour")


def test_a_pause_that_begins_now_is_a_stop(main, database):
    result = main("pause", NAME, "--now", "--until", "+2h", *WHY)

    assert (result.status, hold().kind) == (0, "stop")
    assert abs(hold().until - now() - timedelta(hours=2)) < timedelta(minutes=1)


def test_an_emptied_redis_does_not_resume_a_paused_batch(main, database):
    main("pause", NAME)
    client.flushall()

    assert main("run", NAME, "--json").json["skipped"] == "paused"
    assert main("send", NAME, "--json").json["skipped"] == "paused"
    assert ready() == 0


# stop


def test_all_batches_are_stopped_also_those_that_only_others_have_declared(main, database):
    Batch.register(["an_operators_own"])

    main("stop", "--all", *WHY, REDIS_URL=CLOSED_REDIS)

    assert stopped() == {*BATCHES, "an_operators_own"}


def test_what_waited_when_its_batch_was_stopped_is_sent_after_the_resumption(main, database):
    number = JobRun.claim_manual(NAME, by="ops:1")
    main("stop", NAME, *WHY)
    reconcile.reconcile_batch(NAME, load_settings(), enqueue_run, by="sched-1:7")
    meanwhile = ready()

    main("resume", NAME)
    reconcile.send_open_run(NAME, enqueue_run)

    assert (meanwhile, ready(), JobRun.find_open(NAME).id) == (0, 1, number)


# What is in the way of a stop

ODD = "caf\udce9 \x1b[2J\x00\u202e"
"""Bytes that are no text, what a terminal obeys, a NUL that PostgreSQL refuses, and a turn of the writing."""
SEEN = r"caf\udce9 \x1b[2J\x00\u202e"


@whole_only
@pytest.mark.parametrize("command", ["pause", "stop", "release"])
def test_a_reason_and_a_name_of_any_bytes_are_kept_escaped(forgekeeper, database, command):
    name = ODD.replace("\x00", "")
    Hold.add(NAME, "breaker", reason="9 of 10", by="worker-1:9")

    result = forgekeeper(command, NAME, "--reason", ODD, ACTOR=name)

    (act,) = acts()
    assert (result.status, act.reason, act.actor) == (0, SEEN, SEEN.replace(r"\x00", ""))
    if command != "release":
        _breaker, held = Hold.list_active(batch=NAME)
        assert (held.reason, held.by) == (SEEN, SEEN.replace(r"\x00", ""))
        assert forgekeeper("resume", NAME, ACTOR=name).status == 0
        assert [hold.kind for hold in Hold.list_active(batch=NAME)] == ["breaker"]


@pytest.mark.parametrize("locked", ["batches", "holds", "job_runs"])
def test_a_stop_waits_for_nobody_s_lock(main, database, other, locked):
    Batch.register(BATCHES)
    JobRun.claim_manual(NAME, by="ops:1")
    Hold.add(NAME, "stop", reason="earlier", by=ME)
    other.execute(f"select from {locked} for update")
    began = time.monotonic()

    result = main("stop", "--all", *WHY, ACTOR=ME, DATABASE_LOCK_TIMEOUT="60")

    assert (result.status, stopped()) == (0, set(BATCHES))
    assert time.monotonic() - began < 60


def test_what_cannot_be_stopped_is_named_and_all_others_are_stopped(main, database):
    database.execute_sql(f"""
        create function refuse() returns trigger language plpgsql as $$ begin raise exception 'not this one'; end $$;
        create trigger refuse before insert on holds for each row when (new.batch = '{NAME}') execute function refuse()
    """)
    try:
        result = main("stop", "--all", *WHY)
    finally:
        database.execute_sql("drop function refuse cascade")

    assert (result.status, stopped()) == (1, set(BATCHES) - {NAME})
    assert result.stderr.startswith(f"{NAME} is not stopped: ")


@whole_only
def test_a_stop_works_while_migrations_are_pending(main, settings, new_database, query):
    url = new_database()
    main("migrate", DATABASE_URL=url)
    query(url, "delete from forgekeeper_migrations where name = '0003_paused_since'")

    result = main("stop", NAME, *WHY, DATABASE_URL=url)

    assert (result.status, query(url, "select batch from holds where kind = 'stop'")) == (0, [(NAME,)])


# resume


def test_resume_says_that_there_was_no_pause_or_that_a_guard_holds_the_batch(main, database):
    Hold.add(NAME, "breaker", by="worker-1:9", reason="90 % would go")

    result = main("resume", NAME, OTHER)

    assert (result.status, result.stdout.splitlines()) == (
        0,
        [f"{NAME} is held: `forgekeeper release {NAME} --reason ...` releases it", f"{OTHER} was not paused"],
    )
    assert Hold.find_state(NAME) == "held"


def test_resume_ends_ones_own_and_names_what_stays_and_how_to_end_it(main, database):
    main("pause", NAME, "--reason", "legal hold", ACTOR="ann lee")
    main("pause", NAME, "--until", "+1h", "--reason", "a move", ACTOR="bob")

    result, again = main("resume", NAME, ACTOR="bob"), main("resume", NAME, "--json", ACTOR="bob").json

    stays = hold()
    assert (again["ended"], [one["by"] for one in again["left"]]) == ([], ["ann lee"])
    whose = f"the pause of ann lee since {stays.since:%Y-%m-%d %H:%M:%S} (legal hold)"
    assert result.status == 3
    assert result.stdout.splitlines()[-1] == (
        f"{NAME} is held by {whose}; `forgekeeper resume {NAME} --by 'ann lee'` ends it"
    )
    assert main("resume", NAME, "--by", "ann lee", ACTOR="bob").stdout.splitlines() == [
        f"{NAME}: ended {whose}",
        f"{NAME} runs again from its next tick",
    ]


# cancel


def test_a_run_that_waits_and_is_cancelled_will_not_run(main, database):
    number = JobRun.claim_manual(NAME, by="ops:1")

    result = main("cancel", str(number), "--reason", "not now", "--json")

    (act,) = acts()
    assert (act.act, act.what, act.batch, act.before["state"]) == ("cancel", f"run:{number}", NAME, "claimed")
    assert result.json == {"run": number, "batch": NAME, "was": "claimed", "state": "skipped", "reason": "not now"}
    assert (JobRun.get_by_id(number).state, JobRun.find_open(NAME)) == ("skipped", None)


def test_a_run_that_is_cancelled_ends_before_its_next_chunk(main, database):
    run = JobRun.start_here(NAME, by="worker-1:9")

    result = main("cancel", str(run.id), "--reason", ODD)

    assert result.stdout == f"run {run.id} of {NAME} ends before its next chunk, and so do its children\n"
    assert JobRun.get_by_id(run.id).cancelled_reason == SEEN


def test_of_a_run_that_has_ended_its_children_are_cancelled_once(main, database):
    run = JobRun.start_here(NAME, by="worker-1:9")
    JobRun.succeed(run, {})

    first, second = (main("cancel", str(run.id), "--reason", reason) for reason in ("not now", "again"))

    assert first.stdout.startswith(
        f"run {run.id} of {NAME} had already ended (succeeded); children that are still running "
    )
    assert second.stdout.startswith(f"run {run.id} of {NAME} was already cancelled, at ")
    assert JobRun.get_by_id(run.id).cancelled_reason == "not now"


# the audit


@pytest.mark.parametrize("command", ["pause", "stop"])
def test_what_holds_a_batch_back_and_what_ends_that_is_recorded_with_what_was_before_and_after(main, database, command):
    main(command, NAME, "--reason", "a move")
    main("resume", NAME, "--reason", "it is done")

    began, ended = acts()
    assert (began.act, began.batch, began.reason) == (command, NAME, "a move")
    assert [(one["kind"], one["reason"]) for one in began.after["holds"]] == [(command, "a move")]
    assert (ended.act, ended.reason, ended.before, ended.after) == ("resume", "it is done", began.after, began.before)
