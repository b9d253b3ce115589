"""Quarantine: how long what failed is left out, and what fan-out must not send."""

from datetime import timedelta

import pytest

from forgekeeper.database import now
from forgekeeper.runs import quarantine
from forgekeeper.runs.quarantine import Quarantined
from forgekeeper.runs.retry import MAX_RETRIES

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
CHILD = ("git_ref_cleanup", "clean_project_refs")

pytestmark = pytest.mark.usefixtures("database")


def fail(key="1", reason="child_failed"):
    quarantine.fail(*CHILD, key, "RepositoryFailed: no HEAD", reason=reason, run=7)
    row = Quarantined.get(Quarantined.key == key)
    return row.again and row.again - row.failed_at


def waiting(*keys):
    return quarantine.waiting(*CHILD, keys)


def test_what_failed_once_is_tried_by_the_next_run_and_then_ever_later_until_it_waits_for_a_person():
    waits = [fail() for _ in range(MAX_RETRIES + 1)]

    assert waits[:4] == [timedelta(0), 5 * MINUTE, 10 * MINUTE, 20 * MINUTE]
    assert waits[-2:] == [DAY, None]


def test_a_child_that_took_three_workers_down_waits_from_the_first_time_on():
    assert fail(reason="worker_lost") == 10 * MINUTE
    assert waiting("1", "2") == {"1"}


def test_fan_out_leaves_out_what_waits_and_nothing_else():
    fail("once")
    for _ in range(2):
        fail("twice")
    for _ in range(MAX_RETRIES + 1):
        fail("for a person")
    for _ in range(2):
        fail("over")
    Quarantined.update(retry_at=now()).where(Quarantined.key == "over").execute()

    assert waiting("once", "twice", "for a person", "over", "another") == {"twice", "for a person"}
    assert quarantine.waiting("git_ref_cleanup", "another_child", ["twice"]) == set()


def test_what_ends_well_is_forgotten_and_begins_anew():
    for _ in range(2):
        fail()

    quarantine.forget(*CHILD, ["1"])

    assert (waiting("1"), fail()) == (set(), timedelta(0))


def test_what_was_written_while_the_clock_was_ahead_does_not_wait_for_it():
    for _ in range(2):
        fail()
    Quarantined.update(retry_at=now() + 365 * DAY).execute()

    assert waiting("1") == set()


def test_a_key_that_postgresql_cannot_keep_is_kept_escaped():
    key = "a\0b\ud800"

    for _ in range(2):
        quarantine.fail(*CHILD, key, key, reason="child_failed")

    assert waiting(key) == {key}
