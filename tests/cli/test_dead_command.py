"""What was given up: `dead list`, `show`, `replay` and `purge`, over letters made as Dramatiq makes them."""

import time
from datetime import UTC, datetime, timedelta

import orjson
import pytest
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

from forgekeeper.batches import BATCHES, queues
from forgekeeper.connections import client
from forgekeeper.database import now
from forgekeeper.delivery.enqueue_unique import enqueue_unique
from forgekeeper.delivery.queues import depth
from forgekeeper.process.broker import NAMESPACE, broker
from forgekeeper.process.run_messages import RunMessages, message_of
from forgekeeper.runs import reconcile
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import JobRun
from tests.harness.terminal import on_a_terminal

NAME = "user_status_cleanup"
CHILD, QUEUE = "clean_project_refs", "git"
CLOSED_REDIS = "redis://127.0.0.1:1/0"
LIMIT = 60

pytestmark = pytest.mark.usefixtures("database")


def bury(message, by=None):
    """Send a message, and refuse it as a worker does: a bare Dramatiq one, which notes no reason, or ours."""
    by = by or RedisBroker(client=client, namespace=NAMESPACE, middleware=[])
    enqueue_unique(broker, message)
    by.do_fetch(message.queue_name, 1)
    by.do_nack(message.queue_name, message.message_id)


def child(number, **options):
    """Let the child of a project die; return its id."""
    message_id = f"{CHILD}:{number}"
    bury(Message(QUEUE, CHILD, (number,), {}, options, message_id))
    return message_id


def batch(*, state="failed"):
    """Let a run's message die; its row is in that state."""
    run = JobRun.create(batch=NAME, state=state, finished_at=now() if state == "failed" else None)
    bury(message_of(BATCHES[NAME], JobRun.get_by_id(run.id)), by=broker)
    return str(run.id)


def age(letter_id, by, queue=QUEUE):
    client.zincrby(f"{NAMESPACE}:{queue}.XQ", -by.total_seconds() * 1000, letter_id)


def spoil(letter_id, body):
    client.hset(f"{NAMESPACE}:{QUEUE}.XQ.msgs", letter_id, body)


def note(letter_id, reason):
    client.hset(f"{NAMESPACE}:{QUEUE}.XQ.reasons", letter_id, reason)


def dead():
    return {key.decode() for queue in queues() for key in client.zrange(f"{NAMESPACE}:{queue}.XQ", 0, -1)}


def waiting(queue=QUEUE):
    return [key.decode() for key in client.lrange(f"{NAMESPACE}:{queue}", 0, -1)]


def audited(result, sentence):
    """List the ids of the log lines that say so."""
    lines = [orjson.loads(line) for line in result.stderr.splitlines() if line.startswith("{")]
    return [line for line in lines if line["message"] == sentence]


# List


def test_without_dead_letters_none_are_listed(main):
    assert main("dead", "list", "--json").json == {"dead": 0, "entries": []}


def test_a_dead_letter_is_listed_with_what_it_was_and_why_it_was_given_up(main):
    letter_id = child(7, retries=25, traceback="Traceback\n  ...\nOSError: no disk")

    answer = main("dead", "list", "--json").json

    (entry,) = answer["entries"]
    since = datetime.fromisoformat(entry.pop("since"))
    assert answer["dead"] == 1
    where = {"queue": QUEUE, "id": letter_id, "actor": CHILD, "args": [7]}
    assert entry == where | {"retries": 25, "reason": "OSError: no disk"}
    assert abs(since - datetime.now(UTC)) < timedelta(minutes=1)


def test_the_noted_reason_is_listed(main):
    note(child(7), "poison")

    assert main("dead", "list", "--json").json["entries"][0]["reason"] == "poison"


@pytest.mark.parametrize("arguments", [["dead"], ["dead", "list"]], ids=" ".join)
def test_dead_letters_are_shown_as_a_table(main, arguments):
    note(child(7), "poison [1]\nsecond line")
    batch()

    result = main(*arguments)

    assert (result.status, result.stdout.splitlines()[-1]) == (0, "2 in all")
    (line,) = [line for line in result.stdout.splitlines() if "clean_project_refs:7" in line]
    assert all(word in line for word in (QUEUE, "[7]", "poison [1] second line"))


def test_of_many_the_newest_are_listed_or_the_oldest(main):
    for number in range(4):
        age(child(number), timedelta(hours=number))

    newest = main("dead", "list", "--limit", "2", "--json").json
    oldest = main("dead", "list", "--limit", "2", "--oldest", "--json").json

    assert [entry["args"] for entry in newest["entries"]] == [[0], [1]]
    assert [entry["args"] for entry in oldest["entries"]] == [[3], [2]]
    assert newest["dead"] == 4


