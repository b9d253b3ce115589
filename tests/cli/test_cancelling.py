"""`cancel`: one run, and its children, end before their next chunk."""

import pytest

from forgekeeper.runs.ledger import JobRun

NAME = "user_status_cleanup"


def test_a_run_that_waits_and_is_cancelled_will_not_run(main, database):
    number = JobRun.claim_manual(NAME, by="ops:1")

    result = main("cancel", str(number), "--reason", "not now")

    assert result.stdout == f"run {number} of {NAME} waited, and will not run\n"
    assert (JobRun.get_by_id(number).state, JobRun.open(NAME)) == ("skipped", None)


def test_a_run_that_is_cancelled_ends_before_its_next_chunk(main, database):
    run = JobRun.start_here(NAME, by="worker-1:9")

    result = main("cancel", str(run.id), "--reason", "not now")

    assert result.stdout == f"run {run.id} of {NAME} ends before its next chunk, and so do its children\n"


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (NAME, "had ended already (succeeded)"),
        (
            "git_ref_cleanup",
            "had ended already (succeeded); those of its children that have not end before their next chunk",
        ),
    ],
)
def test_of_a_run_that_has_ended_its_children_are_cancelled(main, database, batch, said):
    run = JobRun.start_here(batch, by="worker-1:9")
    JobRun.succeed(run, {})

    result = main("cancel", str(run.id), "--reason", "not now")

    assert result.stdout == f"run {run.id} of {batch} {said}\n"
    assert JobRun.get_by_id(run.id).cancelled_at is not None


def test_a_run_is_cancelled_once(main, database):
    run = JobRun.start_here(NAME, by="worker-1:9")
    JobRun.succeed(run, {})
    main("cancel", str(run.id), "--reason", "not now")

    result = main("cancel", str(run.id), "--reason", "again")

    assert result.stdout.startswith(f"run {run.id} of {NAME} was cancelled already, at ")
    assert JobRun.get_by_id(run.id).cancelled_reason == "not now"


def test_a_run_that_the_ledger_does_not_have_cannot_be_cancelled(main, database):
    result = main("cancel", "17")

    assert (result.status, result.complaint) == (
        1,
        "the ledger has no run 17; `forgekeeper ticks BATCH` lists those that it has",
    )


def test_cancel_with_json_says_what_the_run_was_and_is(main, database):
    number = JobRun.claim_manual(NAME, by="ops:1")

    answer = main("cancel", str(number), "--reason", "not now", "--json").json

    assert answer == {"run": number, "batch": NAME, "was": "claimed", "state": "skipped", "reason": "not now"}
