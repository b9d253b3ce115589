"""The command `demo`: servers, sample data, all processes, and a check of their results.

All due records, and nothing else, must be deleted. The metrics, read as Prometheus reads them, must show the numbers.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as Series

from demo.sample import prepare_places, sample_settings
from demo.sample_data import MALFORMED_ENTRIES, REFUSED_REFS, SampleCount, add_samples, count_samples
from demo.servers import run_servers
from demo.tables import make_tables
from demo.traffic import TRAFFIC_INTERVAL_SECONDS, add_traffic
from demo.up import PROCESS_POLL_SECONDS, CommandProcesses
from forgekeeper.api.batches import BATCHES, all_declared
from forgekeeper.cli.connection import connect_command
from forgekeeper.cli.terminal import Problem, err, format_facts, out, print_table
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform import migrations
from forgekeeper.platform.database import database, now
from forgekeeper.platform.settings import PREFIX, Settings
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.targets.sentinel import SENTINEL_NAME
from metrics.catalogue import collect_label_sets

TOUR_TIMEOUT_SECONDS = 90.0
"""Time limit in seconds; on two slow cores the tour takes about fifteen."""
METRICS_TIMEOUT_SECONDS = 15.0
"""Seconds until the metrics show the work."""
TOUR_SCHEDULE = "*/3 * * * * *"
UNDELETED_RECORDS = {"bulk imports"}
"""Records that a batch changes and does not delete."""
ENDPOINT_COMMANDS = ("worker", "scheduler", "exporter")
CountsByBatch = dict[str, SampleCount]
"""Sample data by the name of its batch."""
SeriesByCommand = Mapping[str, list[Series]]
"""Series of each process's metrics endpoint, by the name of its command."""


def show_everything(*, keep: bool) -> None:
    """Implement the command `demo`; if *keep*, leave everything running until Ctrl-C."""
    from forgekeeper.cli.console.command import console_url

    # The exit unwinds the contexts below, so everything that was started ends before this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with _create_environment() as folder, connect_command("demo", migrated=False) as settings:
        out.print("1. PostgreSQL and Redis run on sockets in a temporary folder, beside git repositories and objects.")
        _prepare_sample_data(folder, settings)
        before = count_all(settings, folder)
        out.print("2. Sample data: " + ", ".join(f"{one.total:,} {one.description}" for one in before.values()))
        out.print("3. A scheduler, a worker, an exporter and a console start, each a process of its own.")
        console = console_url(settings)
        out.print(f"   The console is at {console} until {'Ctrl-C' if keep else 'everything is done'}.")
        with _start_processes(folder / "forgekeeper.log", settings) as running:
            compared = _wait_for_results(running, folder / "forgekeeper.log", before, console)
            after = count_all(settings, folder)
            print_results(before, after, compared)
            check_results(before, after, compared)
            if keep:
                _keep_running(running, settings, console)
        out.print("\nEvery figure is as expected. Servers and data are being removed.")


@contextmanager
def _create_environment() -> Iterator[Path]:
    """Run servers, set an environment without this machine's settings, and yield the folder."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    with run_servers() as own:
        os.chdir(own.folder)  # the folder has no .env file
        addresses = {
            "DATABASE_URL": own.database_url,
            "REDIS_URL": own.redis_url,
        }
        # Other processes of this machine may use the default ports.
        console, *ports = map(str, _free_ports(1 + len(ENDPOINT_COMMANDS)))
        addresses["CONSOLE_PORT"] = console
        addresses |= {f"METRICS_PORT_{page.upper()}": port for page, port in zip(ENDPOINT_COMMANDS, ports, strict=True)}
        schedules = {f"CRON_{name.upper()}": TOUR_SCHEDULE for name in BATCHES}
        os.environ.update({PREFIX + name: value for name, value in (addresses | schedules).items()})
        os.environ.update(sample_settings(own.folder, grace_seconds=0))
        yield own.folder
        os.chdir("/")


def _free_ports(count: int) -> list[int]:
    """Return ports of loopback that are free now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def _prepare_sample_data(folder: Path, settings: Settings) -> None:
    """Create tables, places and sample data; turn every batch on."""
    migrations.apply_pending(database.obj)
    make_tables(database.obj)
    prepare_places(folder)
    add_samples(1, settings)


@contextmanager
def _start_processes(log: Path, settings: Settings) -> Iterator[CommandProcesses]:
    """Run the processes."""
    with log.open("wb") as output, CommandProcesses(settings.shutdown_timeout, output) as running:
        running.start("scheduler")
        running.start("worker", "--processes", "1", "--threads", "8")
        running.start("exporter")
        running.start("console")
        yield running


