"""`run --dry-run`, and what `flags on` shows before it turns one on."""

import pytest

from forgekeeper.connections import client
from forgekeeper.database import database as db
from forgekeeper.declaring.flags import FeatureFlag
from forgekeeper.installation.in_redis import INSTALLATION
from forgekeeper.runs.holds import Hold
from tests.harness import samples as sample
from tests.harness.terminal import on_a_terminal

NAME = "user_status_cleanup"
ARTIFACTS = "expired_job_artifacts"
FLAG = "bulk_delete_job_artifacts"


def preview(main, *options, batch=NAME, **settings):
    result = main("run", batch, "--dry-run", "--json", *options, **settings)
    assert result.status == 0, result.stderr
    return result.json


def the_part(found):
    (part,) = found["parts"]
    return part


def test_a_preview_says_how_many_would_go(main, database):
    sample.user_statuses(5)

    result = main("run", NAME, "--dry-run")

    assert result.status == 0
    assert f"\n  user_status of {NAME}: 2 would be deleted\n" in result.stdout


def test_a_preview_with_json_prints_one_object(main, database):
    sample.user_statuses(5)

    found = preview(main)

    assert (found["batch"], found["dry_run"], found["notes"]) == (NAME, True, [])
    assert (the_part(found)["records"], the_part(found)["estimate"]) == (2, False)


def test_a_preview_names_as_many_records_as_it_is_told(main, database):
    sample.user_statuses(100)

    assert len(the_part(preview(main, "--sample", "3"))["sample"]) == 3


def test_a_preview_of_artifacts_says_how_much_and_whose(main, database):
    sample.job_artifacts(10)

    part = the_part(preview(main, batch=ARTIFACTS))

    assert (part["records"], part["bytes"], sum(part["projects"].values())) == (6, 615, 6)


def test_a_preview_says_what_stays_and_why(main, database):
    sample.job_artifacts(10)

    assert the_part(preview(main, batch=ARTIFACTS))["kept"] == {"locked": 1, "unknown": 1, "trace": 1}


def test_a_preview_says_that_the_breaker_would_hold_it(main, database):
    sample.user_statuses(100)

    found = preview(main, BREAKER_SHARE="0.3", BREAKER_LEAST="30")

    assert found["notes"] == [
        "the breaker would hold it: it would delete 40 of about 100 records (40%), and no run of it has deleted any yet"
    ]


def test_a_paused_batch_can_be_previewed(main, database):
    sample.user_statuses(5)
    Hold.add(NAME, "pause", until=None, reason="the disk is full", by="ops:1")

    found = preview(main)

    (note,) = found["notes"]
    assert the_part(found)["records"] == 2
    assert note.startswith(f"{NAME} is paused without an end by ops:1 since ")


def test_a_preview_says_of_another_s_redis_that_a_run_would_be_blocked(main, database):
    client.set(INSTALLATION, "another")

    (note,) = preview(main)["notes"]

    assert note.startswith("a run would be blocked: the database is of installation ")


def test_turning_a_flag_on_goes_on_where_there_can_be_no_preview(main, database):
    db.execute_sql("alter table project_statistics rename to elsewhere")
    try:
        result = main("flags", "on", FLAG)
    finally:
        db.execute_sql("alter table elsewhere rename to project_statistics")

    assert (result.status, FeatureFlag.is_on(FLAG)) == (0, True)
    assert f"{ARTIFACTS} cannot be previewed: " in result.stderr


@pytest.mark.parametrize(("answer", "status", "on"), [("y", 0, True), ("n", 1, False), ("", 1, False)])
def test_on_a_terminal_turning_a_flag_on_shows_and_asks_first(answer, status, on, environment, database):
    sample.job_artifacts(10)

    ended, screen = on_a_terminal(environment(), answer + "\n", "flags", "on", FLAG)

    assert "6 would be deleted" in screen
    assert f"Turn {FLAG} on? [y/N]" in screen
    assert (ended, FeatureFlag.is_on(FLAG)) == (status, on)
