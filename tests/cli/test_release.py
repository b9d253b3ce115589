"""`release`, what is held of a new installation, and runs by hand of what is held."""

import re
from datetime import timedelta

import peewee as pw
import pytest

from demo import sample_data as sample
from forgekeeper.api.batches import BATCHES
from forgekeeper.api.records import Record
from forgekeeper.audit.acts import Act
from forgekeeper.guards import breaker
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.platform.database import now
from forgekeeper.sources.outbox import DeletedObject
from models import UserStatus
from tests.harness import toys
from tests.harness.thorough import whole_only

NAME = "user_status_cleanup"
DELETING = [name for name in BATCHES if name != "prune"]


def hold():
    Hold.add(NAME, "breaker", by="worker-1:9", reason="it would delete all of them")


@pytest.mark.parametrize("command", ["run", "send"])
def test_a_batch_that_is_held_is_not_run_or_sent_by_hand(main, database, command):
    hold()

    result = main(command, NAME, "--json")

    assert (result.status, result.json["run"], result.json["skipped"]) == (3, None, "held")
    assert f"(breaker): it would delete all of them: `forgekeeper release {NAME} " in result.stderr


def test_release_lets_as_many_go_as_are_due_and_says_and_records_it(main, database):
    sample.add_statuses(5)
    hold()

    result = main("release", NAME, "--reason", "I looked")

    (act,) = Act.select().where(Act.act == "release")
    assert (result.status, Hold.find_state(NAME)) == (0, None)
    assert result.stdout == f"{NAME} runs again from its next tick; at most 2 records may be deleted\n"
    assert (act.batch, act.reason, act.before["sentence"], act.after["expect"]) == (
        *(NAME, "I looked"),
        *("it would delete all of them", 2),
    )


def test_where_nothing_is_due_the_hold_ends_and_a_release_limits_no_later_run(main, database):
    hold()
    result = main("release", NAME, "--reason", "I looked")
    sample.add_statuses(5)

    said = "nothing is due now, so the release has no number: the circuit breaker checks each run"
    assert (result.status, result.stdout) == (0, f"{NAME} runs again from its next tick; {said}\n")
    assert main("run", NAME, "--json").json["deleted"] == 2


ARTIFACTS, OBJECTS = "expired_job_artifacts", "delete_objects"


@pytest.mark.parametrize(("kind", "due", "stays"), [("new", 0, False), ("new", 1, True), ("breaker", 0, True)])
def test_in_a_new_installation_objects_are_released_with_their_artifacts_unless_some_are_due(
    main, database, kind, due, stays
):
    Hold.add(ARTIFACTS, "new", by="migrate", reason="new")
    Hold.add(OBJECTS, kind, by="migrate", reason="new")
    for number in range(due):
        DeletedObject.create(store_dir="a", file=str(number))

    result = main("release", ARTIFACTS, "--expect", "5", "--reason", "I looked", "--json")

    assert [*result.json["released"]] == [ARTIFACTS, OBJECTS][: 1 if stays else 2]
    assert (Hold.find_state(ARTIFACTS), Hold.find_state(OBJECTS)) == (None, "held" if stays else None)


def test_of_a_batch_that_is_blocked_it_is_not_said_that_it_runs_again(main, database):
    hold()
    Batch.block(NAME, reason="installation", sentence="this database is a copy")

    result = main("release", NAME, "--expect", "2", "--reason", "I looked")

    said = "is released, and blocked until this is solved: this database is a copy; at most 2 records may be deleted"
    assert result.stdout == f"{NAME} {said}\n"


def test_of_a_batch_that_no_guard_holds_nothing_is_released(main, database):
    Hold.add(NAME, "pause", by="ops", reason="holiday")

    result = main("release", NAME, "--reason", "just in case")

    assert (result.status, result.stdout) == (
        0,
        f"{NAME} is neither new nor held by the circuit breaker: there is nothing to release\n",
    )
    assert (breaker.is_released(NAME), Act.select().where(Act.act == "release").count()) == (False, 0)
    assert Hold.find_state(NAME) == "paused"


@whole_only
@pytest.mark.parametrize("name", DELETING)
def test_a_release_lets_go_what_a_preview_shows(main, database, name):
    main("seed")
    Hold.add(name, "breaker", by="a run", reason="too much")

    shown = main("run", name, "--dry-run", "--json").json["due"]

    assert main("release", name, "--reason", "I looked", "--json").json["expect"] == {name: shown}


