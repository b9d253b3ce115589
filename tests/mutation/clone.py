"""A clone of a tree, in which files are changed and tests run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

CASE = re.compile(r"^(?P<test>\S+?::\w+).* (?P<outcome>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
"""The outcome of one case of a test, as pytest prints it."""


class Clone:
    """A clone of a tree's last commit."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.folder, self._scratch, self._stamp = folder / "tree", folder, 1_000_000_000
        # Some tests run as another user, who must read the product and create temporary files.
        folder.chmod(0o755)
        subprocess.run(["git", "clone", "-q", tree, self.folder], check=True)

    def write(self, path: str, text: str) -> None:
        """Write a file with a new modification time, so that Python does not use outdated bytecode."""
        (self.folder / path).write_text(text)
        self._stamp += 1
        os.utime(self.folder / path, (self._stamp, self._stamp))

    def present(self) -> set[str]:
        """Return the names of all tests."""
        _status, said = self.run(["tests"], "--collect-only", limit=300)
        return {line for line in said.splitlines() if "::" in line}

    def find_passing(self, tests: list[str], *, limit: float) -> set[str]:
        """Return the tests whose cases all pass; a skipped test does not count."""
        _status, said = self.run(tests, "-vv", "--maxfail=0", limit=limit)
        outcomes = [(found["test"], found["outcome"]) for found in CASE.finditer(said)]
        return {test for test, _ in outcomes} - {test for test, outcome in outcomes if outcome != "PASSED"}

    def run(self, tests: list[str], *options: str, limit: float) -> tuple[int | None, str]:
        """Run *tests* up to the first failure; return pytest's status (None after *limit* seconds) and its output.

        All processes of the tests are ended.
        """
        # A mutant changes one file: keep the bytecode of the others, whatever the environment says.
        environment = {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": ""}
        named, said, temporary = (self._scratch / name for name in ("named", "said", "tmp"))
        named.write_text("\n".join(tests))
        temporary.mkdir(exist_ok=True)
        temporary.chmod(0o1777)
        # A test that hangs fails in time to be run again on the unchanged tree.
        options = ("-x", "-q", "--tb=no", "-rfE", f"--timeout={limit / 2}", *options)
        with said.open("w") as output:
            running = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, f"@{named}"],
                cwd=self.folder,
                env={**os.environ, **environment, "TMPDIR": str(temporary)},
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
    """End all processes that tests have left: first with SIGTERM, so that servers remove their files."""
    for number in [signal.SIGTERM] * 100 + [signal.SIGKILL] * 600:
        children = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
        if not children:
            return
        for child in map(int, children):
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, number)
                os.waitpid(child, os.WNOHANG)
        time.sleep(0.1)
