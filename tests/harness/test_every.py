"""A test of every row of a table names those that fail, and no others."""

import pytest

from tests.harness.every import every


def test_every_row_that_fails_is_named_with_its_reason():
    @every("number, limit", [(1, 2), (3, 2), (5, 4)], name=lambda row: f"row {row[0]}")
    def claim(number, limit):
        assert number < limit, f"{number} is too much"

    with pytest.raises(AssertionError, match=r"(?s)2 of 3\nrow 3: .*3 is too much.*row 5: .*5 is too much"):
        claim()