# Show


def test_show_prints_all_of_a_letter_and_its_trace(main):
    letter_id = child(7, retries=3, traceback="Traceback\n  File x\nOSError: no disk", max_retries=5)

    lines = main("dead", "show", letter_id).stdout.splitlines()

    assert {f"id: {letter_id}", "args: [7]", "retries: 3", "max_retries: 5", "reason: OSError: no disk"} <= set(lines)
    assert lines[-4:] == ["traceback:", "    Traceback", "      File x", "    OSError: no disk"]


def test_show_with_json_prints_the_message(main):
    letter_id = child(7, retries=3)

    shown = main("dead", "show", letter_id, "--json").json

    assert (shown["actor"], shown["args"], shown["kwargs"], shown["options"]["retries"]) == (CHILD, [7], {}, 3)


def test_show_leaves_nothing_out_of_a_long_message(main):
    bury(Message(QUEUE, CHILD, ("x" * 20_000,), {}, {}, "7"))

    assert "x" * 20_000 in main("dead", "show", "7").stdout


@pytest.mark.parametrize(
    "command", [["list"], ["show", "7"], ["list", "--json"], ["show", "7", "--json"]], ids=" ".join
)
def test_control_characters_are_escaped(main, command):
    bury(
        Message(QUEUE, "a\x1b[31m", ("\x1b]0;title\x07",), {"\x1b": 1}, {"traceback": "Error: \x1b[2J", "\x1b": 1}, "7")
    )

    result = main("dead", *command)

    assert (result.status, "\x1b" in result.stdout) == (0, False)


@pytest.mark.parametrize("body", [b"no json \x1b\xff", b"", b'{"args": [1]}', b'{"args": ["\\ud800"]}'])
def test_a_malformed_letter_is_shown_as_it_is(main, body):
    spoil(child(7), body)

    shown = main("dead", "show", f"{CHILD}:7", "--json").json
    result = main("dead", "show", f"{CHILD}:7")

    assert (shown["fault"], shown["body"]) == ("its body is no message", body.decode(errors="backslashreplace"))
    assert (result.status, "its body is no message" in result.stdout, "\x1b" in result.stdout) == (0, True, False)


# Replay


def test_a_replayed_child_is_back_in_its_queue(main):
    letter_id = child(7, retries=25, traceback="x", eta=1, requeue_timestamp=1)

    result = main("dead", "replay", letter_id)

    assert (result.status, result.stdout) == (0, f"{letter_id} is back in the queue git\n")
    assert (waiting(), dead()) == ([letter_id], set())
    message = Message.decode(client.hget(f"{NAMESPACE}:{QUEUE}.msgs", letter_id))
    assert message.options == {"redis_message_id": letter_id}


def test_a_child_that_is_on_its_way_is_left_to_itself_and_its_letter_kept(main):
    letter_id = child(7)
    enqueue_unique(broker, Message(QUEUE, CHILD, (7,), {}, {}, letter_id))

    result = main("dead", "replay", letter_id)

    assert result.status == 0
    assert result.stdout == f"{letter_id} is kept: a message with its id is on its way already\n"
    assert (waiting(), dead()) == ([letter_id], {letter_id})


def test_a_replayed_batch_becomes_a_new_run_by_hand(main):
    letter_id = batch()

    result = main("dead", "replay", letter_id, "--json")

    run = JobRun.open(NAME)
    assert (result.status, result.json["replayed"], result.json["runs"]) == (0, 1, [run.id])
    assert (run.tick, run.state, str(run.id) != letter_id) == (None, "enqueued", True)
    assert (waiting("cron"), dead()) == ([str(run.id)], set())


@pytest.mark.parametrize(("state", "sentence"), [("enqueued", "is queued already"), ("started", "is running on")])
def test_a_batch_that_is_queued_or_running_is_not_replayed_and_its_letter_kept(main, state, sentence):
    letter_id = batch()
    JobRun.create(batch=NAME, state=state, started_at=now(), alive_at=now(), claimed_at=now())

    result = main("dead", "replay", letter_id)

    assert result.status == 0
    assert f"{letter_id} is kept: {NAME} {sentence}" in result.stdout
    assert dead() == {letter_id}


def test_a_paused_batch_is_not_replayed_and_its_letter_kept(main):
    letter_id = batch()
    Hold.add(NAME, "pause", until=None, reason="a reason", by="ops")

    result = main("dead", "replay", letter_id, "--json")

    assert (result.status, result.json["kept"][0]["kept"], dead()) == (0, "paused", {letter_id})
    assert JobRun.open(NAME) is None


