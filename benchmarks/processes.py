"""Batches in real worker processes: `forgekeeper worker`, as an operator starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic, sleep
from typing import IO, Any

from forgekeeper.api.batches import BATCHES
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.database import database
from forgekeeper.platform.settings import Settings

ROOT = Path(__file__).parent.parent
LOOK_EVERY = 0.005
PATIENCE = 600.0
SHOWN = 5_000
"""Bytes of the workers' last output that are shown."""
READY = "select count(*) from processes where kind = 'worker'"


class Unfinished(Exception):
    """The workers did not finish their work in time."""


def until(condition: Callable[[], bool], *, within: float = PATIENCE) -> None:
    """Wait until *condition* holds; raise `Unfinished` after *within* seconds."""
    ending = monotonic() + within
    while not condition():
        if monotonic() > ending:
            raise Unfinished(f"it was not done after {within:.0f} s")
        sleep(LOOK_EVERY)


def environment(settings: Settings, **options: Any) -> dict[str, str]:
    """Return a command's environment: servers of *settings*, and *options* by setting name."""
    given: dict[str, Any] = {
        "database_url": settings.require_database(),
        "redis_url": settings.require_redis(),
        "log_format": "json",
    }
    given |= {
        "log_level": "ERROR",
        "breaker_share": 1,
        "metrics_port_worker": 0,
        "metrics_port_scheduler": 0,
        **options,
    }
    return {**os.environ, **{f"FORGEKEEPER_{name.upper()}": str(value) for name, value in given.items()}}


@contextmanager
def workers(environment: dict[str, str], *, processes: int = 1, threads: int = 8) -> Iterator[int]:
    """Run worker processes inside the context, once all are ready; yield their master's id.

    This process must be connected to their database.
    """
    command = [sys.executable, "-m", "forgekeeper.cli", "worker"]
    command += ["--processes", str(processes), "--threads", str(threads)]
    with TemporaryFile() as said:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=said)
        try:
            until(lambda: database.execute_sql(READY).fetchone()[0] >= processes, within=60)
            yield process.pid
        except Exception:
            # Errors in the output are part of some batches' work: they are shown only if a benchmark fails.
            sys.stderr.write(_last(said))
            raise
        finally:
            process.terminate()
            process.wait()


def _last(said: IO[bytes]) -> str:
    said.seek(max(0, said.seek(0, os.SEEK_END) - SHOWN))
    return said.read().decode(errors="replace")


def run(batch: str) -> tuple[float, dict[str, Any]]:
    """Send a run of *batch* to the workers; return its duration in seconds and its result.

    Its children may still be at work. Raises `AssertionError` if the run has not succeeded.
    """
    number = int(BATCHES[batch].send().message_id)
    until(lambda: JobRun.get_by_id(number).finished_at is not None)
    row = JobRun.get_by_id(number)
    assert row.state == "succeeded", f"{row.state}: {row.error or row.result}"
    return (row.finished_at - row.started_at).total_seconds(), row.result
