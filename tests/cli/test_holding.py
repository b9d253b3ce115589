"""`pause` and `stop`: what holds batches back, what is in their way, and what the audit has of it."""

import pwd
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import psycopg2
import pytest

from forgekeeper.audit.acts import Act
from forgekeeper.batches import BATCHES
from forgekeeper.boot import load
from forgekeeper.connections import client
from forgekeeper.database import now
from forgekeeper.delivery.queues import depth
from forgekeeper.delivery.sending import deliver
from forgekeeper.runs import reconcile
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import JobRun

NAME = "user_status_cleanup"
ME = "ops"
OTHER = "prune"
CLOSED_REDIS = "redis://127.0.0.1:1/0"
MINUTE = timedelta(minutes=1)


def hold():
    """Return the one thing that holds a batch back."""
    (found,) = Hold.standing()
    return found


def stopped():
    return {hold.batch for hold in Hold.standing("stop")}


def paused():
    return {hold.batch for hold in Hold.standing("pause")}


def ready():
    return depth(client, "cron")["ready"]


def acts():
    return list(Act.select().order_by(Act.id))


# pause


def test_a_pause_that_is_to_last_holds_a_batch_back_until_resumed(forgekeeper, database):
    result = forgekeeper("pause", NAME, "--forever", "--reason", "moving disks")

    assert (result.status, result.stdout) == (0, f"{NAME} is paused until `forgekeeper resume {NAME}`\n")
    assert (hold().until, hold().reason) == (None, "moving disks")


def test_a_pause_without_an_end_does_not_end_by_itself(main, database):
    result = main("pause", NAME, "--reason", "moving disks")

    assert (hold().until, result.stdout) == (None, f"{NAME} is paused until `forgekeeper resume {NAME}`\n")


def test_a_pause_that_begins_now_is_a_stop(main, database):
    result = main("pause", NAME, "--now", "--until", "+2h", "--reason", "wrong rows go")

    assert (result.status, hold().kind) == (0, "stop")
    assert abs(hold().until - now() - timedelta(hours=2)) < MINUTE


def test_a_pause_until_a_time_ends_by_itself(main, database):
    result = main("pause", NAME, "--until", "2100-01-01T08:30")

    assert (result.status, result.stdout) == (0, f"{NAME} is paused until 2100-01-01 08:30:00\n")
    assert hold().until == datetime(2100, 1, 1, 8, 30, tzinfo=UTC)


def test_a_time_with_a_zone_is_understood(main, database):
    result = main("pause", NAME, "--until", "2100-01-01T08:30+02:00")

    assert result.stdout == f"{NAME} is paused until 2100-01-01 06:30:00\n"


def test_a_pause_may_be_given_as_a_duration(main, database):
    main("pause", NAME, "--until", "+2h", "--reason", "a move")

    assert abs(hold().until - now() - timedelta(hours=2)) < MINUTE


def test_a_pause_has_an_end_or_lasts_for_ever(main, database):
    result = main("pause", NAME, "--until", "+2h", "--forever")

    assert (result.status, paused()) == (2, set())


def test_several_batches_are_paused_at_once(main, database):
    result = main("pause", NAME, OTHER, "--until", "2100-01-01", "--reason", "a move")

    assert paused() == {NAME, OTHER}
    assert result.stdout.splitlines() == [f"{name} is paused until 2100-01-01 00:00:00" for name in (NAME, OTHER)]


def test_all_batches_are_paused_at_once(main, database):
    main("pause", "--all", "--reason", "a move")

    assert paused() == set(BATCHES)


@pytest.mark.parametrize("command", ["pause", "stop", "resume"])
@pytest.mark.parametrize("given", [(), (NAME, "--all")])
def test_batches_are_named_or_all_are_meant(main, database, command, given):
    result = main(command, *given, "--reason", "a move")

    assert (result.status, result.complaint) == (2, "name the batches, or say --all")


def test_a_name_that_is_none_lets_none_be_stopped(main, database):
    result = main("stop", NAME, "nonsense", "--reason", "a move")

    assert (result.status, stopped()) == (2, set())


def test_without_a_terminal_a_pause_says_that_no_reason_was_given(main, database):
    result = main("pause", NAME)

    assert result.status == 0
    assert result.sentences == ["no reason was given for the pause; give one with --reason, for anyone who finds it"]


