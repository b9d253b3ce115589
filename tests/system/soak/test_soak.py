"""A soak of half a minute: all batches work while faults are injected; `python -m tests.system.soak` runs for longer.

SOAK_SECONDS is the time in which faults are injected, CHAOS_SEED repeats their choice.
"""

import os
import random
from dataclasses import asdict

from .soak import EVERYTHING, soak

DURATION = float(os.environ.get("SOAK_SECONDS", "45"))
# As what Hypothesis draws: in CI a change is not refused for what a search happens to find in what it has not touched.
SEED = int(os.environ.get("CHAOS_SEED", 20261125 if "CI" in os.environ else random.randrange(2**32)))


def test_no_property_is_broken_while_everything_goes_wrong_at_once(tmp_path, say, outcome):
    report = soak(seed=SEED, seconds=DURATION, folder=tmp_path)

    outcome(EVERYTHING, **asdict(report.outcome))
    say(*report.lines())
    assert {name: found for name, found in report.violations.items() if found} == {}
