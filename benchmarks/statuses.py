"""Expired user statuses: the batch in one process and through a worker, compared with bare loops."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from math import ceil
from tempfile import NamedTemporaryFile
from time import monotonic

from psycopg2 import connect

from benchmarks import processes
from benchmarks.contest import Benchmark, Missing, Peer
from benchmarks.forge import database_of
from demo.servers import EmbeddedError, Servers
from demo.servers.machine import find_postgres_folder
from forgekeeper.api.batches import BATCHES
from forgekeeper.engine.attempt import Runner
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import client, process_identity
from forgekeeper.platform.database import database
from forgekeeper.platform.settings import Settings
from workers.user_status_cleanup import BATCH_SIZE

ROWS = 1_000_000
NAME = "statuses"
BATCH = "user_status_cleanup"

FAR_LIMITS = {f"max_per_{period}_{BATCH}": 1_000_000_000 for period in ("run", "day")}
"""Settings of limits that the work of the benchmark does not come near."""

# Every fifth status is due. Due times are in random order, so the rows of a chunk are spread over the table.
MAKE = """
    drop table if exists full_statuses;
    create unlogged table full_statuses as
    select id as user_id, 'palm_tree' as emoji, 'status ' || id as message,
        now() + (case when mod(id, 5) = 0 then -1 else 1 end) * (interval '1 day'
            + mod(('x' || left(md5(id::text), 8))::bit(32)::bigint, 2500000) * interval '1 s') as clear_status_at
    from generate_series(1, {rows}) as id
"""
FILL = """
    truncate user_statuses;
    drop index user_statuses_clear_status_at;
    insert into user_statuses (user_id, emoji, message, clear_status_at)
    select user_id, emoji, message, clear_status_at from full_statuses;
    create index user_statuses_clear_status_at on user_statuses (clear_status_at, user_id)
        where clear_status_at is not null
"""
LEFT = "select count(*), count(*) filter (where clear_status_at <= now()) from user_statuses"

BEST = f"""
    delete from user_statuses where ctid = any(array(
        select ctid from user_statuses where clear_status_at <= now()
        order by clear_status_at, user_id limit {BATCH_SIZE} for update skip locked
    ))
"""
REFERENCE = f"""
    delete from user_statuses where user_id in (
        select user_id from user_statuses where clear_status_at <= now()
        order by clear_status_at, user_id limit {BATCH_SIZE} for update skip locked
    )
"""
ALL = "delete from user_statuses where clear_status_at <= now()"


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times a million statuses."""
    world = World(servers, max(1, round(ROWS * scale / 5)))
    bare = partial(world.rate, world.bare_loop)
    peers = (
        Peer("bare loop, best statement", partial(bare, BEST), 1.2),
        Peer("bare loop, reference statement", partial(bare, REFERENCE), 2.5),
        Peer("pgbench, best statement", partial(world.rate, world.pgbench), 1.0),
        Peer("one DELETE of all", partial(bare, ALL), 0),
    )
    return [
        Benchmark("statuses", "statuses/s", partial(world.rate, world.run), peers),
        Benchmark("statuses_worker", "statuses/s", partial(world.rate, world.worker), peers[:2]),
        Benchmark(
            "statuses_limited",
            "statuses/s",
            partial(world.rate, world.run_limited),
            (Peer("without limits", partial(world.rate, world.run), 0.9),),
            about="Expired user statuses with distant limits per run and per day, beside a run without limits.",
        ),
    ]


class World:
    """A table with *due* statuses, and four times as many that are not due."""

    def __init__(self, servers: Servers, due: int) -> None:
        self._servers, self._due = servers, due
        self._made = False

    def rate(self, work: Callable[..., float], *args: str) -> float:
        """Call *work*, which returns its seconds; return the deleted statuses per second."""
        with database_of(self._servers, NAME, breaker_share=1) as settings:
            self._fill()
            seconds = work(settings, *args)
            left = database.execute_sql(LEFT).fetchone()
        assert left == (4 * self._due, 0), f"{left} are left and due, of {5 * self._due}"
        return self._due / seconds

    def run(self, settings: Settings) -> float:
        """Execute a run in this process."""
        started = JobRun.start_here(BATCH, by=process_identity())
        assert started is not None
        runner = Runner(settings, lambda *_sent: None)  # type: ignore[arg-type]  # it has no children
        began = monotonic()
        with runner.create_attempt(BATCHES[BATCH], started) as attempt:
            attempt.work_if_allowed()
        seconds = monotonic() - began
        runner.stop()
        self._check(attempt.result_fields())
        return seconds

    def run_limited(self, settings: Settings) -> float:
        """Execute a run in this process with limits that no run reaches."""
        return self.run(settings.model_copy(update=FAR_LIMITS))

    def worker(self, settings: Settings) -> float:
        """Let a worker process execute a run."""
        with processes.workers(processes.environment(settings)):
            seconds, result = processes.run(BATCH)
        self._check(result)
        return seconds

    def bare_loop(self, settings: Settings, statement: str) -> float:
        """Execute the statement until it finds nothing, each time in its own transaction."""
        connection = connect(settings.require_database())
        connection.autocommit = True
        try:
            cursor = connection.cursor()
            began = monotonic()
            cursor.execute(statement)
            while cursor.rowcount:
                cursor.execute(statement)
            return monotonic() - began
        finally:
            connection.close()

    def pgbench(self, settings: Settings) -> float:
        """Let PostgreSQL's own client execute the best statement until all are deleted."""
        with NamedTemporaryFile("w", suffix=".sql") as script:
            script.write(" ".join(BEST.split()) + "\n")
            script.flush()
            command = [_program("pgbench"), "-n", "-c1", f"-t{ceil(self._due / BATCH_SIZE) + 1}", f"-f{script.name}"]
            said = subprocess.run(
                [*command, settings.require_database()], check=True, capture_output=True, text=True
            ).stdout
        # Without the time to connect, as for the others.
        (rate,) = (line.split()[2] for line in said.splitlines() if line.startswith("tps = "))
        return (ceil(self._due / BATCH_SIZE) + 1) / float(rate)

    def _fill(self) -> None:
        if not self._made:
            database.execute_sql(MAKE.format(rows=5 * self._due))
            self._made = True
        database.execute_sql(FILL)
        database.execute_sql("vacuum analyze user_statuses")
        database.execute_sql("checkpoint")
        client.flushdb()

    def _check(self, result: dict[str, object]) -> None:
        wanted = {"deleted": self._due, "batches": ceil(self._due / BATCH_SIZE), "stopped": "drained"}
        assert result == wanted, f"{result} is not {wanted}"


def _program(name: str) -> str:
    try:
        program = find_postgres_folder() / name
    except EmbeddedError as error:
        raise Missing(str(error)) from error
    if not program.exists():
        raise Missing(f"a PostgreSQL with {name}")
    return str(program)
