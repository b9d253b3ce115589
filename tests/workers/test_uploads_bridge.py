"""Uploads that the forge registers in a hash of its own: what a run moves out of it, and what it leaves there."""

from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from forgekeeper.engine.register_source import MAX_UNLOCKED_UPLOADS
from forgekeeper.guards.deadline import Deadline
from forgekeeper.platform.connections import RedisClient, client, run_script
from forgekeeper.platform.database import now as database_now
from forgekeeper.sources.register import bridge
from forgekeeper.sources.register.entries import EntryCounts
from forgekeeper.sources.register.keys import ENTRIES_PER_COMMAND
from models import JobArtifact
from tests.harness.excluding import exclude
from tests.harness.settings import settings_with
from tests.harness.stale_uploads import (
    BATCH,
    HERE,
    STALE,
    members,
    now,
    number_paths,
    register_members,
    registered,
    run,
    uploads,
)
from tests.system.soak import rights
from workers.stale_direct_uploads import MAX_EXEC_DURATION, MAX_UPLOAD_DURATION, StaleUploadsResult, producer

MINUTE = 60


@pytest.fixture(autouse=True)
def process(database, monkeypatch):
    """The process's settings say that the forge registers uploads in its hash."""
    monkeypatch.setattr(client, "settings", settings_with(uploads_register="hash"))


def put(*members, age=STALE, **values):
    """Register as the forge does; *values* are of paths, and any text."""
    fields = dict.fromkeys(members, now() - int(age)) | {f"{HERE}:{path}": text for path, text in values.items()}
    client.hset(uploads.keys.hash, mapping=fields)


def begin(store, *paths, age=STALE):
    store.put(*paths)
    put(*(f"{HERE}:{path}" for path in paths), age=age)


def in_hash():
    return {field.decode() for field in client.hkeys(uploads.keys.hash)}


def live(*paths):
    for path in paths:
        JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path=path)


# What goes


def test_exactly_the_stale_uploads_go(folder):
    begin(folder, "stale", "a:b:c", "completed", "again", "live")
    begin(folder, "fresh", age=MINUTE)
    begin(folder, "nearly", age=MAX_UPLOAD_DURATION.total_seconds() - MINUTE)
    client.hdel(uploads.keys.hash, f"{HERE}:completed")
    put(f"{HERE}:again", age=0)
    live("live")

    outcome = run(artifacts=folder.url)

    assert outcome == StaleUploadsResult(6, 2, False, 0)
    assert folder.keys() == {"completed", "again", "live", "fresh", "nearly"}
    assert (in_hash(), registered()) == ({f"{HERE}:{path}" for path in ("again", "fresh", "nearly")}, set())


def test_what_people_exclude_is_not_moved(folder):
    begin(folder, "go", "keep/1", "keep/2")
    exclude("pattern:artifacts:keep/*")

    run(artifacts=folder.url)

    assert (folder.keys(), in_hash()) == ({"keep/1", "keep/2"}, {f"{HERE}:keep/1", f"{HERE}:keep/2"})


def test_an_upload_of_exactly_three_hours_is_not_stale():
    while True:
        put("artifacts:a", age=MAX_UPLOAD_DURATION.total_seconds())
        second = now()
        moved = uploads.bridge.move_stale(client, limit=1)
        if now() == second:
            break

    assert moved == 0


def test_what_no_object_can_bear_is_put_aside_and_the_rest_goes_on(folder):
    malformed = {"no colon", "artifacts:", ":path", "artifacts:a//b", "artifacts:a\x00b", "artifacts:\udcff"}
    begin(folder, "good")
    put(*(member.encode(errors="surrogateescape") for member in malformed))

    outcome = run(artifacts=folder.url)

    assert (outcome, folder.keys()) == (StaleUploadsResult(7, 1, False, 6), set())
    assert (members(uploads.keys.failed), client.hlen(uploads.keys.hash)) == (malformed, 0)