def test_what_cannot_be_counted_stays_held_unless_somebody_says_how_many_may_go(main, database):
    uploads, redis_away = "stale_direct_uploads", "redis://127.0.0.1:1/0"
    for name in (NAME, uploads):
        Hold.add(name, "breaker", by="a run", reason="too much")

    result = main("release", "--all", "--reason", "I looked", "--json", REDIS_URL=redis_away)
    assert (result.status, result.json["released"], result.json["still_held"]) == (3, [NAME], [uploads])
    assert result.stderr.startswith(f"{uploads} is still held: its due records cannot be counted now")
    assert (Hold.find_state(NAME), Hold.find_state(uploads)) == (None, "held")

    assert main("release", uploads, "--reason", "R", "--expect", "7", REDIS_URL=redis_away).status == 0
    assert Hold.find_state(uploads) is None


def test_a_batch_of_which_nothing_says_what_is_due_is_released_by_a_number_alone(main, database):
    with toys.forget_declarations():
        counted = Record("toy", processed=("deleted",), objective=timedelta(hours=1))
        toys.declare_toy_batch(records=[counted])
        Hold.add("toys", "new", by="migrate", reason="nobody has looked")

        refused = main("release", "toys", "--reason", "I looked")
        released = main("release", "toys", "--reason", "I looked", "--expect", "7")

    assert (refused.status, refused.stderr.startswith("toys is still held: its due records cannot be counted")) == (
        3,
        True,
    )
    assert released.stdout == "toys runs again from its next tick; at most 7 records may be deleted\n"


def test_of_a_batch_that_writes_by_itself_a_release_promises_no_number(main, database):
    with toys.forget_declarations():
        counted = Record("toy", processed=("deleted",), objective=timedelta(hours=1))
        toys.declare_toy_batch(records=[counted], writes="it empties a box")
        Hold.add("toys", "new", by="migrate", reason="nobody has looked")

        released = main("release", "toys", "--reason", "I looked", "--expect", "7")

    said = "toys runs again from its next tick; it writes by itself, so nothing limits its deletions\n"
    assert released.stdout == said


def test_the_preview_of_a_held_batch_says_how_its_number_is_released(main, database):
    sample.add_statuses(5)
    hold()

    shown = main("run", NAME, "--dry-run").stdout
    (command,) = re.findall("`forgekeeper (release .*--expect .*?)`", shown)
    sample.add_statuses(500)

    assert main(*command.split()).stdout == f"{NAME} runs again from its next tick; at most 2 records may be deleted\n"


@whole_only
def test_the_release_of_a_new_installation_opens_no_breaker(main, database):
    sample.add_statuses(100)
    Hold.add(NAME, "new", by="migrate", reason="nobody has looked")
    main("release", "--all", "--reason", "I have looked")
    given = {"BREAKER_SHARE": "0.3"}
    assert [main("run", NAME, "--json", **given).json["deleted"] for _ in range(3)] == [40, 0, 0]
    sample.add_statuses(19_950)
    UserStatus.update(clear_status_at=now()).where(pw.fn.mod(UserStatus.user_id, 20) != 0).execute()

    assert main("run", NAME, "--json", **given).json["skipped"] == "held"


def test_migrate_holds_each_deleting_batch_of_a_new_installation_and_later_each_added_one(
    main, settings, new_database, query
):
    url = new_database()

    said = main("migrate", DATABASE_URL=url).stdout
    held = {name for (name,) in query(url, "select batch from holds where kind = 'new'")}
    main("seed", "--scale", "0", DATABASE_URL=url)
    main("release", "--all", "--reason", "I looked", DATABASE_URL=url)
    again = main("migrate", DATABASE_URL=url).stdout
    query(url, "delete from batches where name = 'stale_imports' returning name")
    added = main("migrate", DATABASE_URL=url).stdout

    assert "held, because nobody has seen a preview: stale_imports;" in added
    assert query(url, "select batch from holds") == [("stale_imports",)]
    assert "held" not in again
    assert held == set(DELETING)
    assert "held, because this is a new installation: user_status_cleanup" in said
