"""The command `demo`: real servers, sample data, a scheduler, a worker and an exporter, and what they did."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from demo import report
from demo.sample_data import add_samples
from demo.servers import servers
from demo.tables import make_tables
from demo.up import Processes
from forgekeeper import migrations
from forgekeeper.batches import BATCHES, FeatureFlag
from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import Problem, err, out
from forgekeeper.database import database, now
from forgekeeper.installation import Installation
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import PREFIX, Settings
from forgekeeper.storage.outbox import DeletedObject
from forgekeeper.storage.sentinel import Folder

TIMEOUT = 90.0
"""Seconds; on two slow cores the tour takes about fifteen."""
COUNTED_WITHIN = 15.0
"""Seconds until metrics show what was done."""
SCHEDULE = "*/3 * * * * *"


def demo() -> None:
    """Show the whole system at work, on servers and data of its own, and clean up after it.

    Exit status 0 only if every figure is as expected.
    """
    # Unwinds the contexts below, so that everything that was started has ended when we have.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with _environment() as folder, connected("demo", migrated=False) as settings:
        out.print("1. PostgreSQL and Redis run on sockets in a temporary folder, beside git repositories and objects.")
        _prepare(folder, settings)
        before = report.count_all(settings, folder)
        out.print("2. There is sample data: " + ", ".join(f"{one.total:,} {one.what}" for one in before.values()))
        out.print("3. A scheduler, a worker and an exporter start, each a process of its own.")
        compared = _work(folder / "forgekeeper.log", settings, before)
        after = report.count_all(settings, folder)
        report.show(before, after, compared)
        report.check(before, after, compared)
        out.print("\nEvery figure is as expected. Servers and data are being removed.")


@contextmanager
def _environment() -> Iterator[Path]:
    """Run servers, and make an environment that leads to them and has no setting of this machine; yield the folder."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    with servers() as own:
        os.chdir(own.folder)  # where there is no .env file
        addresses = {
            "DATABASE_URL": own.database_url,
            "REDIS_URL": own.redis_url,
            "REPOSITORIES_ROOT": str(own.folder / "repositories"),
            "OBJECT_STORES": json.dumps({DeletedObject.location: (own.folder / "objects").as_uri()}),
            "OBJECT_GRACE": "0",
            "BREAKER_SHARE": "1",  # there is no history yet, and two fifths of everything is due
        }
        # Other processes of this machine may have the usual ports.
        ports = zip(report.PAGES, _free_ports(len(report.PAGES)), strict=True)
        addresses |= {f"METRICS_PORT_{page.upper()}": str(port) for page, port in ports}
        schedules = {f"CRON_{name.upper()}": SCHEDULE for name in BATCHES}
        os.environ.update({PREFIX + name: value for name, value in (addresses | schedules).items()})
        yield own.folder
        os.chdir("/")


def _free_ports(count: int) -> list[int]:
    """Return ports of loopback that are free now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def _prepare(folder: Path, settings: Settings) -> None:
    """Make tables, a store, a root of repositories, and sample data; turn every batch on."""
    migrations.migrate(database.obj)
    make_tables(database.obj)
    for place in ("objects", "repositories"):
        (folder / place).mkdir()
        Folder(folder / place).create_sentinel(Installation.ensure())
    add_samples(1, settings)
    for batch in BATCHES.values():
        if batch.flag is not None:
            FeatureFlag.turn(batch.flag, on=True)


def _work(log: Path, settings: Settings, before: report.Counts) -> report.Compared:
    """Run the processes until everything is done and counted; return what their metrics show of it."""
    ports = {page: os.environ[f"{PREFIX}METRICS_PORT_{page.upper()}"] for page in report.PAGES}
    urls = {page: f"http://127.0.0.1:{port}/metrics" for page, port in ports.items()}
    timeout, environment = settings.shutdown_timeout, {PREFIX + "LOG_FORMAT": "json"}
    with log.open("wb") as output, Processes(environment, shutdown_timeout=timeout, output=output) as running:
        running.start("scheduler")
        running.start("worker", "--processes", "1", "--threads", "8")
        running.start("exporter")
        _wait_until_done(running, log)
        return report.compare(urls, list(report.figures(before)), timeout=COUNTED_WITHIN)


def _wait_until_done(running: Processes, log: Path) -> None:
    """Show how much is left, until every batch has had a run and nothing is."""
    ends = time.monotonic() + TIMEOUT
    with err.status("waiting for the first tick") as status:
        while (left := _left()) or any(JobRun.last_ended(batch) is None for batch in BATCHES):
            name = running.ended()
            if name or time.monotonic() > ends:
                reason = f"`forgekeeper {name}` has ended" if name else f"not done after {TIMEOUT:.0f} s"
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise Problem(f"the tour failed: {reason}; {left:,} left; the log ends with:\n{tail}")
            status.update(f"{left:,} left to do")
            time.sleep(0.1)


def _left() -> int:
    """Add up what is still to be done."""
    instant = now()
    return sum(backlog.records for batch in BATCHES.values() if (backlog := batch.due(instant)))