def test_what_has_no_time_stays_and_is_counted_and_named(folder):
    odd = ["", "x", "-1", "1.5", "1e9", " 1", "nan", "9" * 400, now() * 1000, now() + 2 * 86_400]
    begin(folder, *(f"odd/{n}" for n in range(len(odd))), "good")
    put(**{f"odd/{n}": time for n, time in enumerate(odd)})

    with capture_logs() as logs:
        outcome = run(artifacts=folder.url)

    assert (outcome, len(folder.keys()), client.hlen(uploads.keys.hash)) == (
        StaleUploadsResult(11, 1, False, 10),
        10,
        10,
    )
    (line,) = [line for line in logs if line["log_level"] == "error"]
    assert (line["entries"], line["first"].startswith(f"{HERE}:odd/")) == (10, True)


# What happens in between


def test_an_upload_that_is_prepared_again_between_the_look_and_the_move_stays():
    put("artifacts:a")
    put("artifacts:fresh", age=MINUTE)
    ((field, seconds),) = next(uploads.bridge.read_stale_pages(client))
    put("artifacts:a", age=0)

    moved = run_script(
        client, "upload_move", keys=[uploads.keys.hash, uploads.keys.pending], args=[field, int(seconds)]
    )

    assert (moved, in_hash(), registered()) == (0, {"artifacts:a", "artifacts:fresh"}, set())


def test_what_is_pending_in_our_register_already_keeps_its_time():
    register_members("artifacts:a", age=0)
    put("artifacts:a")

    assert (uploads.bridge.move_stale(client, limit=1), uploads.count_entries(client).due) == (1, 0)


def test_a_move_after_which_nothing_is_due_does_not_end_the_run():
    register_members("artifacts:a", age=0)
    put("artifacts:a", "artifacts:b")

    claim = uploads.claim(client, visibility=timedelta(minutes=5), limit=1)

    assert [entry.member for entry in claim.entries] == ["artifacts:b"]


def test_a_crash_after_the_move_leaves_an_entry_that_the_next_run_claims(folder):
    begin(folder, "a")
    uploads.bridge.move_stale(client, limit=1)

    assert run(artifacts=folder.url) == StaleUploadsResult(1, 1, False, 0)


def test_an_upload_that_completes_after_the_move_is_kept_where_a_live_row_names_it(folder):
    begin(folder, "a")
    uploads.bridge.move_stale(client, limit=1)
    live("a")

    with capture_logs() as logs:
        outcome = run(artifacts=folder.url)

    assert (outcome, folder.keys(), registered()) == (StaleUploadsResult(1, 0, False, 0), {"a"}, set())
    assert [(line["path"], line["reason"]) for line in logs] == [("a", "an artifact names it")]


def test_live_rows_are_looked_at_right_before_each_few_objects_go(store):
    begin(store, *number_paths(MAX_UNLOCKED_UPLOADS + 5))
    # It is called after the first of them, and once more at the end.
    deadline = Deadline(MAX_EXEC_DURATION, safe_point=lambda: live(*store.keys()))

    outcome = run(deadline, artifacts=store.url)

    assert (outcome.total_deleted_stale_entries, len(store.keys())) == (MAX_UNLOCKED_UPLOADS, 5)


def test_what_the_forge_registers_once_more_while_it_is_being_deleted_stays_with_the_forge(folder):
    begin(folder, "a")
    uploads.bridge.move_stale(client, limit=1)
    begin(folder, "a", age=0)

    outcome = run(artifacts=folder.url)

    assert (outcome, folder.keys(), in_hash(), registered()) == (StaleUploadsResult(2), {"a"}, {f"{HERE}:a"}, set())


# A large hash


def test_what_one_move_does_not_come_to_the_next_one_does(monkeypatch):
    monkeypatch.setattr(bridge, "MAX_SEARCHED_PAGES", 2)
    put(*(f"{HERE}:fresh/{n}" for n in range(4 * ENTRIES_PER_COMMAND)), age=0)
    put(*(f"{HERE}:stale/{n}" for n in range(40)))

    moved = [uploads.bridge.move_stale(client, limit=100) for _ in range(6)]

    assert (sum(moved), max(moved) < 40, client.hlen(uploads.keys.hash)) == (40, True, 4 * ENTRIES_PER_COMMAND)


def test_a_limit_within_a_page_leaves_the_rest_of_it_to_later_moves():
    put(*(f"{HERE}:{n}" for n in range(3 * ENTRIES_PER_COMMAND)))

    moved = [uploads.bridge.move_stale(client, limit=700) for _ in range(8)]

    assert (max(moved), sum(moved), moved[-1]) == (700, 3 * ENTRIES_PER_COMMAND, 0)


