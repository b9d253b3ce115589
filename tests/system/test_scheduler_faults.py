"""Schedulers that are killed in the middle of a tick."""

import time

import pytest

from forgekeeper.api.batches import BATCHES
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.reconcile import RESEND_AFTER
from tests.harness.waiting import wait_until

LIMIT = 60.0
BATCH = "user_status_cleanup"
# No worker dies: a run that a busy machine keeps waiting must not be taken for a dead one's.
OFF = {f"cron_{batch}": "off" for batch in BATCHES} | {"dead_after": "30", "log_format": "json"}
EVERY_SECOND = OFF | {f"cron_{BATCH}": "* * * * * *", "poll_interval": "0.5"}
WORKER = ("worker", "--processes", "1", "--threads", "2")


@pytest.mark.parametrize(("step", "by"), [("tick.claimed", "another"), ("tick.sent", "its successor")])
def test_a_tick_whose_scheduler_was_killed_is_sent_once(database, services, outcome, step, by):
    # One that has no timetable still sends what others have claimed.  The interval is the default.
    watching = OFF | {"poll_interval": "5"}
    schedulers = [services("another", "scheduler", **watching)] if by == "another" else []
    killed = services("killed", "scheduler", **EVERY_SECOND, failpoints=f"{step}=kill")
    assert wait_until(lambda: killed.process.poll() is not None, LIMIT), "the scheduler was not killed"
    run, died_at = JobRun.find_open(BATCH), time.monotonic()
    schedulers = [killed, *(schedulers or [services("successor", "scheduler", **watching)])]

    sent = wait_until(lambda: JobRun.get_by_id(run.id).state == "enqueued", LIMIT)
    recovery = time.monotonic() - died_at
    services("worker", *WORKER, **OFF)
    done = wait_until(lambda: JobRun.get_by_id(run.id).state == "succeeded", LIMIT)
    # So often is one sent again that no worker has taken by then.
    due_again = (time.monotonic() - died_at) // RESEND_AFTER.total_seconds()

    # A worker would find their runs closed.
    again = sum(len([line for line in one.said("run sent") if line["run"] == run.id]) for one in schedulers) - 1
    outcome(10, injected=1, violations=(not sent) + (not done), recovery=[recovery], duplicates=again)
    assert {line["name"] for line in killed.said("failpoint reached")} == {step}
    assert (sent, done, again <= due_again, JobRun.get_by_id(run.id).attempt) == (True, True, True, 1)
