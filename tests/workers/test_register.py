"""What the register of uploads promises, one sentence a test."""

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import redis

from forgekeeper.sources.register.entries import BeingDeleted, EntryCounts
from forgekeeper.sources.register.failed_uploads import FailedUploads
from forgekeeper.sources.register.redis_register import ADOPTION_DELAY, RedisRegister
from workers.stale_direct_uploads import UPLOADS_REGISTER

ROOT = Path(__file__).parents[2]
BACKOFF, FIVE_MINUTES = timedelta(minutes=1), timedelta(minutes=5)
STALE = 3 * 3600 + 60
uploads = RedisRegister(replace(UPLOADS_REGISTER, retry=UPLOADS_REGISTER.retry._replace(first=BACKOFF)))


@pytest.fixture(scope="module")
def client(urls):
    with redis.Redis.from_url(urls.redis) as client:
        yield client


@pytest.fixture(autouse=True)
def empty(client):
    client.flushdb()


def now(client):
    return client.time()[0]


def register(client, *members, age=STALE):
    second = now(client)
    client.zadd(uploads.keys.pending, dict.fromkeys(members, second - age))


def claim(client, *, limit=100):
    return uploads.claim(client, visibility=FIVE_MINUTES, limit=limit)


def claimed(client, *, limit=100):
    return [entry.member for entry in claim(client, limit=limit).entries]


def let_pass(client, time):
    """Make *time* pass for what lies in deleting."""
    for member, score in client.zrange(uploads.keys.deleting, 0, -1, withscores=True):
        client.zadd(uploads.keys.deleting, {member: score - time.total_seconds()})


def contents(client):
    """Say which members lie where."""
    sets = {"pending": uploads.keys.pending, "deleting": uploads.keys.deleting, "failed": uploads.keys.failed}
    found = {name: [member.decode() for member in client.zrange(key, 0, -1)] for name, key in sets.items()}
    return {name: members for name, members in found.items() if members}


def give_up(client, member):
    register(client, member)
    mine = claim(client)
    uploads.reject(client, mine, mine.entries)


# Producers


def test_the_commands_that_the_page_gives_to_other_languages_are_these(client):
    (command,) = re.findall(r"^EVALSHA <sha> (.+)$", (ROOT / "docs" / "uploads.md").read_text(), re.MULTILINE)
    sha = client.script_load(
        (ROOT / "forgekeeper" / "sources" / "register" / "lua" / "upload_prepare.lua").read_bytes()
    )

    assert client.execute_command("EVALSHA", sha, *command.split()) == 1
    assert contents(client) == {"pending": ["artifacts:a1/5f0c9e/job.zip"]}
    claim(client)
    register(client, "artifacts:a1/5f0c9e/job.zip")
    claim(client)
    assert client.execute_command("EVALSHA", sha, *command.split()) == 0


# Settling


def test_each_failed_attempt_waits_twice_as_long_and_the_fifth_is_the_last(client):
    register(client, "artifacts:a")
    waits = []
    for attempt in range(1, 5):
        mine = claim(client)
        assert [(entry.member, entry.attempts) for entry in mine.entries] == [("artifacts:a", attempt - 1)]

        second = now(client)
        assert not uploads.record_failure(client, mine, mine.entries[0])
        wait = client.zscore(uploads.keys.deleting, "artifacts:a") - second
        waits.append(wait)
        assert claimed(client) == []
        let_pass(client, timedelta(seconds=wait))

    mine = claim(client)
    assert uploads.record_failure(client, mine, mine.entries[0]) is True

    assert waits == pytest.approx([60, 120, 240, 480], abs=10)
    assert contents(client) == {"failed": ["artifacts:a"]}
    assert claimed(client) == []


@pytest.mark.parametrize(
    "act",
    [
        uploads.forget,
        uploads.put_back,
        uploads.reject,
        lambda client, claim, entries: uploads.record_failure(client, claim, entries[0]),
    ],
)
def test_a_late_owner_disturbs_nothing(client, act):
    register(client, "artifacts:a")
    late = claim(client)
    let_pass(client, FIVE_MINUTES)
    mine = claim(client)
    assert [entry.member for entry in mine.entries] == [entry.member for entry in late.entries]
    before = client.zrange(uploads.keys.deleting, 0, -1, withscores=True)

    assert act(client, late, late.entries) == 0

    assert client.zrange(uploads.keys.deleting, 0, -1, withscores=True) == before
    assert client.hlen(uploads.keys.attempts) == 0
    assert uploads.forget(client, mine, mine.entries) == 1


# Adopted


def adopt(client, *paths, ago=timedelta()):
    uploads.adopt(client, "artifacts", paths)
    for key in (uploads.keys.pending, uploads.keys.adopted):
        for path in paths:
            client.zincrby(key, -ago.total_seconds(), f"artifacts:{path}")


