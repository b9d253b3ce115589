"""The delay from a due tick to the start of its run, on an idle system."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from time import monotonic, sleep

import redis

from benchmarks.bare import DELAYS
from benchmarks.contest import Benchmark, Peer
from benchmarks.forge import database_of
from benchmarks.serving import Shared, bare, ours
from demo.servers import Servers
from forgekeeper.api.batches import BATCHES
from forgekeeper.platform.database import database

TICKS = 60
LEAST = 5
SETTLING = 3
"""Ticks at the beginning that are not counted, because connections are opened then."""
EVERY_SECOND = "* * * * * *"
ENDED = "select count(*) from job_runs where finished_at is not null"
DELAYS_OF_OURS = """
    select extract(epoch from tick)::float8, (result ->> 'began')::float8, state
    from job_runs where tick is not null and finished_at is not null order by tick
"""
SKIPPED = 1.0
"""Seconds of delay for a tick skipped because the one before had not ended: a lower bound."""


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times 60 ticks, at least five."""
    ticks = max(LEAST, round(TICKS * scale))
    own, peer = Shared(lambda: _ours(servers, ticks)), Shared(lambda: _bare(servers, ticks))
    return [
        Benchmark(
            f"tick_p{percent}",
            "s",
            own.figure(partial(_quantile, percent)),
            (Peer("bare Dramatiq and APScheduler", peer.figure(partial(_quantile, percent)), 1.1),),
            less=True,
        )
        for percent in (50, 99)
    ]


def _quantile(percent: int, delays: list[float]) -> float:
    return sorted(delays)[ceil(len(delays) * percent / 100) - 1]


def _ours(servers: Servers, ticks: int) -> list[float]:
    """Wait for *ticks*; return the delay of each in seconds."""
    with database_of(servers, "tick") as settings, redis.Redis.from_url(servers.redis_url) as client:
        client.flushall()
        database.execute_sql("truncate job_runs, processes, batches")
        others = {f"cron_{name}": "off" for name in BATCHES}
        with ours(settings, batches="workers,benchmarks.declared.every_second", **others):
            _wait_for(lambda: _asked(ENDED), ticks + SETTLING)
        found = database.execute_sql(DELAYS_OF_OURS).fetchall()[SETTLING : SETTLING + ticks]
    seconds = [round(tick) for tick, _, _ in found]
    assert seconds == list(range(seconds[0], seconds[0] + ticks)), f"not every second was a tick: {seconds}"
    assert {state for _, _, state in found} <= {"succeeded", "skipped"}, found
    return [SKIPPED if began is None else began - tick for tick, began, _ in found]


def _wait_for(count: Callable[[], int], wanted: int) -> None:
    """Wait for *wanted* ticks and poll rarely, so that the measured system stays idle."""
    ending = monotonic() + 2 * wanted + 60
    while count() < wanted:
        assert monotonic() < ending, f"{count()} of {wanted} ticks have come"
        sleep(0.5)


def _asked(statement: str) -> int:
    (value,) = database.execute_sql(statement).fetchone()
    return int(value)


def _bare(servers: Servers, ticks: int) -> list[float]:
    with redis.Redis.from_url(servers.redis_url) as client:
        client.flushall()
        with bare(servers.redis_url, {"tick": EVERY_SECOND}):
            _wait_for(lambda: int(client.llen(DELAYS)), ticks + SETTLING)
        found = [float(delay) for delay in client.lrange(DELAYS, SETTLING, SETTLING + ticks - 1)]
    assert len(found) == ticks
    return found
