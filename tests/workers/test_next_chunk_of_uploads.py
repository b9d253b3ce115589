"""While the store deletes a chunk of stale uploads, the run claims and marks the next chunk."""

import json
import os
import signal
from collections import Counter

import pytest

from forgekeeper.guards.deadline import Deadline
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.failpoints import FailpointReached, Failpoints, Fault, arm_failpoints
from forgekeeper.targets.outcomes import StoreUnavailable
from tests.harness.audited import count_open_intents, list_audit_lines
from tests.harness.excluding import exclude
from tests.harness.performing import perform, run_as_worker
from tests.harness.programs import Program
from tests.harness.settings import settings_with
from tests.harness.stale_uploads import (
    BATCH,
    HERE,
    begin,
    now,
    number_paths,
    register,
    registered,
    run,
    time_passes,
    uploads,
)
from tests.harness.waiting import wait_until
from workers.stale_direct_uploads import MAX_EXEC_DURATION, StaleUploadsResult

CHUNK, REST = 10, 3
PATHS = number_paths(CHUNK + REST)

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("workers.stale_direct_uploads.ENTRIES_PER_CHUNK", CHUNK)


@pytest.fixture
def meanwhile(s3):
    """Call it with an act to do while the store has the first request and the next chunk is marked."""
    seen = []

    def when_marked(act=lambda: None):
        def wait_and_act():
            with database.connection_context():
                seen.append(wait_until(lambda: count_open_intents() == 2, 10))
                act()

        s3.proxy.before("bulk", 1, wait_and_act)

    yield when_marked
    assert seen == [True]


def states():
    return Counter(line["state"] for line in list_audit_lines("stale_upload"))


def due_members():
    """Return the entries that a run would claim now."""
    return {member.decode() for member in client.zrangebyscore(uploads.keys.deleting, "-inf", now())}


def members_of(paths):
    return {f"{HERE}:{path}" for path in paths}


def test_the_next_chunk_is_marked_while_the_store_deletes_this_one(s3, meanwhile):
    begin(s3, *PATHS)
    meanwhile()

    outcome = run(artifacts=s3.url)

    assert (outcome, s3.keys(), registered()) == (StaleUploadsResult(13, 13, False, 0), set(), set())
    assert (s3.proxy.counts["bulk"], states(), count_open_intents()) == (2, {"deleted": 13}, 0)


def test_a_stop_in_between_leaves_one_request_and_puts_back_what_was_marked(s3, meanwhile):
    register(*PATHS[:CHUNK], age=20_000)
    begin(s3, *PATHS[CHUNK:])
    stopped = []
    meanwhile(lambda: stopped.append("stopped"))

    outcome = run(Deadline(MAX_EXEC_DURATION, find_stop_reason=lambda: next(iter(stopped), None)), artifacts=s3.url)

    assert (outcome.total_deleted_stale_entries, s3.proxy.counts["bulk"]) == (CHUNK, 1)
    assert (s3.keys(), due_members()) == (set(PATHS[CHUNK:]), members_of(PATHS[CHUNK:]))
    assert (states(), count_open_intents()) == ({"deleted": CHUNK, "kept": REST}, 0)


def test_a_kill_in_between_leaves_one_request_and_the_next_run_counts_each_object_once(s3, meanwhile, urls, tmp_path):
    register(*PATHS[:CHUNK], age=20_000)
    begin(s3, *PATHS[CHUNK:])
    started = []
    meanwhile(lambda: os.kill(started[0].pid, signal.SIGKILL))
    places = {"object_stores": json.dumps({HERE: s3.url}), "database_url": urls.database, "redis_url": urls.redis}
    program = "-m", "tests.harness.run_with_small_chunks", CHUNK
    started.append(Program(tmp_path / "log", *program, breaker_share=1, **places))
    started[0].process.wait()

    assert (s3.proxy.counts["bulk"], s3.keys()) == (1, set(PATHS[CHUNK:]))
    time_passes(settings_with().upload_visibility)
    assert run(artifacts=s3.url).total_deleted_stale_entries == len(PATHS)
    assert (s3.keys(), registered(), count_open_intents()) == (set(), set(), 0)
    assert states() == {"deleted": len(PATHS), "kept": REST}


