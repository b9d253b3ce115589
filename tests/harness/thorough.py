"""Size of the searches: the whole with THOROUGH in the environment (`make test-all`), else a tenth (`make test`).

State machines, thousands of interleavings and large tables take their numbers from here.  With THOROUGH Hypothesis draws
new examples each time.  Without it, and in CI, the seeds are fixed: a change must not fail by an accidental finding in code
that it has not touched.  To search, run `make test-all` outside of CI.
"""

import os
from collections.abc import Iterable
from typing import TypeVar

import hypothesis
import pytest

Row = TypeVar("Row")

RUNS_WHOLE_SUITE = "THOROUGH" in os.environ
SEARCHES = RUNS_WHOLE_SUITE and "CI" not in os.environ

# For tests that take seconds and that `docs/promises.md` does not name: `make test` must end within five minutes.
whole_only = pytest.mark.skipif(not RUNS_WHOLE_SUITE, reason="only `make test-all` runs it")


def examples(whole: int) -> int:
    """Return the number of examples to run, of the *whole* number."""
    return whole if RUNS_WHOLE_SUITE else max(1, whole // 10)


def machine_settings(whole: int, steps: int) -> hypothesis.settings:
    """Return settings for a state machine: *whole* examples (or a tenth) of *steps* steps."""
    return hypothesis.settings(
        max_examples=examples(whole),
        stateful_step_count=steps,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def select_rows(rows: Iterable[Row]) -> list[Row]:
    """Return all *rows* of a table in the whole suite, else the first and the last."""
    table = list(rows)
    return table if RUNS_WHOLE_SUITE else [table[0], *table[1:][-1:]]