def test_a_letter_whose_own_row_is_still_open_is_replayed_all_the_same(main):
    letter_id = batch(state="enqueued")

    main("dead", "replay", letter_id)

    assert (JobRun.get_by_id(letter_id).reason, dead()) == ("dead_lettered", set())
    assert waiting("cron") == [str(JobRun.open(NAME).id)]


def test_a_replayed_run_is_not_given_up_for_the_letter_it_came_from(main):
    main("dead", "replay", batch())

    reconcile.send(NAME, RunMessages(BATCHES[NAME]))

    assert JobRun.open(NAME).state == "enqueued"


def test_an_unknown_actor_is_refused_with_a_sentence(main):
    bury(Message(QUEUE, "of_tomorrow", (), {}, {}, "7"))

    result = main("dead", "replay", "7")

    assert (result.status, dead()) == (1, {"7"})
    assert result.complaint.startswith(
        "7 is kept: there is no actor 'of_tomorrow'; replay it with a forgekeeper that has it"
    )


def test_a_malformed_letter_is_refused_with_a_sentence(main):
    letter_id = child(7)
    spoil(letter_id, b"nonsense")

    result = main("dead", "replay", letter_id)

    assert (result.status, dead(), waiting()) == (1, {letter_id}, [])
    assert result.complaint == f"{letter_id} is kept: its body is no message; it can be purged"


@pytest.mark.parametrize("command", ["show", "replay", "purge"])
def test_what_is_no_dead_letter_is_refused_with_a_sentence(main, command):
    result = main("dead", command, "nothing")

    assert result.status == 1
    assert result.complaint == "nothing is not among the dead letters; `forgekeeper dead list` shows them"


def test_all_are_replayed_but_those_that_cannot_be(main):
    good = {child(number) for number in range(3)}
    bury(Message(QUEUE, "of_tomorrow", (), {}, {}, "unknown"))
    spoil(child(99), b"nonsense")
    runs = [batch(), batch()]

    result = main("dead", "replay", "--all", "--json")

    kept = {one["id"]: one["kept"] for one in result.json["kept"]}
    assert (result.status, result.json["replayed"]) == (0, 4)
    assert kept == {"unknown": "unknown_actor", f"{CHILD}:99": "malformed", runs[1]: "overlap"}
    assert (set(waiting()), dead()) == (good, set(kept))


def test_replaying_all_says_how_many_and_why_others_were_kept(main):
    child(7)
    bury(Message(QUEUE, "of_tomorrow", (), {}, {}, "unknown"))

    lines = main("dead", "replay", "--all").stdout.splitlines()

    assert lines[0].startswith("unknown is kept: there is no actor")
    assert lines[1:] == ["1 replayed, 1 kept"]


def test_replaying_all_of_no_dead_letters_is_no_error(main):
    assert main("dead", "replay", "--all") == (0, "0 replayed, 0 kept\n", "")


def test_a_dry_run_says_what_a_replay_would_do_and_does_nothing(main):
    letters = {child(1), child(2), batch(), batch()}
    enqueue_unique(broker, Message(QUEUE, CHILD, (2,), {}, {}, f"{CHILD}:2"))

    planned = main("dead", "replay", "--all", "--dry-run", "--json").json
    unchanged = (dead(), waiting(), JobRun.open(NAME)) == (letters, [f"{CHILD}:2"], None)
    done = main("dead", "replay", "--all", "--json").json

    assert unchanged
    assert (planned["replayed"], [one["id"] for one in planned["kept"]]) == (2, [one["id"] for one in done["kept"]])
    assert planned["replayed"] == done["replayed"]


def test_replaying_all_keeps_to_the_rate(main):
    for number in range(6):
        child(number)
    began = time.monotonic()

    main("dead", "replay", "--all", "--rate", "10")

    assert time.monotonic() - began >= 0.5
    assert len(waiting()) == 6


def test_each_replay_leaves_an_audit_line(main):
    child(7)
    letter_id = batch()

    result = main("dead", "replay", "--all")

    lines = {line["id"]: line for line in audited(result, "dead letter replayed")}
    assert lines.keys() == {f"{CHILD}:7", letter_id}
    assert (lines[f"{CHILD}:7"]["queue"], lines[f"{CHILD}:7"]["actor"], lines[f"{CHILD}:7"]["level"]) == (
        QUEUE,
        CHILD,
        "warning",
    )
    assert (lines[letter_id]["run"], bool(lines[letter_id]["by"])) == (JobRun.open(NAME).id, True)


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_letter_that_stays_where_it_is_leaves_no_audit_line(main, options):
    spoil(child(7), b"nonsense")
    letter_id = child(8)
    if not options:
        enqueue_unique(broker, Message(QUEUE, CHILD, (8,), {}, {}, letter_id))

    result = main("dead", "replay", "--all", *options)

    assert (audited(result, "dead letter replayed"), dead()) == ([], {f"{CHILD}:7", letter_id})


