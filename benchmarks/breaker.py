"""The cost of the circuit breaker: the same run with and without its seconds."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property, partial
from time import monotonic

from pydantic import SecretStr

from benchmarks.contest import Benchmark, Peer
from demo.sample_data import add_statuses as sample
from demo.servers import Servers
from demo.tables import make_tables
from forgekeeper.api.batches import BATCHES
from forgekeeper.delivery.boot import settings_class
from forgekeeper.delivery.broker import load_batches
from forgekeeper.engine.attempt import Runner
from forgekeeper.guards import breaker
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.platform import migrations
from forgekeeper.platform.connections import ServerTimeouts, client, configure_clients, process_identity
from forgekeeper.platform.database import database, now
from forgekeeper.platform.settings import Settings
from models import UserStatus

BATCH = "user_status_cleanup"
SMALL, LARGE = 1_000, 100_000
RUNS = 100
SAMPLE = 5 / 2
"""Sample statuses per due status: two of five are due."""


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks with a small and a large backlog, *scale* times the usual ones."""
    return [_pair(servers, "breaker", round(LARGE * scale)), _pair(servers, "breaker-small", round(SMALL * scale))]


def _pair(servers: Servers, name: str, due: int) -> Benchmark:
    world = World(servers, max(2, due))
    less = Peer("less its breaker", partial(world.rate, "without"), 0.99)
    return Benchmark(name, "records/s", partial(world.rate, "with"), (less,))


class World:
    """A table with *due* records, and a batch that has always deleted that number."""

    def __init__(self, servers: Servers, due: int) -> None:
        self._servers, self._due = servers, due
        self._rates: dict[str, float] = {}

    def rate(self, which: str) -> float:
        """Return a round's rate of that kind; both kinds are measured in one run."""
        if which not in self._rates:
            self._rates = self._measured()
        return self._rates.pop(which)

    @cached_property
    def _settings(self) -> Settings:
        """Connect and create the tables, once."""
        load_batches()
        settings = settings_class()(
            database_url=SecretStr(self._servers.database_url), redis_url=SecretStr(self._servers.redis_url)
        )
        configure_clients(settings, ServerTimeouts.for_worker(settings), name="benchmark", connections=3)
        return settings

    def _measured(self) -> dict[str, float]:
        settings = self._settings
        with database.connection_context():
            client.flushdb()
            migrations.apply_pending(database.obj)
            make_tables(database.obj)
            sample(round(self._due * SAMPLE))
            self._due = UserStatus.select().where(UserStatus.clear_status_at <= now()).count()
            self._live()
            instant = now()  # the run also needs this
            began = monotonic()
            breaker.check_run(BATCHES[BATCH], settings, 0, instant)
            asked = monotonic() - began
            began = monotonic()
            self._run(settings)
            whole = monotonic() - began
        return {"with": self._due / whole, "without": self._due / (whole - asked)}

    def _live(self) -> None:
        """Insert a hundred earlier runs, a minute apart, that deleted the same number."""
        ago = [now() - (RUNS - number) * timedelta(minutes=1) for number in range(RUNS)]
        facts = {"batch": BATCH, "state": "succeeded", "ordinary": True}
        JobRun.insert_many([facts | {"started_at": at, "finished_at": at} for at in ago]).execute()
        runs = list(JobRun.select_newest_first(BATCH).limit(RUNS))
        RunTotal.insert_many(
            {"batch": BATCH, "run": run.id, "day": run.started_at.date(), "records": self._due} for run in runs
        ).execute()

    def _run(self, settings: Settings) -> None:
        started = JobRun.start_here(BATCH, by=process_identity())
        assert started is not None
        runner = Runner(settings, lambda *_sent: None)  # type: ignore[arg-type]  # it has no children
        with runner.create_attempt(BATCHES[BATCH], started) as attempt:
            attempt.work_if_allowed()
        runner.stop()
        assert attempt.result_fields()["deleted"] == self._due, attempt.result_fields()
