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
from forgekeeper.batches import BATCHES
from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import Problem, err, facts, out, table
from forgekeeper.cli.processes import Processes
from forgekeeper.cli.sample import fill
from forgekeeper.cli.scraping import Compared, Figure, PageMissing, Pages, compare, free_ports
from forgekeeper.cli.story import tell
from forgekeeper.connections import client
from forgekeeper.database import database, now
from forgekeeper.flags import FeatureFlag
from forgekeeper.installation.row import Installation
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import PREFIX, Settings
from forgekeeper.storage import git_sample, stores
from forgekeeper.storage.outbox import DeletedObject
from forgekeeper.storage.sentinel import NAME, Folder
from metrics.catalogue import COLLECTORS
from models import BulkImport, GitRefDeletion, JobArtifact, UserStatus
from workers.git_ref_cleanup.sample import REFUSED
from workers.stale_direct_uploads import register
from workers.stale_direct_uploads.sample import MALFORMED, UNKNOWN

PATIENCE = 90.0
"""Seconds; on two slow cores the tour takes about fifteen."""
SCHEDULES = {
    "CRON_USER_STATUS_CLEANUP": "*/3 * * * * *",
    "CRON_GIT_REF_CLEANUP": "*/3 * * * * *",
    "CRON_STALE_IMPORTS": "*/4 * * * * *",
    "CRON_EXPIRED_JOB_ARTIFACTS": "*/3 * * * * *",
    "CRON_DELETE_OBJECTS": "*/2 * * * * *",
    "CRON_STALE_DIRECT_UPLOADS": "*/4 * * * * *",
    "CRON_PRUNE": "*/5 * * * * *",
}

PAGES = ("worker", "scheduler", "exporter")
COUNTING_PATIENCE = 15.0
"""Seconds that pages may take to show what was done; an exporter's answer is kept for three."""


class Count(NamedTuple):
    """How many there are, and how many of them are to go."""

    total: int
    due: int


Counts = dict[str, Count]


def demo() -> None:
    """Show the whole system at work, on servers and data of its own, and clean up after it.

    Exit status 0 only if every figure is as expected.
    """
    # Unwinds the contexts below, so that everything started has ended when we have.
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits none
    with _environment() as folder, connected("demo", migrated=False, interrupted_within=None) as settings:
        out.print("1. PostgreSQL and Redis run on sockets in a temporary folder, beside git repositories and objects.")
        migrations.migrate(database.obj)
        for place in ("objects", "repositories"):
            Folder(folder / place).create_sentinel(Installation.ensure())
        due = {seeded.what: seeded.due for seeded in fill(1, settings)}
        before = _counts(folder, due)
        out.print("2. There is sample data: " + ", ".join(f"{count.total:,} {what}" for what, count in before.items()))
        FeatureFlag.turn("bulk_delete_job_artifacts", on=True)
        out.print("3. A scheduler, a worker and an exporter start, each a process of its own.")
        log = folder / "forgekeeper.log"
        with log.open("wb") as output, _processes(settings, output) as running:
            running.start("scheduler")
            running.start("worker", "--processes", "1", "--threads", "8")
            running.start("exporter")
            _wait_until_drained(running, log)
            compared = _compared(before, log)
        _report(before, _counts(folder, dict.fromkeys(due, 0)), compared)


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
            }
            # Whatever runs on this machine already may have the usual ports.
            ports = {f"METRICS_PORT_{page.upper()}": str(port) for page, port in zip(PAGES, free_ports(3), strict=True)}
            os.environ.update({PREFIX + name: value for name, value in (addresses | SCHEDULES | ports).items()})
            yield own.folder
            os.chdir("/")
    except EmbeddedError as error:
        raise Problem(str(error)) from error


def _counts(folder: Path, due: dict[str, int]) -> Counts:
    """Count everything; what is due is asked of the database where it can say, and else taken from *due*."""
    instant = now()
    objects = sum(path.is_file() and path.name != NAME for path in (folder / "objects").rglob("*"))
    artifacts, pending = JobArtifact.expired(instant).count(), due["direct uploads"]
    # Of both kinds one object never arrived, and what is no upload has none.
    doomed = max(0, artifacts + pending - len(MALFORMED + UNKNOWN) - 2) + DeletedObject.due(instant).count()
    return {
        "user statuses": Count(UserStatus.select().count(), UserStatus.due(instant).count()),
        "git refs": Count(git_sample.count(folder / "repositories"), due["git refs"]),
        "bulk imports": Count(BulkImport.select().count(), BulkImport.stale(instant).count()),
        "job artifacts": Count(JobArtifact.select().count(), artifacts),
        "direct uploads": Count(register.count(client), pending),
        "objects": Count(objects, doomed),
    }


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
    """Count what is still to go: all batches' own backlogs, but of the register only what is stale."""
    backlogs = {name: due.records for name, batch in BATCHES.items() if (due := batch.due(now()))}
    backlogs["stale_direct_uploads"] = int(client.zcount(register.PENDING, "-inf", int(client.time()[0]) - 3 * 3600))
    return (
        sum(backlogs.values()) + int(client.zcard(register.DELETING)) - len(UNKNOWN) * bool(register.failed(client, 1))
    )