def _wait_for_results(running: CommandProcesses, log: Path, before: CountsByBatch, console: str) -> ComparedValues:
    """Wait until everything is done and counted; return the comparison with the metrics."""
    ports = {page: os.environ[f"{PREFIX}METRICS_PORT_{page.upper()}"] for page in ENDPOINT_COMMANDS}
    urls = {page: f"http://127.0.0.1:{port}/metrics" for page, port in ports.items()}
    _wait_until_done(running, log)
    require_batches(console, timeout=METRICS_TIMEOUT_SECONDS)
    return compare_metrics(urls, list(list_expected_values(before)), timeout=METRICS_TIMEOUT_SECONDS)


def _keep_running(running: CommandProcesses, settings: Settings, console: str) -> None:
    """Let more records expire each minute, until Ctrl-C."""
    try:
        out.print(f"\nEvery figure is as expected. The console is at {console}; Ctrl-C ends and removes all.")
        while True:
            add_traffic(settings)
            ends = time.monotonic() + TRAFFIC_INTERVAL_SECONDS
            while time.monotonic() < ends:
                if name := running.find_ended():
                    raise Problem(f"`forgekeeper {name}` has ended, so all processes end")
                time.sleep(PROCESS_POLL_SECONDS)
    except KeyboardInterrupt:
        out.print("stopping: runs finish their chunk first")


def _wait_until_done(running: CommandProcesses, log: Path) -> None:
    """Show the number of records left, until each batch has run and none is left."""
    ends = time.monotonic() + TOUR_TIMEOUT_SECONDS
    with err.status("waiting for the first tick") as status:
        while (left := _count_backlog()) or any(JobRun.last_ended(batch) is None for batch in BATCHES):
            name = running.find_ended()
            if name or time.monotonic() > ends:
                reason = f"`forgekeeper {name}` has ended" if name else f"not done after {TOUR_TIMEOUT_SECONDS:.0f} s"
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise Problem(f"the tour failed: {reason}; {left:,} left; the log ends with:\n{tail}")
            status.update(f"{left:,} records left")
            time.sleep(0.1)


def _count_backlog() -> int:
    """Return the sum of all backlogs."""
    instant = now()
    return sum(backlog.records for batch in BATCHES.values() if (backlog := batch.sum_backlogs(instant)))


class ExpectedValue(NamedTuple):
    """An expected value: the series of *metric* with these labels add up to *expected*."""

    page: str
    metric: str
    labels: Mapping[str, str]
    expected: float

    def sum_shown(self, pages: SeriesByCommand) -> float | None:
        """Return the shown sum; None without such a series."""
        named = (one for one in pages[self.page] if one.name == f"forgekeeper_{self.metric}")
        values = [one.value for one in named if self.labels.items() <= one.labels.items()]
        return sum(values) if values else None


def list_expected_values(before: Mapping[str, SampleCount]) -> Iterator[ExpectedValue]:
    """Yield the values that the metrics must show for the sample data *before*, and no errors."""
    due = {batch: sample.due for batch, sample in before.items()}
    processed = (
        ("user_status_cleanup", "user_status", due["user_status_cleanup"]),
        ("clean_project_refs", "git_ref_deletion", due["git_ref_cleanup"]),
        ("delete_artifact_bucket", "expired_artifact", due["expired_job_artifacts"]),
        # The object that never arrived is counted, too.
        ("delete_objects", "deleted_object", due["expired_job_artifacts"]),
        ("stale_direct_uploads", "stale_upload", due["stale_direct_uploads"] - len(MALFORMED_ENTRIES)),
        ("stale_imports", "bulk_import", due["stale_imports"]),
        ("stale_imports", "entity", 2 * due["stale_imports"]),
        # Three of an entity's four trackers are unfinished.
        ("stale_imports", "tracker", 6 * due["stale_imports"]),
    )
    for batch, record, count in processed:
        yield ExpectedValue("worker", "records_processed_total", {"batch": batch, "record": record}, count)
    refs = {"batch": "clean_project_refs", "record": "git_ref_deletion"}
    yield ExpectedValue("worker", "record_errors_total", refs, len(REFUSED_REFS))
    yield ExpectedValue("exporter", "backlog_records", refs, 0)
    yield ExpectedValue("exporter", "quarantine_records", {"record": "rejected_ref"}, len(REFUSED_REFS))
    yield ExpectedValue("exporter", "quarantine_records", {"record": "failed_upload"}, len(MALFORMED_ENTRIES))
    for failed in ("run_failures_total", "run_retries_total", "run_dead_letters_total"):
        yield ExpectedValue("worker", failed, {}, 0)
    yield ExpectedValue(
        "exporter", "exporter_collector_success", {}, len(collect_label_sets(all_declared())["collectors"] or ())
    )


ComparedValues = list[tuple[ExpectedValue, float | None]]
"""Expected values, each with the shown value."""


