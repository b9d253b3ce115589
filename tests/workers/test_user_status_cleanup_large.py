"""Batch 48 from the command line, on a hundred thousand due statuses among half a million."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import orjson
import pytest

from forgekeeper.database import database
from forgekeeper.runs.ledger import JobRun
from tests.harness.thorough import examples
from workers.user_status_cleanup import MAX_RUNTIME

ROOT = Path(__file__).parents[2]
ALL, DUE = examples(500_000), examples(100_000)
A_HICCUP = timedelta(seconds=1)

# Every fifth is due; of the others half are not due yet and half never will be.
SEED = """
    insert into user_statuses (user_id, emoji, message, clear_status_at)
    select id, 'palm_tree', 'status ' || id, case
        when id %% 5 = 0 then now() - interval '30 days' + id * interval '1 second'
        when id %% 2 = 0 then now() + interval '1 day' + id * interval '1 second'
    end
    from generate_series(1, %s) as id
"""
CHECKSUM = """
    select count(*), sum(hashtextextended(status::text, 0)), bit_xor(hashtextextended(status::text, 1))
    from user_statuses as status where user_id %% 5 <> 0 or user_id <= %s
"""
LOCK_OLDEST = """
    select user_id from user_statuses where clear_status_at <= now()
    order by clear_status_at, user_id limit %s for update
"""


@dataclass(frozen=True)
class Finished:
    """What a command answered, and how long it and its run took."""

    result: dict
    command: timedelta
    run: timedelta


@pytest.fixture
def statuses(database):
    database.execute_sql(SEED, (ALL,))
    database.execute_sql("analyze user_statuses")


@pytest.fixture
def report(capfd):
    """Print figures past pytest's capture."""

    def say(subject, finished):
        per_second = finished.result["deleted"] / finished.run.total_seconds()
        with capfd.disabled():
            sys.stdout.write(
                f"\n{subject}: {finished.result['deleted']:,} deleted in {finished.run.total_seconds():.2f} s"
                f" ({per_second:,.0f} a second), the command took {finished.command.total_seconds():.2f} s\n"
            )

    return say


def cleanup():
    """Run the batch as an operator would."""
    began = time.monotonic()
    answer = subprocess.run(
        [sys.executable, "-m", "forgekeeper.cli", "run", "user_status_cleanup", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=120,
    )
    command = timedelta(seconds=time.monotonic() - began)
    row = JobRun.last_ended("user_status_cleanup")
    assert {"run": row.id} | row.result == orjson.loads(answer.stdout)
    return Finished(row.result, command, row.finished_at - row.started_at)


def checksum(last_kept=0):
    """How many rows are not due or not beyond the *last_kept*, and what is in them."""
    return database.execute_sql(CHECKSUM, (last_kept,)).fetchone()


def count():
    return database.execute_sql("select count(*) from user_statuses").fetchone()[0]


@pytest.mark.usefixtures("statuses")
def test_a_hundred_thousand_of_half_a_million_go_within_the_budget_and_no_others(report):
    before = checksum()

    first = cleanup()
    second = cleanup()

    report("nothing locked", first)
    report("the run after it", second)
    assert first.result == {"deleted": DUE, "batches": DUE // 100, "stopped": "drained"}
    assert first.command < MAX_RUNTIME
    assert (checksum(), count()) == (before, ALL - DUE)
    assert second.result == {"deleted": 0, "batches": 0, "stopped": "drained"}


@pytest.mark.usefixtures("statuses")
def test_with_half_of_the_due_rows_locked_a_run_neither_waits_nor_gets_slow(other, report):
    other.execute(LOCK_OLDEST, (DUE // 2,))
    # The oldest are those with the lowest ids.
    last_locked = max(other.fetchall())[0]
    before = checksum(last_locked)

    half_locked = cleanup()
    after = checksum(last_locked), count()
    other.connection.rollback()
    rest = cleanup()

    report("half locked", half_locked)
    report("the other half, unlocked", rest)
    assert half_locked.result == {"deleted": DUE // 2, "batches": DUE // 200, "stopped": "drained"}
    assert after == (before, ALL - DUE // 2)
    assert (rest.result["deleted"], count()) == (DUE // 2, ALL - DUE)
    # Both deleted the same number, so this compares the time for a row as well as the time in all.
    # A run that searched through the locked rows again for each batch took over twenty seconds.
    assert half_locked.run < 2 * rest.run + A_HICCUP
    assert half_locked.command < MAX_RUNTIME
