"""A batch that ticks every few hours was blocked: real processes try it again soon after the cause is gone."""

from datetime import timedelta

from forgekeeper.batches import BATCHES
from forgekeeper.connections import client
from forgekeeper.database import now
from forgekeeper.delivery.queues import INSTALLATION
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.ledger import JobRun
from tests.harness.waiting import wait_until

LIMIT = 60.0
NAME = "stale_imports"
OFF = {f"cron_{batch}": "off" for batch in BATCHES}
QUICK = {"dead_after": "30", "poll_interval": "0.2", "retry_after": "0.5", "log_format": "json"}


def test_a_blocked_batch_runs_soon_after_the_cause_is_gone_and_not_at_its_next_tick(database, services):
    due = now().replace(second=0, microsecond=0)
    options = OFF | QUICK | {f"cron_{NAME}": f"{due.minute} {due.hour} * * *"}
    worker = services("worker", "worker", "--processes", "1", "--threads", "2", **options)
    services("scheduler", "scheduler", **options)
    assert wait_until(lambda: any(line.get("message") == "worker ready" for line in worker.lines()), LIMIT)
    assert wait_until(lambda: Batch.get_or_none(Batch.name == NAME), LIMIT)
    client.set(INSTALLATION, "11111111-0000-4000-8000-000000000002")
    # From here on the tick of the present minute has been missed, and is caught up; the next comes tomorrow.
    Batch.update(registered_at=due - timedelta(hours=1)).where(Batch.name == NAME).execute()

    # Somebody has pointed it at another's Redis, which it finds out again and again.
    looks = wait_until(lambda: JobRun.select().where(JobRun.attempt >= 3, JobRun.state == "blocked").exists(), LIMIT)
    said = [line for line in worker.lines() if line.get("message") == "run blocked"]
    blocked = Batch.blocked(NAME)
    client.delete(INSTALLATION)
    again = wait_until(lambda: Batch.blocked(NAME) is None, LIMIT)

    assert looks
    assert blocked is not None
    assert blocked.blocked_reason == "installation"
    assert again
    assert [(run.tick, run.state) for run in JobRun.of(NAME)] == [(due, "succeeded")]
    assert len(said) == 1