def compare_metrics(urls: Mapping[str, str], expected: Sequence[ExpectedValue], *, timeout: float) -> ComparedValues:
    """Compare shown with expected values until they agree or *timeout* seconds have passed."""
    ends = time.monotonic() + timeout
    while True:
        pages = {name: _read_series(url) for name, url in urls.items()}
        compared = [(figure, figure.sum_shown(pages)) for figure in expected]
        if all(shown == figure.expected for figure, shown in compared) or time.monotonic() > ends:
            return compared
        time.sleep(0.1)


def _read_series(url: str) -> list[Series]:
    """Read a page; return no series if the endpoint does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310, an endpoint of our own
            text = answer.read().decode()
    except (OSError, HTTPException):
        return []
    return [series for family in text_string_to_metric_families(text) for series in family.samples]


def require_batches(console: str, *, timeout: float) -> None:
    """Raise `Problem` unless the console names every batch on its first page in time.

    *timeout* is in seconds. The console answers with status 503 while it waits for its servers.
    """
    ends = time.monotonic() + timeout
    while (text := _read_console(console, refused=time.monotonic() > ends)) is None:
        time.sleep(0.1)
    if missing := [name for name in BATCHES if name not in text]:
        raise Problem(f"the console does not show {', '.join(missing)}")


def _read_console(address: str, *, refused: bool) -> str | None:
    """Return the page; None if the console is not ready, or, if *refused*, raise `Problem`."""
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:  # noqa: S310, a console of our own
            text: str = answer.read().decode()
            return text
    except OSError as error:
        if not refused and getattr(error, "code", None) == HTTPStatus.SERVICE_UNAVAILABLE:
            return None
        raise Problem(f"the console at {address} does not answer: {error}") from None


def count_all(settings: Settings, folder: Path) -> CountsByBatch:
    """Count the sample data, and the objects below *folder*."""
    samples = count_samples(settings)
    objects = sum(path.is_file() and path.name != SENTINEL_NAME for path in (folder / "objects").rglob("*"))
    artifacts, uploads = (
        samples["expired_job_artifacts"].due,
        samples["stale_direct_uploads"].due - len(MALFORMED_ENTRIES),
    )
    # The first object of artifacts and of uploads never arrived.
    due = (
        max(0, artifacts - 1)
        + max(0, uploads - 1)
        + DeletedObject.select().where(DeletedObject.pick_up_at <= now()).count()
    )
    return samples | {"delete_objects": SampleCount("objects", objects, due)}


def print_results(before: CountsByBatch, after: CountsByBatch, compared: ComparedValues) -> None:
    """Print the data before and after, the results of the batches, and the metrics."""

    def sum_counts(run: JobRun) -> int:
        return sum(value for value in run.result.values() if isinstance(value, int))

    out.print("4. The results:\n")
    pairs = ((was, after[name]) for name, was in before.items())
    rows = ((was.description, *(f"{n:,}" for n in (was.total, was.due, left.total, left.due))) for was, left in pairs)
    print_table(("data", "before", "due", "after", "due"), rows)
    out.print()
    runs = {batch: [run for run in JobRun.select_newest_first(batch) if run.state == "succeeded"] for batch in BATCHES}
    results = (
        (batch, len(of_batch), format_facts(max(of_batch, key=sum_counts).result)) for batch, of_batch in runs.items()
    )
    print_table(("batch", "runs", "result of the busiest run"), results)
    ports = ", ".join(
        f":{Settings.model_fields[f'metrics_port_{page}'].default} ({page})" for page in ENDPOINT_COMMANDS
    )
    out.print(f"\n5. The metrics agree; other installations serve them at {ports}:\n")
    said = (
        (
            of.page,
            f"forgekeeper_{of.metric}",
            of.labels.get("record", "all"),
            f"{shown or 0:,.0f}",
            f"{of.expected:,.0f}",
        )
        for of, shown in compared
    )
    print_table(("page", "metric", "record", "shown", "expected"), said)


def check_results(before: CountsByBatch, after: CountsByBatch, compared: ComparedValues) -> None:
    """Raise `Problem` unless exactly the due records are deleted and the metrics agree."""
    expected = {
        one.description: (one.total - (0 if one.description in UNDELETED_RECORDS else one.due), 0)
        for one in before.values()
    }
    found = {one.description: (one.total, one.due) for one in after.values()}
    if found != expected:
        raise Problem(f"a figure is wrong: expected {expected}, found {found}")
    differ = [(of, shown) for of, shown in compared if shown != of.expected]
    if wrong := [f"{of.metric}({of.labels}) of the {of.page} is {shown}, not {of.expected}" for of, shown in differ]:
        raise Problem("the metrics are wrong: " + "; ".join(wrong))
