"""A real PostgreSQL and a real Redis for demonstrations, development, tests and benchmarks.

Both are started from wheels, listen on unix sockets only, and belong to a keeper process
that stops them when we leave the context or die, however we die.  Production never
imports this package.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from forgekeeper.embedded.errors import EmbeddedError, EmbeddedUnavailable
from forgekeeper.embedded.folder import remove_when_unused
from forgekeeper.embedded.plan import Plan
from forgekeeper.embedded.report import Report

__all__ = ["EmbeddedError", "EmbeddedUnavailable", "Servers", "servers"]


@dataclass(frozen=True)
class Servers:
    """Where the running servers are."""

    folder: Path
    database_url: str
    redis_url: str
    postgres_pid: int
    redis_pid: int


@contextmanager
def servers(folder: Path | None = None, *, postgres_options: Mapping[str, str] | None = None) -> Iterator[Servers]:
    """Run PostgreSQL, with an empty database `forgekeeper`, and Redis for the duration of the context.

    Without *folder* everything is in a temporary one that is removed afterwards, and durability
    is traded for speed.  With *folder* the data stays for the next start; a folder belongs to one
    context at a time, another is refused.  *postgres_options* are server settings such as `fsync`.

    Only the process that entered the context ends it: a forked child that unwinds through it
    leaves the servers alone.
    """
    plan = Plan.on_this_machine(folder, postgres_options or {})
    keeper = _start_keeper(plan)
    owner = os.getpid()
    report: Report | None = None
    try:
        report = _read_report(keeper)
        yield Servers(Path(report.folder), report.database_url, report.redis_url, report.postgres_pid, report.redis_pid)
    finally:
        if os.getpid() == owner:
            keeper.terminate()
            keeper.wait()
            _clean_up_after_killed_keeper(report)


def _start_keeper(plan: Plan) -> subprocess.Popen[bytes]:
    package_root = Path(__file__).parent.parent.parent
    return subprocess.Popen(
        # The keeper needs the standard library and this package, wherever we were imported from.
        [sys.executable, "-S", "-P", "-m", "forgekeeper.embedded.keeper", json.dumps(asdict(plan))],
        env={**os.environ, "PYTHONPATH": str(package_root)},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # A Ctrl-C at the terminal is for us: we may still need the servers to finish our work.
        start_new_session=True,
    )


def _read_report(keeper: subprocess.Popen[bytes]) -> Report:
    answers: IO[bytes] | None = keeper.stdout
    assert answers is not None
    with answers:
        line = answers.readline()
    if not line:
        raise EmbeddedError("The keeper of the embedded servers died before they were started.")
    answer = json.loads(line)
    if "error" in answer:
        raise EmbeddedError(answer["error"])
    return Report(**answer)


def _clean_up_after_killed_keeper(report: Report | None) -> None:
    """Remove what only a killed keeper leaves behind; its servers die with it, but not its folders."""
    for temporary in report.temporary_folders if report else []:
        remove_when_unused(Path(temporary))