def test_a_move_that_finds_nothing_up_to_the_end_goes_on_at_the_start():
    put(*(f"{HERE}:{n}" for n in range(3 * ENTRIES_PER_COMMAND)), age=0)
    cursor, fields = client.hscan(uploads.keys.hash, count=ENTRIES_PER_COMMAND)
    put(*fields)
    client.set(uploads.keys.cursor, cursor)

    assert uploads.bridge.move_stale(client, limit=2 * ENTRIES_PER_COMMAND) == len(fields)


def test_of_a_large_hash_some_pages_say_how_much_of_it_is_due(monkeypatch):
    monkeypatch.setattr(bridge, "MAX_COUNTED_PAGES", 2)
    put(*(f"{HERE}:{n}" for n in range(5 * ENTRIES_PER_COMMAND)))
    client.hset(uploads.keys.hash, "artifacts:odd", "x")

    found = uploads.count_entries(client)

    assert (found.pending, found.due) == (5 * ENTRIES_PER_COMMAND + 1, pytest.approx(5 * ENTRIES_PER_COMMAND, rel=0.01))


def test_the_oldest_upload_of_all_pages_says_since_when_uploads_are_due():
    put(*(f"{HERE}:{n}" for n in range(2 * ENTRIES_PER_COMMAND)))
    put(f"{HERE}:old", age=STALE + 60 * MINUTE)
    put(*(f"{HERE}:{n}" for n in range(2 * ENTRIES_PER_COMMAND, 4 * ENTRIES_PER_COMMAND)))
    since_stale = uploads.count_entries(client).due_since
    client.hdel(uploads.keys.hash, f"{HERE}:old")

    assert (uploads.count_entries(client).due_since - since_stale).total_seconds() == pytest.approx(60 * MINUTE, abs=10)


# What is shown of it


def test_what_the_forge_has_registered_is_counted_and_found():
    put("artifacts:old", age=STALE + MINUTE)
    put("artifacts:stale")
    put("artifacts:fresh", "lfs:fresh", age=0)
    register_members("artifacts:ours", age=STALE)

    found, stake = uploads.count_entries(client), BATCH.stake(database_now())

    assert (found.pending, found.due, found.failed, stake.total(1), stake.due(1)) == (5, 3, 0, 5, 3)
    assert abs(found.due_since.timestamp() - (now() - 2 * MINUTE)) < 10
    assert producer.count(client) == 5
    assert producer.exists(client, HERE, "fresh")
    assert producer.pending_only(client, HERE, ["ours", "fresh", "never"]) == ["ours", "fresh"]
    assert {*BATCH.known_objects[0](HERE)} == {"old", "stale", "fresh", "ours"}


def test_what_the_forge_has_registered_is_not_adopted(folder):
    put("artifacts:a")

    assert (uploads.find_registered(client, HERE, ["a", "b"]), uploads.adopt(client, HERE, ["a"])) == ({"a"}, 0)


@pytest.mark.parametrize("user", ["forgekeeper-exporter", "forgekeeper-console"])
def test_those_who_only_look_may_count_it(urls, user):
    put("artifacts:a")
    rights.make_users(client, "secret")
    looking = RedisClient.from_url(urls.redis, username=user, password="secret", driver_info=None)
    looking.settings = client.settings

    with looking:
        found = uploads.count_entries(looking)
    client.execute_command("ACL", "DELUSER", *rights.users())

    assert (found.pending, found.due) == (1, 1)


def test_a_key_of_another_type_in_its_place_is_named():
    client.set(uploads.keys.hash, "x")

    (said,) = BATCH.misreadings()

    assert said.startswith("the key pending_direct_uploads is a string, but must be a hash")


def test_by_default_nothing_reads_it(monkeypatch):
    monkeypatch.setattr(client, "settings", settings_with())
    put("artifacts:a")

    assert (
        uploads.bridge.move_stale(client, limit=1),
        [*uploads.bridge.read_stale_pages(client)],
        uploads.bridge.find_registered(client, ["artifacts:a"]),
    ) == (
        0,
        [],
        set(),
    )
    assert (uploads.count_entries(client), uploads.count_pending(client), uploads.sample_paths(client, HERE, 9)) == (
        EntryCounts(0, 0, None, 0),
        0,
        [],
    )
