"""What commands say of a batch that is blocked, off, or paused without an end."""

import pytest

from forgekeeper.runs.ledger import JobRun

NAME = "git_ref_cleanup"
SENTENCE = "no repositories are configured; set FORGEKEEPER_REPOSITORIES_ROOT"
pytestmark = pytest.mark.usefixtures("database")


def test_a_run_that_is_blocked_says_why_and_exits_3(main):
    result = main("run", NAME)

    assert (result.status, JobRun.of(NAME).first().state) == (3, "blocked")
    assert f"{NAME} is blocked: {SENTENCE}" in result.stderr


def test_the_result_of_a_run_that_is_blocked_says_so(main):
    result = main("run", NAME, "--json")

    answer = result.json
    assert (answer["skipped"], answer["blocked"], answer["enqueued"]) == ("no_repositories", SENTENCE, 0)
    assert (result.status, result.sentences) == (3, [f"{NAME} is blocked: {SENTENCE}"])


def test_a_preview_of_a_batch_whose_run_would_be_blocked_answers_what_was_asked(main):
    main("run", NAME)

    assert main("run", NAME, "--dry-run").status == 0


def test_status_shows_that_a_batch_is_blocked_and_why(main):
    main("run", NAME)

    shown = main("status").stdout
    facts = main("status", "--json").json

    assert any(line.split()[0] == NAME and " blocked " in line for line in shown.splitlines() if line.strip())
    assert f"(no_repositories): {SENTENCE}" in shown
    assert (facts["batches"][NAME]["blocked"]["reason"], facts["batches"][NAME]["blocked"]["sentence"]) == (
        "no_repositories",
        SENTENCE,
    )
    assert sum("no_repositories" in warning for warning in facts["warnings"]) == 1


def test_status_shows_that_a_batch_is_off_by_its_flag(main):
    main("run", "expired_job_artifacts")

    lines = main("status").stdout.splitlines()

    line, _last_run = [line for line in lines if line.startswith("expired_job_artifacts ")]
    assert " off " in line
    assert "succeeded" not in line


def test_the_story_of_a_blocked_run_says_why(main):
    main("run", NAME)

    assert f"It was blocked (no_repositories): {SENTENCE}." in main("why", NAME).stdout


def test_the_story_of_a_run_whose_flag_was_off_says_so(main):
    main("run", "expired_job_artifacts")

    assert (
        "It did nothing, because the batch is switched off by its flag." in main("why", "expired_job_artifacts").stdout
    )
