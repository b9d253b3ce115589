"""`ticks` and `why` of runs that were ended before their time, times of day, and terminals that are narrow."""

import re
from datetime import datetime, timedelta

import pytest

from forgekeeper.cli import console
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
def test_why_understands_a_time_of_day(main):
    tick = now().replace(second=0, microsecond=0)
    JobRun.claim(NAME, tick, by="test", reason=None)

    found = main("why", NAME, tick.strftime("%H:%M"), "--json").json["run"]["tick"]

    assert datetime.fromisoformat(found) == tick