def test_a_pause_of_one_batch_answers_with_json_as_it_always_has(main, database):
    answer = main("pause", NAME, "--until", "2099-01-01T08:30", "--reason", "the disk is full", "--json").json

    assert answer == {
        "batch": NAME,
        "paused": True,
        "until": "2099-01-01T08:30:00+00:00",
        "reason": "the disk is full",
    }


def test_a_pause_of_several_batches_answers_with_a_list(main, database):
    answer = main("pause", NAME, OTHER, "--reason", "a move", "--json").json

    assert [one["batch"] for one in answer["batches"]] == [NAME, OTHER]


def test_a_pause_for_ever_has_no_end_in_json(main, database):
    assert main("pause", NAME, "--forever", "--json").json["until"] is None


def test_an_emptied_redis_does_not_resume_a_paused_batch(main, database):
    main("pause", NAME)
    client.flushall()

    assert main("run", NAME, "--json").json["skipped"] == "paused"
    assert main("send", NAME, "--json").json["skipped"] == "paused"
    assert ready() == 0


# stop


def test_a_stop_is_remembered_with_who_and_why(main, database):
    result = main("stop", NAME, "--reason", "wrong rows go", "--no-wait", ACTOR=None)

    assert (result.status, result.stdout) == (
        0,
        f"{NAME} is stopped: nothing of it starts until `forgekeeper resume {NAME}`\n",
    )
    assert (hold().reason, "@" in hold().by) == ("wrong rows go", True)


def test_a_stop_needs_a_reason(main, database):
    result = main("stop", NAME)

    assert (result.status, stopped()) == (2, set())
    assert result.complaint == "say why: the stop needs a --reason, for anyone who finds it"


def test_a_blank_reason_is_none(main, database):
    assert (main("stop", NAME, "--reason", " ").status, stopped()) == (2, set())


def test_all_batches_are_stopped_at_once_also_those_that_only_others_have_declared(main, database):
    Batch.register(["an_operators_own"])

    main("stop", "--all", "--reason", "wrong rows go")

    assert stopped() == {*BATCHES, "an_operators_own"}


def test_a_stop_needs_no_redis(main, database):
    result = main("stop", NAME, "--reason", "wrong rows go", REDIS_URL=CLOSED_REDIS)

    assert (result.status, stopped()) == (0, {NAME})


def test_a_stop_of_what_does_not_run_says_so_at_once(main, database):
    result = main("stop", NAME, "--reason", "wrong rows go")

    assert result.stdout.splitlines()[1].startswith("nothing of it is at work")


def test_a_stop_with_json_says_how_long_it_took(main, database):
    answer = main("stop", NAME, "--reason", "wrong rows go", "--json").json

    assert answer.pop("seconds") < 5
    assert answer == {"batch": NAME, "stopped": True, "reason": "wrong rows go", "at_work": []}


def test_a_batch_that_is_stopped_again_has_been_since_the_first_time(main, database):
    main("stop", NAME, "--reason", "first")
    since = hold().since

    main("stop", NAME, "--reason", "second")

    assert (hold().since, hold().reason) == (since, "second")


def test_a_stop_survives_an_emptied_redis(main, database):
    main("stop", NAME, "--reason", "wrong rows go")
    client.flushall()

    reconcile.reconcile(NAME, load(), deliver, by="sched-1:7")

    assert (stopped(), ready()) == ({NAME}, 0)


def test_what_waited_when_its_batch_was_stopped_is_sent_after_the_resumption(main, database):
    number = JobRun.claim_manual(NAME, by="ops:1")
    main("stop", NAME, "--reason", "wrong rows go")
    reconcile.send(NAME, deliver)
    meanwhile = ready()

    main("resume", NAME)
    reconcile.send(NAME, deliver)

    assert (meanwhile, ready(), JobRun.open(NAME).id) == (0, 1, number)


# What is in the way of a stop

ODD = "caf\udce9 \x1b[2J\x00\u202e"
"""Bytes that are no text, what a terminal obeys, a NUL that PostgreSQL refuses, and a turn of the writing."""
SEEN = r"caf\udce9 \x1b[2J\x00\u202e"


@pytest.mark.parametrize("command", ["pause", "stop", "release"])
def test_a_reason_of_any_bytes_is_kept_escaped(main, database, command):
    Hold.add(OTHER, "pause", reason=None, by="nobody")
    if command == "release":
        Hold.add(NAME, "breaker", reason="9 of 10", by="worker-1:9")

    result = main(command, NAME, "--reason", ODD)

    assert (result.status, acts()[-1].reason) == (0, SEEN)
    assert command == "release" or Hold.standing(batch=NAME)[0].reason == SEEN