@pytest.mark.parametrize("lies_in", ["pending", "deleting", "failed"])
def test_what_the_register_names_already_is_not_adopted(client, lies_in):
    register(client, "artifacts:a")
    if lies_in == "deleting":
        claim(client)
    if lies_in == "failed":
        give_up(client, "artifacts:a")

    assert uploads.adopt(client, "artifacts", ["a"]) == 0
    assert contents(client) == {lies_in: ["artifacts:a"]}


def test_scripts_of_the_version_before_tell_an_adopted_entry_by_its_half_second(client):
    adopt(client, "a")

    assert client.zscore(uploads.keys.pending, "artifacts:a") % 1 == 0.5


@pytest.mark.parametrize("ago", [timedelta(), timedelta(hours=23)])
def test_what_was_adopted_and_waits_is_counted_nowhere(client, ago):
    adopt(client, "a", "b", ago=ago)
    uploads.prepare(client, "artifacts", "upload")

    assert uploads.count_pending(client) == 1
    assert uploads.count_entries(client) == EntryCounts(1, 0, None, 0)


def prepare_with_three_keys(client):
    """Prepare the path `a` as producers do that were written before there were adopted ones."""
    script = (ROOT / "forgekeeper" / "sources" / "register" / "lua" / "upload_prepare.lua").read_text()
    return client.eval(script, 3, uploads.keys.pending, uploads.keys.deleting, uploads.keys.failed, "artifacts:a")


@pytest.mark.parametrize("lies_in", ["deleting", "failed"])
def test_a_producer_that_gives_three_keys_is_refused_what_is_being_deleted(client, lies_in):
    register(client, "artifacts:a")
    mine = claim(client)
    if lies_in == "failed":
        uploads.reject(client, mine, mine.entries)

    assert prepare_with_three_keys(client) == 0

    assert contents(client) == {lies_in: ["artifacts:a"]}


def test_an_adopted_path_that_a_producer_with_three_keys_prepares_is_its_own_upload(client):
    adopt(client, "a")
    assert prepare_with_three_keys(client) == 1

    assert (uploads.withdraw(client, ["artifacts:a"]), uploads.count_pending(client)) == (([], []), 1)
    client.zincrby(uploads.keys.pending, -STALE, "artifacts:a")
    (entry,) = claim(client).entries
    assert (entry.member, entry.attempts, entry.adopted_at) == ("artifacts:a", 0, None)


@pytest.mark.parametrize("lies_in", ["pending", "deleting", "failed"])
def test_what_is_withdrawn_leaves_nothing_in_the_register(client, lies_in):
    adopt(client, "a", ago=timedelta() if lies_in == "pending" else 2 * ADOPTION_DELAY)
    if lies_in != "pending":
        mine = claim(client)
        uploads.record_failure(client, mine, mine.entries[0])
    if lies_in == "failed":
        let_pass(client, BACKOFF)
        mine = claim(client)
        uploads.reject(client, mine, mine.entries)

    assert uploads.withdraw(client, ["artifacts:a"]) == (["artifacts:a"], [])
    assert uploads.withdraw(client, ["artifacts:a"]) == ([], [])
    assert client.keys("*") == []


def test_what_a_claim_holds_is_withdrawn_only_once_the_claim_has_run_out(client):
    adopt(client, "a", ago=2 * ADOPTION_DELAY)
    claim(client)
    held = uploads.withdraw(client, ["artifacts:a"])
    let_pass(client, FIVE_MINUTES)

    assert held == ([], ["artifacts:a"])
    assert uploads.withdraw(client, ["artifacts:a"]) == (["artifacts:a"], [])


def test_the_upload_of_a_producer_is_not_withdrawn_wherever_it_lies(client):
    register(client, "artifacts:a", "artifacts:b")
    mine = claim(client, limit=1)
    uploads.reject(client, mine, mine.entries)
    register(client, "artifacts:c")

    assert uploads.withdraw(client, ["artifacts:a", "artifacts:b", "artifacts:c"]) == ([], [])


# Failed, and to be tried again


def test_what_a_run_is_at_is_not_retried(client):
    register(client, "artifacts:a")
    mine = claim(client)
    uploads.record_failure(client, mine, mine.entries[0])
    let_pass(client, BACKOFF)
    claim(client)

    assert FailedUploads(uploads).retry(client, ["artifacts:a"]) == 0


# Redis's clock was ahead, and is set right


def test_an_upload_that_was_registered_days_ahead_is_stale_three_hours_after_the_clock_was_set_right(client):
    register(client, "artifacts:a", age=-2 * 86400)

    corrected, afterwards = uploads.correct_clock(client), now(client)

    assert (corrected, client.zscore(uploads.keys.pending, "artifacts:a") <= afterwards) == (1, True)


def test_completing_what_was_claimed_comes_too_late(client):
    register(client, "artifacts:a")
    claim(client)

    assert uploads.complete(client, "artifacts", "a") is False
    with pytest.raises(BeingDeleted):
        uploads.prepare(client, "artifacts", "a")
    assert contents(client) == {"deleting": ["artifacts:a"]}
