"""How thorough the suite is: whole with THOROUGH in the environment (`make test-all`), else a tenth (`make test`).

State machines, interleavings by the thousand and large tables take their numbers from here.  What Hypothesis draws is drawn
anew each time in the whole, and from fixed seeds in the tenth, and in CI: a change is not refused for what a search happens
to find in what it has not touched.  Whoever searches runs `make test-all` at home, as often as they like.
"""

import os
from collections.abc import Iterable
from typing import TypeVar

import hypothesis
import pytest

Row = TypeVar("Row")

RUNS_WHOLE_SUITE = "THOROUGH" in os.environ
SEARCHES = RUNS_WHOLE_SUITE and "CI" not in os.environ

# For a test that takes seconds and that `docs/promises.md` does not name: `make test` takes five minutes at most.
whole_only = pytest.mark.skipif(not RUNS_WHOLE_SUITE, reason="only `make test-all` runs it")


def examples(whole: int) -> int:
    """Say how many of the *whole* number to run."""
    return whole if RUNS_WHOLE_SUITE else max(1, whole // 10)


def machine_settings(whole: int, steps: int) -> hypothesis.settings:
    """Make the settings of a state machine: a number of examples of so many steps each."""
    return hypothesis.settings(
        max_examples=examples(whole),
        stateful_step_count=steps,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def select_rows(rows: Iterable[Row]) -> list[Row]:
    """Return all *rows* of a table in the whole, else the first and the last."""
    table = list(rows)
    return table if RUNS_WHOLE_SUITE else [table[0], *table[1:][-1:]]