# Purge


def test_a_purged_letter_is_gone_with_its_body_and_its_reason(main):
    letter_id, other = child(7), child(8)
    note(letter_id, "poison")

    result = main("dead", "purge", letter_id, "--yes")

    assert (result.status, result.stdout, dead()) == (0, "1 removed\n", {other})
    assert client.hkeys(f"{NAMESPACE}:{QUEUE}.XQ.msgs") == [other.encode()]
    assert client.hlen(f"{NAMESPACE}:{QUEUE}.XQ.reasons") == 0


def test_all_can_be_purged_even_malformed_ones(main):
    spoil(child(7), b"nonsense")
    batch()

    result = main("dead", "purge", "--all", "--yes", "--json")

    assert (result.json, dead()) == ({"purged": 2, "dry_run": False}, set())


@pytest.mark.parametrize("duration", ["7200", "7200s", "120m", "2h"])
def test_only_those_older_than_a_duration_are_purged(main, duration):
    age(child(1), timedelta(hours=2, minutes=1))
    age(child(2), timedelta(hours=1, minutes=59))

    result = main("dead", "purge", "--older-than", duration, "--yes")

    assert (result.stdout, dead()) == ("1 removed\n", {f"{CHILD}:2"})


def test_a_dry_run_says_how_many_would_be_purged_and_removes_none(main):
    letters = {child(1), child(2)}

    result = main("dead", "purge", "--all", "--dry-run")

    assert (result.status, result.stdout, dead()) == (0, "2 would be removed\n", letters)


def test_each_purge_leaves_an_audit_line(main):
    child(7)

    (line,) = audited(main("dead", "purge", "--all", "--yes"), "dead letter purged")

    assert (line["id"], line["queue"], line["actor"], line["level"]) == (f"{CHILD}:7", QUEUE, CHILD, "warning")
    assert line["by"]


def test_without_a_terminal_a_purge_has_to_be_confirmed_beforehand(forgekeeper):
    letter_id = child(7)

    result = forgekeeper("dead", "purge", "--all")

    assert (result.status, dead()) == (2, {letter_id})
    assert result.complaint == "this removes one dead letter for good; say --yes to confirm it, or --dry-run to see it"


def test_purging_all_of_no_dead_letters_asks_nothing(forgekeeper):
    assert forgekeeper("dead", "purge", "--all").stdout == "0 removed\n"


@pytest.mark.parametrize(("answer", "status", "left"), [("y", 0, 0), ("n", 1, 2), ("", 1, 2), ("\x04", 1, 2)])
def test_on_a_terminal_a_purge_asks_first(environment, answer, status, left):
    child(7)
    child(8)

    ended, screen = on_a_terminal(environment(), answer + "\n", "dead", "purge", "--all")

    assert "Remove 2 dead letters for good? [y/N]" in screen
    assert (ended, len(dead())) == (status, left)


def test_status_counts_the_dead_letters(main):
    child(7)

    assert main("status", "--json").json["queues"][QUEUE]["dead"] == 1
    assert depth(client, NAMESPACE, QUEUE)["dead"] == 1


# Wrong use


@pytest.mark.parametrize(
    "arguments",
    [
        ["replay"],
        ["replay", "7", "--all"],
        ["replay", "--all", "--rate", "0"],
        ["purge"],
        ["purge", "7", "--all"],
        ["purge", "--all", "--older-than", "1d"],
        ["purge", "--older-than", "long"],
        ["purge", "--older-than", "-1"],
        ["list", "--limit", "0"],
        ["show"],
        ["nonsense"],
    ],
    ids=" ".join,
)
def test_wrong_use_is_refused_with_a_sentence(main, arguments):
    result = main("dead", *arguments)

    assert (result.status, bool(result.complaint)) == (2, True)


@pytest.mark.parametrize(
    "arguments", [[], ["show", "7"], ["replay", "--all"], ["purge", "--all", "--yes"]], ids=" ".join
)
def test_without_redis_they_fail_with_a_sentence(main, arguments):
    result = main("dead", *arguments, REDIS_URL=CLOSED_REDIS)

    assert (result.status, bool(result.complaint)) == (1, True)