def test_an_exclusion_that_comes_in_between_counts_for_the_chunk_that_is_marked(s3, meanwhile):
    register(*PATHS[:CHUNK], age=20_000)
    begin(s3, *PATHS[CHUNK:])
    meanwhile(lambda: [exclude(f"pattern:*{path}") for path in PATHS[CHUNK:]])

    outcome = run(artifacts=s3.url)

    assert (outcome.total_deleted_stale_entries, s3.keys()) == (CHUNK, set(PATHS[CHUNK:]))
    assert due_members() == members_of(PATHS[CHUNK:])


def test_what_another_run_has_claimed_in_between_is_left_to_it(s3, meanwhile):
    register(*PATHS[:CHUNK], age=20_000)
    begin(s3, *PATHS[CHUNK:])
    visibility = settings_with().upload_visibility

    def take_over():
        time_passes(visibility)
        uploads.claim(client, visibility=visibility, limit=CHUNK, only=members_of(PATHS[CHUNK:]))

    meanwhile(take_over)

    assert (run(artifacts=s3.url).total_deleted_stale_entries, s3.keys()) == (CHUNK, set(PATHS[CHUNK:]))
    assert (s3.proxy.counts["bulk"], states()) == (1, {"deleted": CHUNK, "locked": REST})


def test_what_was_marked_is_put_back_if_the_store_fails_in_between(s3, meanwhile):
    register(*PATHS[:CHUNK], age=20_000)
    begin(s3, *PATHS[CHUNK:])
    meanwhile(lambda: s3.proxy.answer(403, "AccessDenied", kinds=["head"]))

    with pytest.raises(StoreUnavailable):
        run(artifacts=s3.url)

    assert (s3.proxy.counts["bulk"], s3.keys()) == (1, set(PATHS[CHUNK:]))
    assert members_of(PATHS[CHUNK:]) <= due_members()


def test_if_the_next_chunk_cannot_be_claimed_this_one_is_settled_and_the_run_fails(s3):
    begin(s3, *PATHS)
    claiming_fails = Failpoints({"stale_direct_uploads.claimed": Fault("raise")})
    s3.proxy.before("head", 1, lambda: arm_failpoints(claiming_fails))
    outcome = StaleUploadsResult()
    try:
        with pytest.raises(FailpointReached):
            run(artifacts=s3.url, outcome=outcome)
    finally:
        arm_failpoints(Failpoints())

    assert (outcome.total_deleted_stale_entries, states(), count_open_intents()) == (CHUNK, {"deleted": CHUNK}, 0)


@pytest.mark.parametrize("limit", [CHUNK, 2 * CHUNK + 1, 45 * CHUNK + 5])
def test_a_limit_is_exact_also_if_two_chunks_are_reserved_at_once(s3, limit):
    register(*number_paths(50 * CHUNK))
    limits = {"max_per_run_stale_direct_uploads": limit}

    result = run_as_worker(BATCH, settings_with(object_stores={HERE: s3.url}, **limits)).result

    total = RunTotal.get(RunTotal.batch == BATCH.name)
    assert result["total_deleted_stale_entries"] == limit
    assert (len(registered()), total.records, total.reserved) == (50 * CHUNK - limit, limit, 0)


def test_far_from_a_limit_the_next_chunk_is_reserved_and_marked_too(s3, meanwhile):
    begin(s3, *PATHS)
    reserved = []
    meanwhile(lambda: reserved.append(RunTotal.get(RunTotal.batch == BATCH.name).reserved))
    limits = {"max_per_run_stale_direct_uploads": 50 * CHUNK}

    perform(BATCH, settings=settings_with(object_stores={HERE: s3.url}, **limits), number=1)

    total = RunTotal.get(RunTotal.batch == BATCH.name)
    assert (reserved, total.records, total.reserved, s3.keys()) == ([len(PATHS)], len(PATHS), 0, set())