def _urls() -> dict[str, str]:
    """Say where the pages of metrics are."""
    return {page: f"http://127.0.0.1:{os.environ[f'{PREFIX}METRICS_PORT_{page.upper()}']}/metrics" for page in PAGES}


def _compared(before: Counts, log: Path) -> list[Compared]:
    """Hold the pages of metrics against rows, the register and the ledger."""
    try:
        return compare(_urls(), partial(_figures, before), patience=COUNTING_PATIENCE)
    except PageMissing as missing:
        raise Problem(f"the tour failed: {missing}; the log ends with:\n{_tail(log)}") from missing


def _figures(before: Counts, pages: Pages) -> Iterator[Figure]:
    """Yield what the pages have to show: what is gone of the data, what the ledger tells, what is left."""
    rows = {batch: list(JobRun.of(batch)) for batch in BATCHES}
    runs = {batch: [run for run in found if run.state == "succeeded"] for batch, found in rows.items()}
    yield from _processed(before, runs)
    for batch, found in rows.items():
        ended = sum(run.attempt - run.losses - (run.state == "started") for run in found)
        yield Figure("worker", "runs_total", {"batch": batch}, ended)
    for parent, field in (("git_ref_cleanup", "enqueued"), ("expired_job_artifacts", "children_enqueued")):
        yield Figure("worker", "children_enqueued_total", {"batch": parent}, sum(r.result[field] for r in runs[parent]))
    for metric in ("run_failures_total", "run_retries_total"):
        yield Figure("worker", metric, {}, sum(run.failures for found in rows.values() for run in found))
    yield Figure("worker", "run_dead_letters_total", {}, 0)
    for batch in BATCHES:
        # One that was sent twice, its run having ended between two looks at it, has done nothing.
        twice = Figure("worker", "runs_skipped_total", {"batch": batch, "reason": "duplicate"}, 0).shown(pages) or 0
        sent = sum(run.enqueued_at is not None or run.attempt > 0 for run in rows[batch])
        yield Figure("scheduler", "scheduler_enqueued_total", {"batch": batch}, sent + twice)
    for batch, what in (("user_status_cleanup", "user_status"), ("clean_project_refs", "git_ref_deletion")):
        yield Figure("exporter", "backlog_records", {"batch": batch, "record": what}, 0)
    yield Figure("exporter", "given_up_records", {"record": "failed_upload"}, len(MALFORMED))
    yield Figure("exporter", "given_up_records", {"record": "rejected_ref"}, len(REFUSED))
    yield Figure("exporter", "exporter_collector_success", {}, len(COLLECTORS))


def _processed(before: Counts, runs: dict[str, list[JobRun]]) -> Iterator[Figure]:
    """Yield what is gone; of an artifact the row counts once, and its object once, though one never arrived."""
    closed = GitRefDeletion.select().count() - GitRefDeletion.pending().count()
    artifacts, uploaded = before["job artifacts"].due, before["direct uploads"].due - len(MALFORMED + UNKNOWN)
    for batch, record, count in (
        ("user_status_cleanup", "user_status", before["user statuses"].due),
        ("clean_project_refs", "git_ref_deletion", before["git refs"].due),
        ("clean_project_refs", "gone_ref_deletion", closed - len(REFUSED) - before["git refs"].due),
        ("stale_direct_uploads", "stale_upload", uploaded),
        ("stale_imports", "bulk_import", before["bulk imports"].due),
        ("stale_imports", "entity", sum(run.result["entities"] for run in runs["stale_imports"])),
        ("stale_imports", "tracker", sum(run.result["trackers"] for run in runs["stale_imports"])),
        ("delete_artifact_bucket", "expired_artifact", artifacts),
        ("delete_objects", "deleted_object", artifacts),
    ):
        yield Figure("worker", "records_processed_total", {"batch": batch, "record": record}, count)
    refused = {"batch": "clean_project_refs", "record": "git_ref_deletion"}
    yield Figure("worker", "record_errors_total", refused, len(REFUSED))


def _report(before: Counts, after: Counts, compared: list[Compared]) -> None:
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
    story = _busiest(runs["user_status_cleanup"])
    _show_pages(compared)
    out.print("\n6. The story of a tick, as `forgekeeper why user_status_cleanup` tells it:\n")
    for sentence in tell(story):
        out.print(f"   {sentence}")
    expected = {
        what: Count(count.total - (0 if what == "bulk imports" else count.due), 0) for what, count in before.items()
    }
    failed, rejected = int(client.zcard(register.FAILED)), GitRefDeletion.rejected().count()
    if after != expected or (failed, rejected) != (len(MALFORMED), len(REFUSED)):
        found = f"{after}, {failed} failed uploads and {rejected} rejected ref deletions"
        raise Problem(f"a figure is wrong: expected {expected}, found {found}")
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
