"""`ticks`: runs that were ended before their time."""

import re
from datetime import timedelta

import pytest

from forgekeeper.runs import by_hand
from forgekeeper.runs.ledger import JobRun

NAME = "user_status_cleanup"
BEGUN = {"deleted": 7, "batches": 1, "stopped": "drained"}
ERROR = "RuntimeError: something went quite wrong in here"

pytestmark = pytest.mark.usefixtures("database")


def started():
    return JobRun.start_here(NAME, by="worker-1:9")


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
    by_hand.cancel(run.id, reason="a test", by="test")
    JobRun.fail(run, ERROR, BEGUN, delay=timedelta(0), retries=0)


def brake(why):
    JobRun.succeed(started(), BEGUN | {"stopped": why, "braked": why})


@pytest.mark.parametrize(
    ("end", "word"),
    [
        (fail, ERROR),
        (kill, "killed; the worker was lost: "),
        (cancel, "cancelled; "),
        (lambda: brake("stopped"), "stopped; "),
        (started, "deleted=7"),
    ],
    ids=["failed", "killed", "cancelled", "stopped", "running"],
)
def test_a_run_that_did_not_come_to_its_end_is_not_drained(main, end, word):
    end()
    JobRun.update(result=BEGUN).where(JobRun.batch == NAME, JobRun.result.is_null()).execute()

    shown, (tick,) = main("ticks", NAME).stdout, main("ticks", NAME, "--json").json["ticks"]

    assert (word in shown, "drained" in shown + str(tick["result"])) == (True, False)


def test_an_earlier_attempt_that_failed_is_not_drained_either(main):
    number = fail(retries=25)
    JobRun.succeed(started(), BEGUN | {"deleted": 9})

    (tick,) = main("ticks", NAME, "--json").json["ticks"]

    result = tick["result"]
    assert (tick["id"], result["stopped"], result["earlier"]) == (number, "drained", [{"deleted": 7, "batches": 1}])


@pytest.mark.parametrize("command", [["ticks", NAME], ["why", NAME], ["status"]])
def test_no_answer_is_written_as_python_writes_it(main, command):
    JobRun.succeed(started(), {"deleted": 7, "flag": None, "on": True, "off": False, "kept": [{"why": "it's"}]})

    shown = " ".join(main(*command).stdout.split())

    assert not re.search(r"None|True|False|\[\{'", shown)
    assert 'kept=[{"why":"it\'s"}]' in shown
