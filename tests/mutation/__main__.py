"""Change lines of the product, one at a time, and check whether the tests fail.

`python -m tests.mutation --promises [TREE]` clones the last commit of TREE, makes the changes of promises.toml one at a
time, runs the test that docs/promises.md names for each, and exits with 1 if a test passes.

`python -m tests.mutation --coverage .coverage --durations LOG [TREE]` clones the last commit of TREE, makes a sample of
mutants, runs the tests that could detect each mutant, and prints the outcomes.  Coverage and log come from a run of the
whole suite, with `patch = subprocess,_exit,execv` and `context = ${PYTEST_CURRENT_TEST-}` in RC:

    pytest --cov --cov-context=test --cov-config=RC --cov-report= --durations=0 --durations-min=0.05 > LOG
"""

from __future__ import annotations

import argparse
import ctypes
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from .choosing import Mutant, Tests, mutants, sample
from .clone import Clone
from .promises import read_breaches

ENOUGH = 0.4
"""Share of the time limit for the measured time of a mutant's tests; the rest is for starting servers and noise."""
SOUND_SECONDS = 1_800
"""Time limit for the tests of all promises on the sound tree."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): orphaned descendants become children of this process."""


class Judged(NamedTuple):
    """The outcome of a mutant, and the tests that judged it."""

    mutant: Mutant
    outcome: str
    tests: str

    def __str__(self) -> str:
        return f"{self.outcome:<9}  {self.mutant.path}:{self.mutant.line} ({self.mutant.spoilt.kind}; {self.tests})"


def judged(clone: Clone, mutant: Mutant, tests: list[str], limit: float) -> Judged:
    """Run the tests on a mutant; ignore tests that also fail on the unchanged tree."""
    while True:
        status, said = _run_spoilt(clone, mutant, tests, limit) if tests else (5, "")
        killer = _failed(said, tests) if status == 1 else None
        if killer is None or clone.run([killer], limit=limit)[0] == 0:
            break
        tests = [test for test in tests if test != killer]
    outcome = {None: "timed out", 0: "survived", 5: "no test"}.get(status, "killed")
    return Judged(mutant, outcome, f"{len(tests)} tests")


def _run_spoilt(clone: Clone, mutant: Mutant, tests: list[str], limit: float) -> tuple[int | None, str]:
    clone.write(mutant.path, mutant.after)
    try:
        return clone.run(tests, limit=limit)
    finally:
        clone.write(mutant.path, mutant.before)


def _failed(said: str, tests: list[str]) -> str | None:
    """Return the test that failed, or None if collecting the tests failed."""
    words = [line.partition(" ") for line in said.splitlines()]
    ends = [rest for word, _, rest in words if word in {"FAILED", "ERROR"}]
    return max((test for test in tests for end in ends if end.startswith(test)), key=len, default=None)


def main() -> None:
    """Judge the promises or a sample, and print a report; Ctrl-C ends it with a partial report."""
    parser = argparse.ArgumentParser(description="Spoil lines of the product, and see whether the tests notice.")
    parser.add_argument("tree", nargs="?", type=Path, default=Path(), help="a checkout; by default this folder")
    parser.add_argument("--promises", action="store_true", help="break each promise instead of making a sample")
    parser.add_argument("--coverage", type=Path, help="the data of a run with a context for each test")
    parser.add_argument("--durations", type=Path, help="what pytest printed of that run")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same sample")
    parser.add_argument("--count", type=int, default=120, help="how many mutants")
    parser.add_argument(
        "--under",
        action="append",
        default=[],
        help="only files whose paths begin so, of tests too for promises; may be repeated",
    )
    parser.add_argument("--limit", type=float, help="seconds for each; by default 90, for promises 180")
    given = parser.parse_args()
    given.limit = given.limit or (180 if given.promises else 90)
    if not given.promises and (given.coverage is None or given.durations is None):
        parser.error("a sample needs --coverage and --durations")
    # A process in a shell's background ignores Ctrl-C, which some tests need.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    found: list[Judged] = []
    is_whole = False
    with TemporaryDirectory(prefix="mutation-") as folder, suppress(KeyboardInterrupt):
        clone = Clone(given.tree.resolve(), Path(folder))
        for judgement in _judge_promises(clone, given) if given.promises else _judge_sample(clone, given):
            found.append(judgement)
            sys.stdout.write(f"{judgement}\n")
            sys.stdout.flush()
        is_whole = bool(found)
    counts = Counter(one.outcome for one in found)
    survivors = [f"\n{one}\n{one.mutant.diff()}" for one in found if one.outcome != "killed"]
    sys.stdout.write("\n".join(["", ", ".join(f"{count} {what}" for what, count in counts.items()), *survivors, ""]))
    if given.promises and (survivors or not is_whole):
        sys.exit(1)


def _judge_promises(clone: Clone, given: argparse.Namespace) -> Iterator[Judged]:
    """Judge each breach by the promise's test; a test that also fails on the unchanged tree is *unsound*."""
    under = tuple(given.under) or ""
    breaches = [
        one for one in read_breaches(clone.folder) if one.test.startswith(under) or one.mutant.path.startswith(under)
    ]
    passing = clone.find_passing(list(dict.fromkeys(test for test, _mutant in breaches)), limit=SOUND_SECONDS)
    for test, mutant in breaches:
        outcome = "unsound"
        if test in passing:
            # An error of a fixture counts as detection: fixtures begin the work of a test.
            status, _said = _run_spoilt(clone, mutant, [test], given.limit)
            outcome = {None: "timed out", 0: "survived", 1: "killed"}.get(status, "no test")
        yield Judged(mutant, outcome, test)


def _judge_sample(clone: Clone, given: argparse.Namespace) -> Iterator[Judged]:
    tests = Tests(clone.folder, given.coverage, given.durations.read_text(), clone.present())
    wanted = (one for one in mutants(clone.folder) if one.path.startswith(tuple(given.under) or ""))
    for mutant in sample(wanted, given.count, given.seed):
        yield judged(clone, mutant, tests.of(mutant, within=ENOUGH * given.limit), given.limit)


if __name__ == "__main__":
    main()
