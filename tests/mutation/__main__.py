"""Spoil lines of the product, one at a time, and see which the tests let through.

`python -m tests.mutation --coverage .coverage --durations LOG [TREE]` makes a sample of mutants of the last commit of
TREE in a clone of its own, runs the tests that could notice each, and prints what became of them.  Coverage and log are
of a run of the whole suite, with `patch = subprocess,_exit,execv` and `context = ${PYTEST_CURRENT_TEST-}` in RC:

    pytest --cov --cov-context=test --cov-config=RC --cov-report= --durations=0 --durations-min=0.05 > LOG
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from .choosing import Mutant, Tests, mutants, sample

ENOUGH = 0.4
"""The part of a mutant's time that its tests take while all is well: the rest is for starting servers, and for noise."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): processes whose parents have died become ours."""


class Clone:
    """A copy of a tree's last commit, in which files are spoilt and tests run."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.folder, self._scratch, self._stamp = folder / "tree", folder, 1_000_000_000
        subprocess.run(["git", "clone", "-q", tree, self.folder], check=True)

    def write(self, path: str, text: str) -> None:
        """Write a file, at another second than any time before, or Python would take what it compiled then."""
        (self.folder / path).write_text(text)
        self._stamp += 1
        os.utime(self.folder / path, (self._stamp, self._stamp))

    def present(self) -> set[str]:
        """Name all tests there are."""
        _status, said = self.run(["tests"], "--collect-only", limit=300)
        return {line for line in said.splitlines() if "::" in line}

    def run(self, tests: list[str], *options: str, limit: float) -> tuple[int | None, str]:
        """Run *tests* up to the first failure; return pytest's status, None where its time was up, and what it said.

        No process of theirs is left behind.
        """
        named, said, temporary = (self._scratch / name for name in ("named", "said", "tmp"))
        named.write_text("\n".join(tests))
        temporary.mkdir(exist_ok=True)
        # A test that hangs fails, and can be tried on the sound tree.
        options = ("-x", "-q", "--tb=no", "-rfE", f"--timeout={limit / 2}", *options)
        with said.open("w") as output:
            running = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, f"@{named}"],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(self.folder), "TMPDIR": str(temporary)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        status = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = running.wait(limit)
        finally:
            _end_descendants()
            subprocess.run(["rm", "-rf", temporary], check=False)
        return status, said.read_text(errors="replace")


def _end_descendants() -> None:
    """End all that tests have left running: first politely, so that servers remove what is theirs."""
    for number in [signal.SIGTERM] * 100 + [signal.SIGKILL] * 600:
        children = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
        if not children:
            return
        for child in map(int, children):
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, number)
                os.waitpid(child, os.WNOHANG)
        time.sleep(0.1)


class Judged(NamedTuple):
    """What became of a mutant, by how many tests."""

    mutant: Mutant
    outcome: str
    tests: int

    def __str__(self) -> str:
        where = f"{self.mutant.path}:{self.mutant.line} ({self.mutant.spoilt.kind}; {self.tests} tests)"
        return f"{self.outcome:<9}  {where}"


def judged(clone: Clone, mutant: Mutant, tests: list[str], limit: float) -> Judged:
    """Spoil, test and mend; a test that fails on the sound tree, too, has said nothing and is left out."""
    while True:
        clone.write(mutant.path, mutant.after)
        status, said = clone.run(tests, limit=limit) if tests else (5, "")
        clone.write(mutant.path, mutant.before)
        killer = _failed(said, tests) if status == 1 else None
        if killer is None or clone.run([killer], limit=limit)[0] == 0:
            break
        tests = [test for test in tests if test != killer]
    outcome = {None: "timed out", 0: "survived", 5: "no test"}.get(status, "killed")
    return Judged(mutant, outcome, len(tests))


def _failed(said: str, tests: list[str]) -> str | None:
    """Name the test that failed, None where not even collecting worked."""
    words = [line.partition(" ") for line in said.splitlines()]
    ends = [rest for word, _, rest in words if word in {"FAILED", "ERROR"}]
    return max((test for test in tests for end in ends if end.startswith(test)), key=len, default=None)


def main() -> None:
    """Make the sample, judge it, and report; Ctrl-C ends it with what was judged by then."""
    parser = argparse.ArgumentParser(description="Spoil lines of the product, and see whether the tests notice.")
    parser.add_argument("tree", nargs="?", type=Path, default=Path(), help="a checkout; by default this folder")
    parser.add_argument("--coverage", type=Path, required=True, help="the data of a run with a context for each test")
    parser.add_argument("--durations", type=Path, required=True, help="what pytest printed of that run")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same sample")
    parser.add_argument("--count", type=int, default=120, help="how many mutants")
    parser.add_argument("--under", action="append", default=[], help="only files whose paths begin so; may be repeated")
    parser.add_argument("--limit", type=float, default=90, help="seconds for each")
    given = parser.parse_args()
    # What runs in a shell's background has Ctrl-C ignored, and tests are about it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    found: list[Judged] = []
    with TemporaryDirectory(prefix="mutation-") as folder, suppress(KeyboardInterrupt):
        clone = Clone(given.tree.resolve(), Path(folder))
        tests = Tests(clone.folder, given.coverage, given.durations.read_text(), clone.present())
        wanted = (one for one in mutants(clone.folder) if one.path.startswith(tuple(given.under) or ""))
        for mutant in sample(wanted, given.count, given.seed):
            found.append(judged(clone, mutant, tests.of(mutant, within=ENOUGH * given.limit), given.limit))
            sys.stdout.write(f"{found[-1]}\n")
            sys.stdout.flush()
    counts = Counter(one.outcome for one in found)
    survivors = [f"\n{one}\n{one.mutant.diff()}" for one in found if one.outcome != "killed"]
    sys.stdout.write("\n".join(["", ", ".join(f"{count} {what}" for what, count in counts.items()), *survivors, ""]))


if __name__ == "__main__":
    main()
