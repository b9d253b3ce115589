"""The cost of a record in tables of ten thousand, a hundred thousand, a million and ten million records.

Half of the table is due, at most fifty thousand records: costs that grow with all due records are visible, and so are
costs that grow with the table. Each curve is also measured while another session holds an old snapshot, with the
statistics of an empty table, with statistics of a time when nothing was due, and directly after a million deletions
without vacuum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import psycopg2
from psycopg2.extensions import make_dsn

from benchmarks.contest import Benchmark, Curve, Peer, Point
from benchmarks.forge import database_of
from benchmarks.worlds import OPTIONS, World, worlds
from demo.servers import Servers
from forgekeeper.platform.database import database

SIZES = (10_000, 100_000, 1_000_000)
LARGEST, AT_LARGEST = 10_000_000, ("statuses", "artifacts", "uploads")
"""Largest size, measured only at full scale and for tables that are this large in forges."""
PROJECTS = 1_000
DELETIONS = 1_000_000
FILLED_AT_ONCE = 1_000_000
SINCE_SNAPSHOT = 2
"""Rounds of work since the snapshot was taken."""
TARGET = 1.3

NO_STATISTICS = (
    "delete from pg_statistic where starelid = %s::regclass",
    "update pg_class set reltuples = 0, relpages = 0, relallvisible = 0 where oid = %s::regclass",
)

Condition = Callable[[Servers, "Setting"], AbstractContextManager[None]]


@dataclass(frozen=True)
class Setting:
    """A measurement: a world at a size, with *due* records, and *deletions* before it if any."""

    world: World
    size: int
    due: int
    deletions: int

    @property
    def database(self) -> str:
        """Name of the database for that size, which has the tables of all worlds."""
        return f"curve_{self.size}"


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times the sizes; 10 million only at full scale."""
    filled: set[tuple[str, int]] = set()
    return [
        _curve(servers, scale, world, condition, filled)
        for world in worlds(_scaled(PROJECTS, scale))
        for condition in CONDITIONS
    ]


def _curve(servers: Servers, scale: float, world: World, condition: str, filled: set[tuple[str, int]]) -> Benchmark:
    make, said = CONDITIONS[condition]
    name = f"curve_{world.name}_{condition}".removesuffix("_plain")
    sizes = SIZES + (LARGEST,) * (scale >= 1 and world.name in AT_LARGEST)
    curve = Curve(f"curve_{world.name}", said)
    smallest, *larger = [
        partial(
            _cost,
            replace(servers, redis_url=servers.redis_url.replace("db=0", f"db={number}")),
            Setting(world, _scaled(size, scale), _due(world, size, scale), _scaled(DELETIONS, scale)),
            make,
            curve,
            filled,
        )
        for number, size in enumerate(sizes, 1)
    ]
    peer = Peer(f"in a table of {_scaled(min(sizes), scale):,}", smallest, TARGET)
    about = f"The cost per {world.item} in tables up to {max(sizes) // min(sizes)} times as large, {said}."
    dearest = partial(_dearest, larger)
    return Benchmark(name, f"µs/{world.item}", dearest, (peer,), less=True, about=about, curve=curve)


def _dearest(costs: list[partial[float]]) -> float:
    """Return the highest cost of all sizes: a plan may be wrong at a medium size only."""
    return max(cost() for cost in costs)


def _due(world: World, size: int, scale: float) -> int:
    """The cost of refs depends on projects: their number is constant, with more refs each."""
    return _scaled(PROJECTS if world.name == "refs" else min(size // 2, world.most), scale)


def _scaled(count: int, scale: float) -> int:
    return max(2, round(count * scale))


def _cost(
    servers: Servers, setting: Setting, condition: Condition, curve: Curve, filled: set[tuple[str, int]]
) -> float:
    """Do the due work once; return the microseconds per record."""
    world = setting.world
    with database_of(servers, setting.database, **OPTIONS) as settings:
        if (world.name, setting.size) not in filled:
            _fill(world, setting.size)
            filled.add((world.name, setting.size))
        place = world.place(servers.folder / setting.database)
        with condition(servers, setting):
            database.execute_sql("checkpoint")
            done, seconds = world.work(settings.model_copy(update=place))
        world.after()
    assert done == setting.due, f"{done} of {setting.due} were done"
    cost = seconds / done * 1e6
    curve.points.append(Point(setting.size, cost))
    return cost


def _fill(world: World, size: int) -> None:
    for table in world.tables:
        database.execute_sql(f"alter table {table} set (autovacuum_enabled = off)")
    for first in range(0, size, FILLED_AT_ONCE):
        world.fill(min(FILLED_AT_ONCE, size - first))


@contextmanager
def _plain(_servers: Servers, setting: Setting) -> Iterator[None]:
    setting.world.add(setting.due)
    _vacuum(setting.world)
    yield


@contextmanager
def _snapshot(servers: Servers, setting: Setting) -> Iterator[None]:
    """Hold a snapshot that is older than the batch's deletions."""
    _vacuum(setting.world)
    other = psycopg2.connect(make_dsn(servers.database_url, dbname=setting.database))
    try:
        with other.cursor() as cursor:
            cursor.execute("begin isolation level repeatable read; select 1")
        setting.world.churn(SINCE_SNAPSHOT * setting.due)
        setting.world.add(setting.due)
        yield
    finally:
        other.close()


@contextmanager
def _stale(_servers: Servers, setting: Setting) -> Iterator[None]:
    _vacuum(setting.world)
    setting.world.add(setting.due)
    for table in setting.world.tables:
        for statement in NO_STATISTICS:
            database.execute_sql(statement, (table,))
    yield


@contextmanager
def _outdated(_servers: Servers, setting: Setting) -> Iterator[None]:
    """Make many records due after the last analyze."""
    _vacuum(setting.world)
    setting.world.add(setting.due)
    yield


@contextmanager
def _unvacuumed(_servers: Servers, setting: Setting) -> Iterator[None]:
    _vacuum(setting.world)
    setting.world.churn(setting.deletions)
    setting.world.add(setting.due)
    yield


def _vacuum(world: World) -> None:
    for table in world.tables:
        database.execute_sql(f"vacuum analyze {table}")


CONDITIONS: dict[str, tuple[Condition, str]] = {
    "plain": (_plain, "vacuumed"),
    "snapshot": (_snapshot, "with an old snapshot held open"),
    "stale": (_stale, "with statistics of an empty table"),
    "outdated": (_outdated, "with statistics of a time when nothing was due"),
    "unvacuumed": (_unvacuumed, "after a million deletions without vacuum"),
}
"""Conditions of a table, each with its description."""
