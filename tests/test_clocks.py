"""How far clocks are apart, and what a question that takes long can prove."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.clocks import Clock
from workers import clocks
from workers.clients import client
from workers.clocks import Difference

MINUTE = timedelta(minutes=1)


def test_the_clocks_of_one_machine_agree(database):
    for difference in clocks.read().differences():
        assert abs(difference.seconds) < 1
        assert not difference.exceeds(MINUTE)


@pytest.mark.parametrize("seconds", [61.5, -61.5])
def test_clocks_that_are_further_apart_than_the_tolerance_exceed_it(seconds):
    assert Difference("postgresql", "redis", seconds, 1.0).exceeds(MINUTE)


@pytest.mark.parametrize("seconds", [61.0, 60.0, -61.0])
def test_what_the_way_to_the_servers_may_have_cost_does_not_count_against_a_clock(seconds):
    assert not Difference("postgresql", "redis", seconds, 1.0).exceeds(MINUTE)


def test_an_answer_is_taken_to_be_of_the_middle_of_the_question(database, monkeypatch):
    monkeypatch.setattr(clocks.time, "monotonic", Clock(step=10))
    monkeypatch.setattr(client, "time", lambda: (1_000_000, 500_000))

    reading = clocks.read().redis

    # The question before it went from 10 to 20, this one from 30 to 40.
    assert reading == (datetime.fromtimestamp(1_000_000.5, UTC), 1_000_000.5 - 35, 5)


@pytest.mark.parametrize(
    ("seconds", "sentence"),
    [
        (86400.2, "PostgreSQL's clock is 86400 s ahead of Redis's clock; set right the one that is wrong"),
        (-120.0, "PostgreSQL's clock is 120 s behind Redis's clock; set right the one that is wrong"),
    ],
)
def test_the_sentence_names_both_clocks_and_which_is_later(seconds, sentence):
    assert Difference("postgresql", "redis", seconds, 0.1).sentence() == sentence
