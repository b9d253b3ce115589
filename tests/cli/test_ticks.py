"""`ticks` and `why` of runs that were ended before their time, times of day, and terminals that are narrow."""

import re
from datetime import UTC, datetime, timedelta

import pytest
from rich.cells import cell_len

from forgekeeper.batches import BATCHES
from forgekeeper.cli import console, times
from forgekeeper.cli.times import NoTime
from forgekeeper.database import now
from forgekeeper.runs.ledger import JobRun

NAME = "user_status_cleanup"
BEGUN = {"deleted": 7, "batches": 1, "stopped": "drained"}
ERROR = "RuntimeError: something went quite wrong in here"
HOST = "a-host-with-a-rather-long-name-1:1234567"

database = pytest.mark.usefixtures("database")


def started(by=HOST):
    return JobRun.start_here(NAME, by=by)


def fail(**options):
    JobRun.fail(run := started(), ERROR, BEGUN, delay=timedelta(0), **({"retries": 0} | options))
    return run.id


def kill():
    """Let a run's worker fall silent three times: then it is given up."""
    run = started()
    JobRun.update(result=BEGUN, losses=2).where(JobRun.id == run.id).execute()
    JobRun.reopen_lost(NAME, dead_after=timedelta(0))


def cancel():
    run = started()
    JobRun.cancel(run.id, reason="a test", by="test")
    JobRun.fail(run, ERROR, BEGUN, delay=timedelta(0), retries=0)


def brake(why):
    JobRun.succeed(started(), BEGUN | {"stopped": why, "braked": why})


@pytest.fixture
def ticks(main):
    return lambda: main("ticks", NAME).stdout


@pytest.fixture
def narrow(monkeypatch):
    return lambda width: monkeypatch.setattr(console.out, "_width", width)


# What came of a run


@database
def test_ticks_show_the_error_of_a_failed_run_and_what_it_had_done(ticks):
    fail()

    assert f"{ERROR}; " in ticks()
    assert "deleted=7" in ticks()


@database
@pytest.mark.parametrize(
    ("end", "word"),
    [
        (fail, ERROR),
        (kill, "killed; the worker was lost: "),
        (cancel, "cancelled; "),
        (lambda: brake("stopped"), "stopped; "),
        (lambda: brake("cancelled"), "cancelled; "),
        (started, "deleted=7"),
    ],
    ids=["failed", "killed", "cancelled", "stopped", "cancelled at a safe point", "running"],
)
def test_a_run_that_did_not_come_to_its_end_is_not_drained(ticks, main, end, word):
    end()
    JobRun.update(result=BEGUN).where(JobRun.batch == NAME, JobRun.result.is_null()).execute()

    shown = ticks()

    assert word in shown
    assert "drained" not in shown
    assert "drained" not in str(main("ticks", NAME, "--json").json["ticks"][0]["result"])


@database
def test_an_earlier_attempt_that_failed_is_not_drained_either(ticks, main):
    number = fail(retries=25)
    JobRun.succeed(JobRun.start_here(NAME, by=HOST), BEGUN | {"deleted": 9})

    (tick,) = main("ticks", NAME, "--json").json["ticks"]

    assert (tick["id"], tick["result"]["stopped"], tick["result"]["earlier"]) == (
        number,
        "drained",
        [{"deleted": 7, "batches": 1}],
    )


@database
@pytest.mark.parametrize("command", ["ticks", "why", "status"])
def test_no_answer_is_written_as_python_writes_it(main, command):
    JobRun.succeed(started(), {"deleted": 7, "flag": None, "on": True, "off": False, "kept": [{"why": "it's"}]})

    shown = " ".join(main(*((command, NAME) if command != "status" else (command,))).stdout.split())

    assert not re.search(r"None|True|False|\[\{'", shown)
    assert 'kept=[{"why":"it\'s"}]' in shown


@database
def test_the_story_of_a_failure_ends_with_one_full_stop(main):
    JobRun.fail(started(), "it ends here.", BEGUN, delay=timedelta(0), retries=0)

    assert main("why", NAME).stdout.rstrip().endswith("The last error was: it ends here.")


# A time of day


NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("11:59", NOON - timedelta(minutes=1)),
        ("12:00", NOON),
        ("12:01", NOON - timedelta(hours=23, minutes=59)),
        ("today 12:01", NOON + timedelta(minutes=1)),
        ("9:30:15", NOON.replace(hour=9, minute=30, second=15)),
        ("2026-11-19T18:29", NOON.replace(day=19, hour=18, minute=29)),
    ],
)
def test_a_time_of_day_is_the_last_one_that_has_passed(text, instant):
    assert times.past(text)(NOON) == instant


@pytest.mark.parametrize("text", ["25:00", "tomorrow 12:00", "12", "noon"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(NoTime):
        times.past(text)(NOON)


@database
def test_why_understands_a_time_of_day(main):
    tick = now().replace(second=0, microsecond=0)
    JobRun.claim(NAME, tick, by="test", reason=None)

    found = main("why", NAME, tick.strftime("%H:%M"), "--json").json["run"]["tick"]

    assert datetime.fromisoformat(found) == tick


@database
def test_why_at_no_time_of_day_is_wrong_use(main):
    result = main("why", NAME, "25:00")

    assert (result.status, "'25:00' is not a time" in result.complaint) == (2, True)


# Narrow terminals


@database
@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_ticks_fit_into_their_terminal_and_lose_nothing(ticks, narrow, width):
    fail()
    narrow(width)

    shown = ticks()

    assert max(map(cell_len, shown.splitlines())) <= width
    assert "…" not in shown
    assert_has(shown, HOST, *ERROR.split(), "deleted=7", "batches=1", "failed", "by hand")


@database
@pytest.mark.parametrize("width", [60, 80, 120])
def test_status_fits_into_its_terminal_and_loses_nothing(main, narrow, width):
    fail()
    narrow(width)

    shown = main("status", CRON_STALE_IMPORTS="5,15,25,35,45,55 0-6 * * *").stdout

    assert max(map(cell_len, shown.splitlines())) <= width
    assert "…" not in shown
    assert_has(shown, *BATCHES, *ERROR.split(), "deleted=7", "5,15,25,35,45,55", "delayed")


def assert_has(shown, *words):
    for word in words:
        assert word in shown, (word, shown)
