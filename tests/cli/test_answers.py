"""What commands that change something answer with --json, and the shorter ways to name what is meant."""

from pathlib import Path

import pytest

from forgekeeper.batches import BATCHES
from forgekeeper.connections import client
from forgekeeper.flags import FeatureFlag
from tests.harness.programs import Program, eventually
from workers.stale_direct_uploads import register

NAME = "user_status_cleanup"
FLAG = "bulk_delete_job_artifacts"


@pytest.mark.parametrize(("command", "on"), [("on", True), ("off", False)])
def test_a_flag_that_is_turned_is_answered_as_the_list_has_it(main, database, command, on):
    FeatureFlag.turn(FLAG, on=not on)

    assert main("flags", command, FLAG, "--json").json["flags"] == {FLAG: on}
    assert FeatureFlag.is_on(FLAG) is on


@pytest.mark.parametrize(
    ("group", "default"),
    [
        *((group, "list") for group in ("flags", "leases", "quarantine")),
        ("objects", "held"),
    ],
)
def test_a_group_that_lists_without_a_command_does_so_with_json(main, database, group, default):
    assert main(group, "--json").json == main(group, default, "--json").json


def test_migrate_with_json_says_what_was_applied_and_what_is_pending(main, settings, new_database):
    url = new_database()

    before = main("migrate", "--check", "--json", DATABASE_URL=url)
    made = main("migrate", "--json", DATABASE_URL=url)
    after = main("migrate", "--check", "--json", DATABASE_URL=url)

    names, deleting = before.json["pending"], [name for name in BATCHES if name != "prune"]
    assert names[0] == "0001_ledger"
    assert (before.status, before.json["applied"], before.stderr) == (1, [], "")
    assert (made.status, made.json) == (0, {"applied": names, "pending": [], "held": deleting})
    assert (after.status, after.json) == (0, {"applied": [], "pending": []})


def test_why_tells_the_story_of_a_run_by_its_number(main, database):
    main("run", "prune")
    number = main("run", NAME, "--json").json["run"]
    main("run", NAME)

    told = main("why", str(number), "--json").json

    assert (told["batch"], told["run"]["id"]) == (NAME, number)
    assert told["story"][0].startswith(f"Run {number} was asked for by hand")


@pytest.mark.parametrize("number", ["0", "987654321", "99999999999999999999999"])
def test_a_number_that_no_run_has_is_said(main, database, number):
    result = main("why", number)

    assert result.status == (1 if len(number) < 19 else 2)
    assert number in result.complaint


def test_a_run_s_number_with_a_time_is_refused(main, database):
    assert main("why", "1", "2026-01-01").status == 2


def test_without_an_amount_seed_makes_the_tables_alone(main, settings, new_database, query):
    url = new_database()
    main("migrate", DATABASE_URL=url)
    client.flushdb()

    result = main("seed", "--scale", "0", DATABASE_URL=url)

    assert (result.status, result.stdout) == (
        0,
        "the tables of the example forge are there; no sample data was put in\n",
    )
    assert query(url, "select count(*) from user_statuses") == [(0,)]
    assert client.zcard(register.PENDING) == 0


def test_without_an_amount_seed_answers_with_an_empty_object(main, settings, new_database):
    url = new_database()
    main("migrate", DATABASE_URL=url)

    assert main("seed", "--scale", "0", "--json", DATABASE_URL=url).json == {}


def test_queues_may_be_given_with_commas_between_them(database, tmp_path):
    queues = ("--queues", "cron,git", "--queues", "objects")
    worker = Program(tmp_path / "log", "-m", "forgekeeper.cli", "worker", "--processes", 1, *queues)
    line = Path(f"/proc/{worker.pid}/cmdline")
    try:
        eventually(lambda: "--queues\0cron\0git\0objects\0" in line.read_text())
    finally:
        worker.kill()


def test_one_bad_name_among_queues_with_commas_is_refused(main, settings):
    result = main("worker", "--queues", "cron,crone")

    assert (result.status, result.complaint) == (
        2,
        "there is no queue 'crone'; there are: cron, git, artifacts, objects",
    )
