"""Stale imports: the batch in one process and through a worker, compared with an UPDATE for each record."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any

from psycopg2 import connect

from benchmarks import alone, processes
from benchmarks.contest import Benchmark, Peer
from benchmarks.forge import database_of
from demo.servers import Servers
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.settings import Settings

STALE = 10_000
FRESH = 10
"""Number of fresh imports per stale import."""
TRACKERS = 20
BATCH = "stale_imports"
SHARE = 0.1
"""Share of the stale records that the peer updates; its rate is constant.

All records would take a minute.
"""
LEAST = 200

# One in eleven is stale, spread among the fresh ones. An entity's trackers are created together.
MAKE = """
    truncate bulk_imports, bulk_import_entities, bulk_import_trackers;
    insert into bulk_imports (user_id, status, updated_at)
    select n, mod(n, 2), {touched} from generate_series(1, {records}) as n;
    insert into bulk_import_entities
        (bulk_import_id, source_type, source_full_path, destination_name, destination_namespace, status, updated_at)
    select n, mod(n, 2), 'group/subgroup/project-' || n, 'project-' || n, 'imported/from/elsewhere', mod(n, 2),
        {touched}
    from generate_series(1, {records}) as n;
    insert into bulk_import_trackers (bulk_import_entity_id, relation, stage, status, updated_at)
    select entity.id, 'relation-' || stage, stage, (array[0, 1, 3])[1 + mod(stage, 3)], entity.updated_at
    from bulk_import_entities as entity, generate_series(1, {trackers}) as stage
    order by entity.id, stage
"""
TOUCHED = """
    now() - case when mod(n, {fresh} + 1) = 0 then interval '2 days' else interval '1 hour' end
        - mod(('x' || left(md5(n::text), 8))::bit(32)::bigint, 36000) * interval '0.1 s'
"""
LEFT = """
    select (select array_agg(count order by status) from (
        select status, count(*) from bulk_imports group by status) as found),
    (select array_agg(count order by status) from (
        select status, count(*) from bulk_import_entities group by status) as found),
    (select count(*) from bulk_import_trackers where status = 4)
"""
STALE_ONES = "select id from {table} where status in (0, 1) and updated_at < now() - interval '1 day' limit {limit}"


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times 10,000 stale imports, with entities and trackers."""
    world = World(servers, max(1, round(STALE * scale)))
    peers = (Peer("row by row, by its rate", partial(world.rate, world.row_by_row), 15),)
    return [
        Benchmark("imports", "records/s", partial(world.rate, world.run), peers),
        Benchmark("imports_worker", "records/s", partial(world.rate, world.worker), peers),
    ]


class World:
    """*stale* imports, as many stale entities with trackers, and ten times as many fresh ones."""

    def __init__(self, servers: Servers, stale: int) -> None:
        self._servers, self._stale = servers, stale

    def rate(self, work: Callable[[Settings], tuple[int, float]]) -> float:
        """Call *work*; return the updated records per second, including trackers."""
        with database_of(self._servers, "imports", breaker_share=1) as settings:
            self._fill()
            given_up, seconds = work(settings)
            self._check(given_up)
        return given_up * (2 + TRACKERS) / seconds

    def run(self, settings: Settings) -> tuple[int, float]:
        """Execute a run in this process."""
        with _unread():
            seconds, result = alone.run(BATCH, settings)
        return self._all(result), seconds

    def worker(self, settings: Settings) -> tuple[int, float]:
        """Let a worker process execute a run."""
        with _unread(), processes.workers(processes.environment(settings)):
            seconds, result = processes.run(BATCH)
        return self._all(result), seconds

    def row_by_row(self, settings: Settings) -> tuple[int, float]:
        """Update a share of the records and trackers, each by an UPDATE in its own transaction."""
        share = max(min(self._stale, LEAST), round(self._stale * SHARE))
        connection = connect(settings.require_database())
        connection.autocommit = True
        try:
            cursor = connection.cursor()
            began = monotonic()
            for number in _found(cursor, "bulk_imports", share):
                cursor.execute("update bulk_imports set status = 3, updated_at = now() where id = %s", (number,))
            for number in _found(cursor, "bulk_import_entities", share):
                cursor.execute(
                    "update bulk_import_entities set status = 3, updated_at = now() where id = %s", (number,)
                )
                cursor.execute(
                    "select id from bulk_import_trackers where bulk_import_entity_id = %s and status in (0, 1, 3)",
                    (number,),
                )
                for tracker in cursor.fetchall():
                    cursor.execute(
                        "update bulk_import_trackers set status = 4, updated_at = now() where id = %s", tracker
                    )
            return share, monotonic() - began
        finally:
            connection.close()

    def _fill(self) -> None:
        records = self._stale * (FRESH + 1)
        touched = TOUCHED.format(fresh=FRESH)
        database.execute_sql(MAKE.format(touched=touched, records=records, trackers=TRACKERS))
        database.execute_sql("vacuum analyze bulk_imports, bulk_import_entities, bulk_import_trackers")
        database.execute_sql("checkpoint")
        client.flushdb()

    def _all(self, result: dict[str, Any]) -> int:
        wanted = {"imports": self._stale, "entities": self._stale, "trackers": TRACKERS * self._stale}
        wanted |= {"skipped": 0, "failed": 0}
        assert result == {**wanted, "stopped": "drained"}, f"{result} is not {wanted}"
        return self._stale

    def _check(self, given_up: int) -> None:
        imports, entities, trackers = database.execute_sql(LEFT).fetchone()
        records = self._stale * (FRESH + 1)
        for found in imports, entities:
            assert (sum(found), found[-1]) == (records, given_up), f"{found} by status, {given_up} were given up"
        assert trackers == given_up * TRACKERS, f"{trackers} trackers of {given_up} entities were given up"


def _found(cursor: Any, table: str, limit: int) -> list[int]:
    cursor.execute(STALE_ONES.format(table=table, limit=limit))
    return [number for (number,) in cursor.fetchall()]


@contextmanager
def _unread() -> Iterator[None]:
    """Discard the output, so that log lines are written and nobody reads them."""
    for stream in sys.stdout, sys.stderr:
        stream.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number, _ in kept:
            os.dup2(nowhere, number)
        yield
    finally:
        for stream in sys.stdout, sys.stderr:
            stream.flush()
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)
