"""The cost of an idle scheduler and an idle worker, per minute."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep, time

import psycopg2
import redis

from benchmarks.contest import Benchmark, Peer
from benchmarks.forge import database_of
from benchmarks.processes import until
from benchmarks.serving import Shared, bare, ours
from demo.servers import Servers
from forgekeeper.api.batches import BATCHES
from forgekeeper.platform.database import database

SECONDS = 60.0
LEAST = 5.0
SETTLING = 5.0
PROCESSES = 3
"""A scheduler, a worker's master and its process."""
TICK = os.sysconf("SC_CLK_TCK")
TRANSACTIONS = "select sum(xact_commit + xact_rollback)::bigint from pg_stat_database where datname = 'idle'"


@dataclass(frozen=True)
class Cost:
    """Costs of a minute."""

    cpu: float
    redis: float
    transactions: float
    memory: float


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times a minute, at least five seconds.

    A bare system lacks a ledger: transactions, and the memory of its Python alone, are for information.
    """
    seconds = max(LEAST, SECONDS * scale)
    own, peer = Shared(lambda: _ours(servers, seconds)), Shared(lambda: _bare(servers, seconds))

    def pair(name: str, unit: str, take: Callable[[Cost], float], target: float) -> Benchmark:
        beside = Peer("bare Dramatiq and APScheduler", peer.figure(take), target)
        return Benchmark(name, unit, own.figure(take), (beside,), less=True)

    return [
        pair("idle_cpu", "s/minute", lambda cost: cost.cpu, 1.2),
        pair("idle_redis", "commands/minute", lambda cost: cost.redis, 1.2),
        pair("idle_memory", "MB", lambda cost: cost.memory, 2.0),
    ]


def _ours(servers: Servers, seconds: float) -> Cost:
    with database_of(servers, "idle") as settings:
        database.execute_sql("truncate job_runs, processes, batches")
        with _emptied(servers) as client, ours(settings) as started:
            return _cost(servers, client, started, seconds)


def _bare(servers: Servers, seconds: float) -> Cost:
    timetable = {name: spec.cron for name, spec in BATCHES.items()}
    with _emptied(servers) as client, bare(servers.redis_url, timetable) as started:
        return _cost(servers, client, started, seconds)


@contextmanager
def _emptied(servers: Servers) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(servers.redis_url) as client:
        client.flushall()
        yield client


def _cost(servers: Servers, client: redis.Redis, started: list[int], seconds: float) -> Cost:
    """Let the processes settle and then idle for *seconds*; return the cost per minute."""
    until(lambda: len(set(_trees(started))) == PROCESSES, within=60)
    sleep(SETTLING)
    while seconds < SECONDS - 2 * SETTLING and not SETTLING < time() % 60 < SECONDS - seconds:
        # A measurement shorter than a minute must not include a tick or its run, or every other one would.
        sleep(0.5)
    pids = set(_trees(started))
    before = _counts(servers, client, pids)
    sleep(seconds)
    after = _counts(servers, client, pids)
    assert pids == set(_trees(started)), "processes have ended, or begun"
    cpu, commands, transactions = (late - early for early, late in zip(before, after, strict=True))
    minutes = seconds / 60
    # The second INFO counts the first one.
    return Cost(cpu / minutes, (commands - 1) / minutes, transactions / minutes, sum(map(_megabytes, pids)))


def _counts(servers: Servers, client: redis.Redis, pids: set[int]) -> tuple[float, float, float]:
    # Redis is asked first, and its open connection asks one command only, so the other queries do not count.
    commands = client.info("stats")["total_commands_processed"]
    asked = psycopg2.connect(servers.database_url)
    try:
        with asked.cursor() as cursor:
            cursor.execute(TRANSACTIONS)
            ((transactions,),) = cursor.fetchall()
    finally:
        asked.close()
    return sum(map(_seconds, pids)), float(commands), float(transactions or 0)


def _stat(pid: int) -> list[str]:
    """Return the fields of the process's line, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _seconds(pid: int) -> float:
    """Return the CPU seconds of the process and of its children that have ended."""
    return sum(map(int, _stat(pid)[11:15])) / TICK


def _megabytes(pid: int) -> float:
    """Return the memory of the process in MB; shared pages count proportionally."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (kilobytes,) = (int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kilobytes / 1024


def _trees(roots: list[int]) -> Iterator[int]:
    """Yield the processes and all their descendants."""
    children = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            children[int(_stat(int(path.name))[1])].append(int(path.name))
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        waiting += children[pid]
        yield pid
