"""A test of every row of a table names those that fail, and no others."""

import pytest

from tests.harness.every import every


def test_every_row_that_fails_is_named_with_its_reason():
    @every("number, limit", [(1, 2), (3, 2), (5, 4)], name=lambda row: f"row {row[0]}")
    def claim(number, limit):
        assert number < limit, f"{number} is too much"

    with pytest.raises(AssertionError) as failed:
        claim()

    assert [line.split("\n")[0] for line in str(failed.value).splitlines() if "too much" in line or " of " in line] == [
        "2 of 3",
        "row 3: AssertionError: 3 is too much",
        "row 5: AssertionError: 5 is too much",
    ]


@every("number", [1, 2])
def test_fixtures_are_given_beside_the_rows(number, tmp_path):
    assert (number in {1, 2}, tmp_path.is_dir()) == (True, True)


def test_a_table_without_rows_is_refused():
    with pytest.raises(AssertionError, match="proves nothing"):
        every("row", [])(print)
