"""The tour: real servers, sample data, a real scheduler and a real worker, and what they did."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple, NoReturn

from forgekeeper import migrations
from forgekeeper.batches import BATCHES, CHILDREN, all_declared
from forgekeeper.brought import Figure, Sample
from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import Problem, err, facts, out, table
from forgekeeper.cli.processes import Processes
from forgekeeper.cli.sample import fill
from forgekeeper.cli.scraping import Compared, PageMissing, Pages, compare, free_ports
from forgekeeper.cli.story import tell
from forgekeeper.database import database, now
from forgekeeper.flags import FeatureFlag
from forgekeeper.installation.row import Installation
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import PREFIX, Settings
from forgekeeper.storage import stores
from forgekeeper.storage.outbox import DeletedObject
from forgekeeper.storage.sentinel import NAME, Folder
from metrics.catalogue.labels import Labels

PATIENCE = 90.0
"""Seconds; on two slow cores the tour takes about fifteen."""
SCHEDULE = "*/3 * * * * *"

PAGES = ("worker", "scheduler", "exporter")
COUNTING_PATIENCE = 15.0
"""Seconds that pages may take to show what was done; an exporter's answer is kept for three."""


class Count(NamedTuple):
    """How many there are, and how many of them are to go."""

    total: int
    due: int


Counts = dict[str, Count]
Found = dict[str, Sample]
"""What there was of each batch that has sample data, by its name."""


def demo() -> None:
    """Show the whole system at work, on servers and data of its own, and clean up after it.

    Exit status 0 only if every figure is as expected.
    """
    # Unwinds the contexts below, so that everything started has ended when we have.
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits none
    with _environment() as folder, connected("demo", migrated=False) as settings:
        out.print("1. PostgreSQL and Redis run on sockets in a temporary folder, beside git repositories and objects.")
        migrations.migrate(database.obj)
        for place in ("objects", "repositories"):
            Folder(folder / place).create_sentinel(Installation.ensure())
        fill(1, settings)
        found = _found(settings)
        before = _counts(folder, found)
        out.print("2. There is sample data: " + ", ".join(f"{count.total:,} {what}" for what, count in before.items()))
        for batch in BATCHES.values():
            if batch.flag is not None:
                FeatureFlag.turn(batch.flag, on=True)
        out.print("3. A scheduler, a worker and an exporter start, each a process of its own.")
        log = folder / "forgekeeper.log"
        with log.open("wb") as output, _processes(settings, output) as running:
            running.start("scheduler")
            running.start("worker", "--processes", "1", "--threads", "8")
            running.start("exporter")
            _wait_until_drained(running, log)
            compared = _compared(found, log)
        _report(found, before, _counts(folder, _found(settings)), compared)


def _processes(settings: Settings, output: IO[bytes]) -> Processes:
    return Processes({PREFIX + "LOG_FORMAT": "json"}, shutdown_timeout=settings.shutdown_timeout, output=output)


@contextmanager
def _environment() -> Iterator[Path]:
    """Provide servers and a store, and nothing of this machine's own settings; yield the folder."""
    from forgekeeper.embedded import EmbeddedError, servers

    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    try:
        with servers() as own:
            os.chdir(own.folder)  # where there is no .env file
            store, repositories = own.folder / "objects", own.folder / "repositories"
            for folder in (store, repositories):
                folder.mkdir()
            addresses = {
                "DATABASE_URL": own.database_url,
                "REDIS_URL": own.redis_url,
                "REPOSITORIES_ROOT": str(repositories),
                "OBJECT_STORES": json.dumps({stores.ARTIFACTS: store.as_uri()}),
                "OBJECT_GRACE": "0",
                "BREAKER_SHARE": "1",  # nothing here has a history to be weighed by, and two fifths of it are due
            }
            # Whatever runs on this machine already may have the usual ports.
            ports = {f"METRICS_PORT_{page.upper()}": str(port) for page, port in zip(PAGES, free_ports(3), strict=True)}
            schedules = {f"CRON_{name.upper()}": SCHEDULE for name in BATCHES}
            os.environ.update({PREFIX + name: value for name, value in (addresses | schedules | ports).items()})
            yield own.folder
            os.chdir("/")
    except EmbeddedError as error:
        raise Problem(str(error)) from error


def _found(settings: Settings) -> Found:
    """Ask each batch that has sample data what there is of it."""
    return {name: count(settings) for name, batch in BATCHES.items() for count in batch.counts}


def _counts(folder: Path, found: Found) -> Counts:
    """Count everything, objects too."""
    objects = sum(path.is_file() and path.name != NAME for path in (folder / "objects").rglob("*"))
    doomed = sum(sample.objects for sample in found.values()) + DeletedObject.due(now()).count()
    counts = {sample.what: Count(sample.total, sample.due) for sample in found.values()}
    return counts | {"objects": Count(objects, doomed)}


def _wait_until_drained(running: Processes, log: Path) -> None:
    """Show how what is due dwindles, until every batch has had a run and nothing is left."""
    ends = time.monotonic() + PATIENCE
    with err.status("waiting for the first tick") as status:
        while (left := _left()) or any(JobRun.last_ended(batch) is None for batch in BATCHES):
            if time.monotonic() > ends or (name := running.ended()):
                reason = f"`forgekeeper {name}` has ended" if name else f"not done after {PATIENCE:.0f} s"
                raise Problem(f"the tour failed: {reason}; {left:,} left; the log ends with:\n{_tail(log)}")
            status.update(f"{left:,} left to do")
            time.sleep(0.1)


