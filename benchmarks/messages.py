"""The cost of a message: actors that do nothing, in two worker processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import redis

from benchmarks import noop, sidekiq
from benchmarks.contest import Benchmark, Peer
from benchmarks.forge import database_of
from demo.servers import Servers
from forgekeeper.platform.settings import Settings

MESSAGES = 20_000
WORKER = ("--processes", "2", "--threads", "8")
LOOK_EVERY = 0.005
PATIENCE = 120.0
NAMESPACES = {"bare": "dramatiq"}
NOOP = (sys.executable, "-m", "benchmarks.noop")
ROOT = Path(__file__).parent.parent


class Unfinished(Exception):
    """The workers did not finish their messages in time."""


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times 20,000 messages."""
    run = partial(_rate, servers, round(MESSAGES * scale))
    return [
        Benchmark(
            "messages",
            "messages/s",
            partial(run, "observed"),
            (
                Peer("bare Dramatiq", partial(run, "bare"), 0.6),
                Peer("Sidekiq", partial(_rate_of_sidekiq, servers, round(MESSAGES * scale)), 0.3),
            ),
        ),
        Benchmark(
            "observed",
            "messages/s",
            partial(run, "observed"),
            (
                Peer("without metrics", partial(run, "unmeasured"), 0.9),
                Peer("without log lines", partial(run, "unlogged"), 0.9),
                Peer("without either", partial(run, "unobserved"), 0.9),
            ),
        ),
    ]


def _rate(servers: Servers, count: int, kind: str) -> float:
    """Let workers of *kind* process *count* messages; return the rate per second."""
    client = redis.Redis.from_url(servers.redis_url)
    client.flushdb()
    with database_of(servers, "messages") as settings:
        environment = _environment(servers, settings)
    stored = f"{NAMESPACES.get(kind, 'forgekeeper')}:{noop.QUEUES[kind]}.msgs"
    _enqueue(environment, kind, count)
    assert client.hlen(stored) == count, "not all messages were put in"
    with _worker(environment, kind):
        _until(lambda: client.hlen(stored) < count)
        began, left = monotonic(), client.hlen(stored)
        _until(lambda: client.hlen(stored) == 0)
        seconds = monotonic() - began
    client.close()
    return left / seconds


def _rate_of_sidekiq(servers: Servers, count: int) -> float:
    """Let Sidekiq work with equal numbers of processes and threads; return jobs per second."""
    client = redis.Redis.from_url(servers.redis_url)
    client.flushdb()
    sidekiq.push(servers, "later", count)
    assert client.llen("queue:later") == count, "not all jobs were put in"
    with sidekiq.workers(servers, client, processes=2, threads=8):
        # Start when both processes are ready: the first alone would fetch everything.
        began = monotonic()
        client.rename("queue:later", "queue:default")
        _until(lambda: client.llen("queue:default") == 0)
        seconds = monotonic() - began
    done = int(client.get(sidekiq.PROCESSED) or 0)
    assert done == count, f"{done} of {count} were done"
    client.close()
    return count / seconds


def _until(condition: Callable[[], bool]) -> None:
    ending = monotonic() + PATIENCE
    while not condition():
        if monotonic() > ending:
            raise Unfinished(f"messages were left after {PATIENCE:.0f} s")
        sleep(LOOK_EVERY)


def _enqueue(environment: dict[str, str], kind: str, count: int) -> None:
    subprocess.run([*NOOP, "enqueue", kind, str(count)], env=environment, cwd=ROOT, check=True)


@contextmanager
def _worker(environment: dict[str, str], kind: str) -> Iterator[None]:
    """Run a worker with two processes, and discard its output."""
    process = subprocess.Popen(
        [*NOOP, "work", kind, *WORKER],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _environment(servers: Servers, settings: Settings) -> dict[str, str]:
    given = {
        "DATABASE_URL": settings.require_database(),
        "REDIS_URL": servers.redis_url,
        "METRICS_PORT_WORKER": "0",
        "WORKER_THREADS": WORKER[-1],
        "LOG_FORMAT": "json",
    }
    return {**os.environ, **{f"FORGEKEEPER_{name}": value for name, value in given.items()}}
