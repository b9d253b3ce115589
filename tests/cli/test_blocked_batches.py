"""What commands say of a batch that is blocked, stopped, held or off."""

from urllib.parse import urlsplit

import pytest

from forgekeeper.ledger import holds
from forgekeeper.ledger.holds import Hold
from forgekeeper.ledger.job_runs import JobRun
from tests.harness.thorough import whole_only

BLOCKED, NAME, OFF = "git_ref_cleanup", "user_status_cleanup", "expired_job_artifacts"
SENTENCE = "no repositories are configured; set FORGEKEEPER_REPOSITORIES_ROOT"
pytestmark = pytest.mark.usefixtures("database")


def rows_of(main, name):
    return [line for line in main("status").stdout.splitlines() if line.strip().startswith(name)]


def test_a_run_that_is_blocked_says_why_and_exits_3(main):
    result = main("run", BLOCKED, "--json")

    answer = result.json
    assert (answer["skipped"], answer["blocked"], answer["enqueued"]) == ("no_repositories", SENTENCE, 0)
    assert (result.status, result.sentences) == (3, [f"{BLOCKED} is blocked: {SENTENCE}"])
    assert JobRun.select_newest_first(BLOCKED).first().state == "blocked"
    assert main("run", BLOCKED, "--dry-run").status == 0


def test_status_and_why_say_that_a_batch_is_blocked_and_why(main):
    main("run", BLOCKED)

    facts = main("status", "--json").json

    blocked = facts["batches"][BLOCKED]["blocked"]
    assert any(" blocked " in row for row in rows_of(main, BLOCKED))
    assert (blocked["reason"], blocked["sentence"]) == ("no_repositories", SENTENCE)
    assert sum("no_repositories" in warning for warning in facts["warnings"]) == 1
    assert f"It was blocked (no_repositories): {SENTENCE}." in main("why", BLOCKED).stdout


@pytest.fixture
def in_latin1(urls, query):
    """Make a database that lacks most characters; return its URL."""
    query(urls.database, "create database in_latin1 encoding 'LATIN1' locale 'C' template template0")
    yield urlsplit(urls.database)._replace(path="/in_latin1").geturl()
    query(urls.database, "drop database in_latin1 with (force)")


@whole_only
def test_a_database_that_cannot_hold_every_path_blocks_all_batches_and_fails_check(main, in_latin1):
    for command in ("migrate", "seed", f"release {NAME} --reason test"):
        assert main(*command.split(), DATABASE_URL=in_latin1).status == 0

    result, checked = (main(*words, DATABASE_URL=in_latin1) for words in (("run", NAME), ("check", "--json")))

    said = "the encoding LATIN1 of the database cannot store all characters of paths and names"
    assert (result.status, said in result.stderr) == (3, True)
    assert [level for level, message in checked.findings("postgresql") if said in message] == ["error"]


def test_status_and_why_say_that_a_batch_is_off_by_its_flag(main):
    main("run", OFF)

    line, _last_run = rows_of(main, OFF)
    assert (" off " in line, "succeeded" in line) == (True, False)
    assert "It did nothing, because the batch is switched off by its flag." in main("why", OFF).stdout


def test_status_lists_all_that_holds_a_batch_back(main):
    Hold.add(NAME, "stop", reason="wrong rows go", by="alice@host")
    Hold.add(NAME, "pause", reason="legal hold", by="bob")

    found = main("status", "--json").json["batches"][NAME]

    assert found["stopped"].pop("since")
    assert found["stopped"] == {"reason": "wrong rows go", "by": "alice@host"}
    assert [(one["kind"], one["by"], one["until"]) for one in found["holds"]] == [
        ("stop", "alice@host", None),
        ("pause", "bob", None),
    ]


@pytest.mark.parametrize(("kind", "word"), [("stop", "stopped"), ("breaker", "held")])
def test_of_a_batch_that_is_held_back_status_says_so_and_nothing_is_expected(main, settings, kind, word):
    Hold.add(NAME, kind, reason="wrong rows go", by="alice@host")

    assert [row for row in rows_of(main, NAME) if word in row.split()]
    assert NAME in holds.find_idle_batches(settings)
