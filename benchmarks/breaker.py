"""What the breaker takes of a run: the same run, with the seconds that its breaker took, and without them."""

from __future__ import annotations

from functools import cached_property, partial
from time import monotonic

from pydantic import SecretStr

from benchmarks.pairing import Pair
from forgekeeper import migrations
from forgekeeper.batches import BATCHES
from forgekeeper.boot import model
from forgekeeper.connections import Limits, client, connect
from forgekeeper.database import database, now
from forgekeeper.embedded import Servers
from forgekeeper.identity import identity
from forgekeeper.process.boot import load_batches
from forgekeeper.runs import breaker
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.runner import Runner
from forgekeeper.settings import Settings

BATCH = "user_status_cleanup"
KEPT = 500_000
SMALL, LARGE = 1_000, 100_000
ROWS = """
    insert into user_statuses (user_id, clear_status_at)
    select first + n, clock_timestamp() + case when n < %(due)s then interval '-1 s' else interval '1 day' end
    from (select coalesce(max(user_id), 0) + 1 as first from user_statuses) as present,
        generate_series(0, %(total)s - 1) as n
"""
# A hundred runs that deleted as much.
HISTORY = """
    with runs as (
        insert into job_runs (batch, state, started_at, finished_at, ordinary)
        select %(batch)s, 'succeeded', at, at, true from generate_series(
            clock_timestamp() - interval '100 min', clock_timestamp() - interval '1 min', interval '1 min') as at
        returning id, started_at
    )
    insert into run_totals (batch, run, day, records) select %(batch)s, id, started_at::date, %(due)s from runs
"""


def pairs(servers: Servers, scale: float) -> list[Pair]:
    """Return what is measured of runs with a small and with a large backlog, *scale* times as much as usual."""
    return [
        pair
        for name, due in (("breaker", LARGE), ("breaker-small", SMALL))
        for world in (World(servers, max(1, round(due * scale)), round(KEPT * scale)),)
        for pair in (
            Pair(
                name, "records", partial(world.rate, "with"), partial(world.rate, "without"), "less its breaker", 0.99
            ),
        )
    ]


class World:
    """A table with so many records that are due, of a batch that has always deleted as many."""

    def __init__(self, servers: Servers, due: int, kept: int) -> None:
        self._servers, self._due, self._kept = servers, due, kept
        self._rates: dict[str, float] = {}

    def rate(self, which: str) -> float:
        """Return a round's rate of that kind; both are of one run."""
        if which not in self._rates:
            self._rates = self._measured()
        return self._rates.pop(which)

    @cached_property
    def _settings(self) -> Settings:
        """Connect, and make the tables; done once."""
        load_batches()
        settings = model()(
            database_url=SecretStr(self._servers.database_url), redis_url=SecretStr(self._servers.redis_url)
        )
        connect(settings, Limits.of_worker(settings), name="benchmark", connections=3)
        return settings

    def _measured(self) -> dict[str, float]:
        settings = self._settings
        with database.connection_context():
            client.flushdb()
            migrations.migrate(database.obj)
            migrations.migrate(database.obj, "example")
            database.execute_sql("truncate user_statuses, job_runs, run_totals, batches")
            database.execute_sql(ROWS, {"due": self._due, "total": self._due + self._kept})
            database.execute_sql(HISTORY, {"batch": BATCH, "due": self._due})
            database.execute_sql("vacuum analyze")
            instant = now()  # which the run asks for in any case
            began = monotonic()
            breaker.ask(BATCHES[BATCH], settings, 0, instant, room=None)
            asked = monotonic() - began
            began = monotonic()
            self._run(settings)
            whole = monotonic() - began
        return {"with": self._due / whole, "without": self._due / (whole - asked)}

    def _run(self, settings: Settings) -> None:
        started = JobRun.start_here(BATCH, by=identity())
        assert started is not None
        runner = Runner(settings, lambda *_sent: None)  # type: ignore[arg-type]  # it has no children
        with runner.attempt(BATCHES[BATCH], started) as attempt:
            attempt.work()
        runner.stop()
        assert attempt.result()["deleted"] == self._due, attempt.result()
