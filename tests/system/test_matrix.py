"""The table of faults names tests that there are, and forgets no fault."""

import re
from pathlib import Path

import pytest

from .matrix import ELSEWHERE, FAULTS, STOCK, Outcome, gathered, table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("place", [place for places in ELSEWHERE.values() for place in places.split(", ")])
def test_a_test_that_the_table_names_is_there(place):
    file, _, name = place.partition("::")

    assert re.search(rf"^def {name or 'test_'}", (ROOT / file).read_text(), re.MULTILINE)


def test_a_fault_that_nobody_injected_says_so():
    lines = "\n".join(table({}, {}))

    assert lines.count("not run") == len(FAULTS)


def test_what_tests_saw_of_one_fault_is_added_up_ours_and_theirs_apart():
    ours = {"injected": 1, "violations": 0, "recovery": [1.0], "duplicates": 2}
    noted = [
        ("outcome", (13, "", ours)),
        ("said", ["else"]),
        ("outcome", (13, "", ours)),
        ("outcome", (13, STOCK, ours)),
    ]

    found = gathered(noted)

    assert found == {(13, ""): Outcome(2, 0, [1.0, 1.0], 4), (13, STOCK): Outcome(1, 0, [1.0], 2)}


def test_a_recovery_that_never_came_is_the_greatest():
    cells = Outcome(3, 1, [float("inf"), 1.0, 2.0]).cells()

    assert cells == ("3", "1", "2.0", "never", "never", "0")
