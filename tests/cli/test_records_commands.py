"""Bad records from the command line."""

import pytest

from forgekeeper.database import now
from forgekeeper.runs.passed_over import PassedOver

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def bad():
    """A bad record of each of two batches, with the same key."""
    for batch, record in (("user_status_cleanup", "user_status"), ("prune", "job_run")):
        for _ in range(3):
            PassedOver.fail(batch, record, 815, "InternalError: spoilt")


def waiting():
    return {row.batch for row in PassedOver.select().where(PassedOver.retry_at > now())}


@pytest.mark.parametrize("command", [["records"], ["records", "list"]])
def test_bad_records_are_listed_with_their_errors(main, bad, command):
    result = main(*command)

    assert result.status == 0
    assert all(word in result.stdout for word in ("user_status", "815", "3", "InternalError: spoilt", "2 in all"))


@pytest.mark.parametrize("command", [["records", "--json"], ["records", "list", "--json", "--limit", "1"]])
def test_bad_records_as_json(main, bad, command):
    answer = main(*command).json

    entry = answer["entries"][0]
    assert answer["passed_over"] == 2
    assert (entry["batch"], entry["key"], entry["failures"]) == ("user_status_cleanup", "815", 3)


def test_a_bad_record_is_tried_again_by_the_next_run(main, bad):
    result = main("records", "retry", "815")

    assert (result.status, result.stdout, waiting()) == (0, "2 will be tried again\n", set())


def test_only_those_of_a_batch_are_tried_again(main, bad):
    main("records", "retry", "--all", "--batch", "prune")

    assert waiting() == {"user_status_cleanup"}


def test_all_bad_records_are_tried_again(main, bad):
    answer = main("records", "retry", "--all", "--json").json

    assert (answer, waiting()) == ({"retried": 2}, set())


def test_a_record_that_is_not_bad_cannot_be_retried(main, bad):
    result = main("records", "retry", "4711")

    assert (result.status, "not among the bad records" in result.complaint) == (1, True)


@pytest.mark.parametrize("arguments", [[], ["815", "--all"]])
def test_retry_wants_one_or_all(main, arguments):
    assert main("records", "retry", *arguments).status == 2
