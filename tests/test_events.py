"""What happens is told to all who have subscribed, and costs the run nothing."""

from dataclasses import dataclass

import pytest
from structlog.testing import capture_logs

from forgekeeper.events import LineWritten, OutcomeGrew, RecordFailed, emit, subscribe, unsubscribe
from forgekeeper.runs.growth import Growth


@pytest.fixture
def told():
    """List what is told."""
    events = []
    subscribe(events.append)
    yield events
    unsubscribe(events.append)


@dataclass
class Outcome:
    """Something that grows."""

    deleted: int = 0
    bucket: int | None = None
    timed_out: bool = False
    stopped: str = "drained"


def refuse(_event):
    raise KeyError("no")


@pytest.fixture
def refusing():
    subscribe(refuse)
    yield
    unsubscribe(refuse)


def test_who_subscribes_twice_is_told_once(told):
    subscribe(told.append)

    emit(RecordFailed("toys", "toy", "database"))

    assert told == [RecordFailed("toys", "toy", "database")]


@pytest.mark.usefixtures("refusing")
def test_a_subscriber_that_raises_costs_a_line_and_hides_nothing_from_the_others(told):
    with capture_logs() as lines:
        emit(RecordFailed("toys", "toy", "database"))

    assert len(told) == 1
    assert [(line["event"], line["about"]) for line in lines] == [("subscriber failed", "RecordFailed")]


@pytest.mark.usefixtures("refusing")
def test_a_line_that_cannot_be_counted_makes_no_line():
    with capture_logs() as lines:
        emit(LineWritten("info"))

    assert lines == []


def test_an_outcome_tells_what_it_has_grown_by_since_it_told_last(told):
    outcome = Outcome(2)
    growth = Growth("toys", outcome)

    growth.count()
    outcome.deleted, outcome.bucket, outcome.timed_out, outcome.stopped = 5, 3, True, "deadline"
    growth.count()
    growth.count()

    assert told == [OutcomeGrew("toys", {"deleted": 2}), OutcomeGrew("toys", {"deleted": 3, "bucket": 3})]