def _left() -> int:
    """Count what is still to go: all batches' own backlogs, unless they say otherwise."""
    instant = now()
    due = (batch.due(instant) for batch in BATCHES.values() if not batch.leftovers)
    left = sum(count() for batch in BATCHES.values() for count in batch.leftovers)
    return left + sum(backlog.records for backlog in due if backlog)


def _urls() -> dict[str, str]:
    """Say where the pages of metrics are."""
    return {page: f"http://127.0.0.1:{os.environ[f'{PREFIX}METRICS_PORT_{page.upper()}']}/metrics" for page in PAGES}


def _compared(found: Found, log: Path) -> list[Compared]:
    """Hold the pages of metrics against rows, the register and the ledger."""
    try:
        return compare(_urls(), partial(_figures, found), patience=COUNTING_PATIENCE)
    except PageMissing as missing:
        raise Problem(f"the tour failed: {missing}; the log ends with:\n{_tail(log)}") from missing


def _figures(found: Found, pages: Pages) -> Iterator[Figure]:
    """Yield what the pages have to show: what is gone of the data, what the ledger tells, what is left."""
    rows = {batch: list(JobRun.of(batch)) for batch in BATCHES}
    results = {batch: [run.result for run in runs if run.state == "succeeded"] for batch, runs in rows.items()}
    for name, batch in BATCHES.items():
        for prove in batch.proofs:
            yield from prove(found[name], results[name])
    for name, runs in rows.items():
        ended = sum(run.attempt - run.losses - (run.state == "started") for run in runs)
        yield Figure("worker", "runs_total", {"batch": name}, ended)
    for child in CHILDREN.values():
        sent = sum(result[child.enqueued_as] for result in results[child.of.name])
        yield Figure("worker", "children_enqueued_total", {"batch": child.of.name}, sent)
    for metric in ("run_failures_total", "run_retries_total"):
        yield Figure("worker", metric, {}, sum(run.failures for runs in rows.values() for run in runs))
    yield Figure("worker", "run_dead_letters_total", {}, 0)
    for name, runs in rows.items():
        # One that was sent twice, its run having ended between two looks at it, has done nothing.
        twice = Figure("worker", "runs_skipped_total", {"batch": name, "reason": "duplicate"}, 0).shown(pages) or 0
        begun = sum(run.enqueued_at is not None or run.attempt > 0 for run in runs)
        yield Figure("scheduler", "scheduler_enqueued_total", {"batch": name}, begun + twice)
    yield Figure("exporter", "exporter_collector_success", {}, len(Labels(all_declared()).collectors))


def _report(found: Found, before: Counts, after: Counts, compared: list[Compared]) -> None:
    out.print("4. This is what they did:\n")
    columns = ("what", "there were", "to go", "are left", "to go")
    rows = [(what, *(f"{n:,}" for n in (*before[what], *after[what]))) for what in before]
    table("", columns, rows)
    out.print()
    runs = {batch: [run for run in JobRun.of(batch) if run.state == "succeeded"] for batch in BATCHES}
    table(
        "",
        ("batch", "runs", "the busiest one's result"),
        [(b, len(r), facts(_busiest(r).result)) for b, r in runs.items()],
    )
    told = next(iter(BATCHES))
    _show_pages(compared)
    out.print(f"\n6. The story of a tick, as `forgekeeper why {told}` tells it:\n")
    for sentence in tell(_busiest(runs[told])):
        out.print(f"   {sentence}")
    staying = {sample.what for sample in found.values() if sample.stay}
    expected = {what: Count(count.total - (0 if what in staying else count.due), 0) for what, count in before.items()}
    if after != expected:
        raise Problem(f"a figure is wrong: expected {expected}, found {after}")
    if wrong := [one for one in compared if not one.agrees]:
        raise Problem("a page of metrics is wrong: " + "; ".join(map(_difference, wrong)))
    out.print("\nEvery figure is as expected. Servers and data are being removed.")


def _show_pages(compared: list[Compared]) -> None:
    """Show where the pages are and what they say; the figures of one record or kind each, those of batches added up."""
    out.print("\n5. Their pages of metrics say the same; elsewhere they are at " + _usual_places() + ":\n")
    rows: list[tuple[str, ...]] = []
    for (page, metric, of), group in groupby(compared, key=lambda one: (*one.figure[:2], _of(one.figure))):
        ones = list(group)
        shown, done = sum(one.shown or 0 for one in ones), sum(one.figure.done for one in ones)
        rows.append((page, f"forgekeeper_{metric}", of, f"{shown:,.0f}", f"{done:,.0f}"))
    table("", ("page", "metric", "of", "it says", "was done"), rows)


def _of(figure: Figure) -> str:
    return figure.labels.get("record") or ("all batches" if "batch" in figure.labels else "all")


def _usual_places() -> str:
    ports = [Settings.model_fields[f"metrics_port_{page}"].default for page in PAGES]
    return ", ".join(f":{port} ({page})" for page, port in zip(PAGES, ports, strict=True))


def _difference(one: Compared) -> str:
    labels = ", ".join(f"{name}={value}" for name, value in one.figure.labels.items())
    return f"{one.figure.metric}({labels}) of the {one.figure.page} is {one.shown}, not {one.figure.done}"


def _busiest(runs: list[JobRun]) -> JobRun:
    """Return the run that did most, by the sum of its figures."""
    return max(runs, key=lambda run: sum(value for value in run.result.values() if isinstance(value, int)))


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _leave(_signal: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)
