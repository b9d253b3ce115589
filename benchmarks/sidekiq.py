"""Sidekiq as a peer: Debian's ruby-sidekiq, on the same Redis."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import which

import redis

from benchmarks.contest import Missing
from benchmarks.processes import until
from demo.servers import Servers

JOBS = Path(__file__).with_name("sidekiq_jobs.rb")
PROCESSED = "stat:processed"


def push(servers: Servers, queue: str, count: int) -> float:
    """Enqueue *count* jobs by `push_bulk`; return the seconds measured in Ruby."""
    _require("ruby")
    command = ["ruby", str(JOBS), queue, str(count)]
    done = subprocess.run(command, env=_environment(servers), capture_output=True, text=True, check=True)
    return float(done.stdout)


@contextmanager
def workers(servers: Servers, client: redis.Redis, *, processes: int, threads: int) -> Iterator[None]:
    """Run *processes* until all wait for jobs; at its end each reports its number of jobs."""
    sidekiq = _require("sidekiq")
    command = [sidekiq, "-r", str(JOBS), "-q", "default", "-c", str(threads)]
    with ExitStack() as stack:
        for _ in range(processes):
            stack.enter_context(_process(command, servers))
        until(lambda: client.scard("processes") == processes, within=60)
        yield


@contextmanager
def _process(command: list[str], servers: Servers) -> Iterator[None]:
    process = subprocess.Popen(command, env=_environment(servers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _require(program: str) -> str:
    found = which(program)
    if found is None or which("sidekiq") is None:
        raise Missing("apt-get install ruby-sidekiq")
    return found


def _environment(servers: Servers) -> dict[str, str]:
    return {**os.environ, "REDIS_URL": servers.redis_url}
