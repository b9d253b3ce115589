"""`run --dry-run`."""

import pytest

from forgekeeper.connections import client
from forgekeeper.installation import INSTALLATION
from forgekeeper.runs.holds import Hold
from tests.harness import samples as sample

NAME = "user_status_cleanup"
ARTIFACTS = "expired_job_artifacts"

pytestmark = pytest.mark.usefixtures("database")


def preview(main, *options, batch=NAME, **settings):
    result = main("run", batch, "--dry-run", "--json", *options, **settings)
    assert result.status == 0, result.stderr
    return result.json


def the_part(found):
    (part,) = found["parts"]
    return part


def test_a_preview_says_how_many_would_go_to_people_and_programs(main):
    sample.user_statuses(5)

    said, found = main("run", NAME, "--dry-run"), preview(main)

    assert f"\n  user_status of {NAME}: 2 would be deleted\n" in said.stdout
    assert (found["batch"], found["dry_run"], found["notes"]) == (NAME, True, [])
    assert (the_part(found)["records"], the_part(found)["estimate"]) == (2, False)


def test_a_preview_names_as_many_records_as_it_is_told(main):
    sample.user_statuses(100)

    assert len(the_part(preview(main, "--sample", "3"))["sample"]) == 3


def test_a_preview_of_artifacts_says_how_much_whose_and_what_stays(main):
    sample.job_artifacts(10)

    part = the_part(preview(main, batch=ARTIFACTS))

    assert (part["records"], part["bytes"], sum(part["projects"].values())) == (6, 615, 6)
    assert part["kept"] == {"locked": 1, "unknown": 1, "trace": 1}


def test_a_preview_says_that_the_breaker_would_hold_it(main):
    sample.user_statuses(100)

    found = preview(main, BREAKER_SHARE="0.3", BREAKER_LEAST="30")

    assert found["notes"] == [
        "the breaker would hold it: it would delete 40 of about 100 records (40%), and no run of it has deleted any yet"
    ]


def test_a_paused_batch_can_be_previewed(main):
    sample.user_statuses(5)
    Hold.add(NAME, "pause", until=None, reason="the disk is full", by="ops:1")

    found = preview(main)

    (note,) = found["notes"]
    assert the_part(found)["records"] == 2
    assert note.startswith(f"{NAME} is paused without an end by ops:1 since ")


def test_a_preview_says_of_another_s_redis_that_a_run_would_be_blocked(main):
    client.set(INSTALLATION, "another")

    (note,) = preview(main)["notes"]

    assert note.startswith("a run would be blocked: the database is of installation ")
