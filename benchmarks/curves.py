"""What a record costs while its table grows: of ten thousand, a hundred thousand, a million, and ten million.

Half of the table is due, fifty thousand records at most: what is done for each batch, but grows with all that is due,
shows as much as what grows with the table.  All is also measured while an old snapshot is held open elsewhere, with the
statistics of an empty table, with those of a time when nothing was due, and right after a million deletions that nobody
has vacuumed away.
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
"""Only at full size, and only where the forge has so many."""
PROJECTS = 1_000
DELETIONS = 1_000_000
FILLED_AT_ONCE = 1_000_000
SINCE_SNAPSHOT = 2
"""So many times the work was done since the snapshot was taken."""
TARGET = 1.3

NO_STATISTICS = (
    "delete from pg_statistic where starelid = %s::regclass",
    "update pg_class set reltuples = 0, relpages = 0, relallvisible = 0 where oid = %s::regclass",
)

Condition = Callable[[Servers, "Setting"], AbstractContextManager[None]]


@dataclass(frozen=True)
class Setting:
    """What is measured: a world at a size, with so much due work; *deletions* have gone before, where any have."""

    world: World
    size: int
    due: int
    deletions: int

    @property
    def database(self) -> str:
        """The database of that size; it has the tables of all worlds."""
        return f"curve_{self.size}"


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return what is measured of tables of *scale* times the sizes; 10 million only at full scale."""
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
    about = f"The cost of a {world.item} in tables up to {max(sizes) // min(sizes)} times as large, {said}."
    dearest = partial(_dearest, larger)
    return Benchmark(name, f"µs/{world.item}", dearest, (peer,), less=True, about=about, curve=curve)


def _dearest(costs: list[partial[float]]) -> float:
    """Return what it costs at the size where it costs most: a plan may also be wrong half-way, and right again."""
    return max(cost() for cost in costs)


def _due(world: World, size: int, scale: float) -> int:
    """Of pending refs it is the projects that cost: as many at each size, with more refs each."""
    return _scaled(PROJECTS if world.name == "refs" else min(size // 2, world.most), scale)


def _scaled(count: int, scale: float) -> int:
    return max(2, round(count * scale))


def _cost(
    servers: Servers, setting: Setting, condition: Condition, curve: Curve, filled: set[tuple[str, int]]
) -> float:
    """Do the due work once; return how many microseconds a record took."""
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
    """Hold a snapshot that is older than what the batch has deleted since."""
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
    """Let much have become due since the last look at the table."""
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
"""How a world is found, and how that is said."""