def test_a_run_is_cancelled_for_a_reason_of_any_bytes(main, database):
    number = JobRun.claim_manual(NAME, by="ops:1")

    assert main("cancel", str(number), "--reason", ODD).status == 0
    assert JobRun.get_by_id(number).cancelled_reason == SEEN


def test_who_acts_may_have_a_name_of_any_bytes(forgekeeper, database):
    name = ODD.replace("\x00", "")
    result = forgekeeper("stop", NAME, "--reason", "wrong rows go", "--no-wait", ACTOR=name)
    by = hold().by
    ended = forgekeeper("resume", NAME, ACTOR=name)

    assert (result.status, by) == (0, SEEN.replace(r"\x00", ""))
    assert (ended.status, stopped()) == (0, set())


@pytest.mark.parametrize("variable", ["user", "sudo"])
def test_the_user_may_have_a_name_of_any_bytes(main, database, monkeypatch, variable):
    if variable == "user":
        monkeypatch.setattr(pwd, "getpwuid", lambda _uid: SimpleNamespace(pw_name=ODD))
    else:
        monkeypatch.setenv("SUDO_USER", ODD.replace("\x00", ""))

    result = main("stop", NAME, "--reason", "wrong rows go", "--no-wait", ACTOR=None)

    assert (result.status, stopped()) == (0, {NAME})
    assert r"caf\udce9" in hold().by


@pytest.fixture
def another(urls):
    """Another session, whose transaction is open."""
    with closing(psycopg2.connect(urls.database)) as connection, connection.cursor() as cursor:
        yield cursor
        connection.rollback()


@pytest.mark.parametrize("locked", ["batches", "holds", "job_runs"])
def test_a_stop_waits_for_nobody_s_lock(main, database, another, locked):
    Batch.register(BATCHES)
    JobRun.claim_manual(NAME, by="ops:1")
    Hold.add(NAME, "stop", reason="earlier", by=ME)
    another.execute(f"select from {locked} for update")
    began = time.monotonic()

    result = main("stop", "--all", "--reason", "wrong rows go", "--no-wait", ACTOR=ME)

    assert (result.status, stopped()) == (0, set(BATCHES))
    assert time.monotonic() - began < 3


def test_what_cannot_be_stopped_is_named_and_all_others_are_stopped(main, database):
    database.execute_sql(f"""
        create function refuse() returns trigger language plpgsql as $$ begin raise exception 'not this one'; end $$;
        create trigger refuse before insert on holds for each row when (new.batch = '{NAME}') execute function refuse()
    """)
    try:
        result = main("stop", "--all", "--reason", "wrong rows go", "--no-wait")
    finally:
        database.execute_sql("drop function refuse cascade")

    assert (result.status, stopped()) == (1, set(BATCHES) - {NAME})
    assert result.stderr.startswith(f"{NAME} is not stopped: ")


def test_a_stop_works_while_migrations_are_pending(main, settings, new_database, query):
    url = new_database()
    main("migrate", DATABASE_URL=url)
    query(url, "delete from forgekeeper_migrations where name = '0003_paused_since'")

    result = main("stop", NAME, "--reason", "wrong rows go", "--no-wait", DATABASE_URL=url)

    assert (result.status, query(url, "select batch from holds where kind = 'stop'")) == (0, [(NAME,)])


# the audit


@pytest.mark.parametrize("command", ["pause", "stop"])
def test_what_holds_a_batch_back_is_recorded_with_what_was_before_and_after(main, database, command):
    main(command, NAME, "--reason", "a move")

    (act,) = acts()
    assert (act.act, act.batch, act.reason) == (command, NAME, "a move")
    (after,) = act.after["holds"]
    assert (act.before["holds"], after["kind"], after["reason"]) == ([], command, "a move")


def test_a_resumption_records_what_it_has_ended(main, database):
    Hold.add(NAME, "stop", reason="wrong rows go", by=ME)

    main("resume", NAME, "--reason", "they were right", ACTOR=ME)

    (act,) = acts()
    assert (act.act, act.reason) == ("resume", "they were right")
    (before,) = act.before["holds"]
    assert (before["reason"], act.after["holds"]) == ("wrong rows go", [])


def test_a_cancelled_run_is_recorded(main, database):
    number = JobRun.claim_manual(NAME, by="ops:1")

    main("cancel", str(number), "--reason", "not now")

    (act,) = acts()
    assert (act.act, act.what, act.batch, act.before["state"]) == ("cancel", f"run:{number}", NAME, "claimed")
