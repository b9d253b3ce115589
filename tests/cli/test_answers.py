"""What commands that change something answer with --json, and the shorter ways to name what is meant."""

import pytest

from forgekeeper.batches import BATCHES, FeatureFlag
from tests.harness.catalogue import METRICS

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


def test_metrics_prints_the_catalogue(main):
    found, shown = main("metrics", "--json").json["metrics"], main("metrics").stdout

    assert [metric["name"] for metric in found] == list(METRICS)
    assert [name for name in METRICS if name not in shown] == []
