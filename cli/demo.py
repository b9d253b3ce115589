"""The tour: real servers, sample data, a real scheduler and a real worker, and what they did."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

import migrations
from cli.connection import connected
from cli.console import Problem, err, facts, out, table
from cli.processes import Processes
from cli.sample import MALFORMED, REFUSED, UNKNOWN, fill
from cli.story import tell
from coordination import uploads
from models import (
    BulkImport,
    DeletedObject,
    FeatureFlag,
    GitRefDeletion,
    JobArtifact,
    JobRun,
    UserStatus,
    database,
    now,
)
from settings import PREFIX
from storage import git_sample
from storage.sentinel import NAME, Folder
from workers import BATCHES, stores
from workers.clients import client

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

NO_PAGES = dict.fromkeys(("METRICS_PORT_WORKER", "METRICS_PORT_SCHEDULER", "METRICS_PORT_EXPORTER"), "0")
"""Whatever runs on this machine already may have the usual ports."""


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
    with _environment() as folder, connected("demo", migrated=False) as settings:
        out.print("1. PostgreSQL and Redis run on sockets in a temporary folder, beside git repositories and objects.")
        migrations.migrate(database.obj)
        due = {seeded.what: seeded.due for seeded in fill(1, settings)}
        before = _counts(folder, due)
        out.print("2. There is sample data: " + ", ".join(f"{count.total:,} {what}" for what, count in before.items()))
        FeatureFlag.turn("bulk_delete_job_artifacts", on=True)
        out.print("3. A scheduler and a worker start, each a process of its own.")
        log = folder / "forgekeeper.log"
        with log.open("wb") as output, Processes({PREFIX + "LOG_FORMAT": "json"}, output=output) as running:
            running.start("scheduler")
            running.start("worker", "--processes", "1", "--threads", "8")
            _wait_until_drained(running, log)
        _report(before, _counts(folder, dict.fromkeys(due, 0)))


@contextmanager
def _environment() -> Iterator[Path]:
    """Provide servers and a store, and nothing of this machine's own settings; yield the folder."""
    from embedded import EmbeddedError, servers  # an extra that production does not have

    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    try:
        with servers() as own:
            os.chdir(own.folder)  # where there is no .env file
            store, repositories = own.folder / "objects", own.folder / "repositories"
            for folder in (store, repositories):
                folder.mkdir()
                Folder(folder).create_sentinel()
            addresses = {
                "DATABASE_URL": own.database_url,
                "REDIS_URL": own.redis_url,
                "REPOSITORIES_ROOT": str(repositories),
                "OBJECT_STORES": json.dumps({stores.ARTIFACTS: store.as_uri()}),
            }
            os.environ.update({PREFIX + name: value for name, value in (addresses | SCHEDULES | NO_PAGES).items()})
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
        "direct uploads": Count(uploads.count(client), pending),
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
    backlogs = {name: batch.backlog() for name, batch in BATCHES.items() if batch.backlog}
    backlogs["stale_direct_uploads"] = int(client.zcount(uploads.PENDING, "-inf", int(client.time()[0]) - 3 * 3600))
    return sum(backlogs.values()) + int(client.zcard(uploads.DELETING)) - len(UNKNOWN) * bool(uploads.failed(client, 1))


def _report(before: Counts, after: Counts) -> None:
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
    out.print("\n5. The story of a tick, as `forgekeeper why user_status_cleanup` tells it:\n")
    for sentence in tell(story):
        out.print(f"   {sentence}")
    expected = {
        what: Count(count.total - (0 if what == "bulk imports" else count.due), 0) for what, count in before.items()
    }
    failed, rejected = int(client.zcard(uploads.FAILED)), GitRefDeletion.rejected().count()
    if after != expected or (failed, rejected) != (len(MALFORMED), len(REFUSED)):
        found = f"{after}, {failed} failed uploads and {rejected} rejected ref deletions"
        raise Problem(f"a figure is wrong: expected {expected}, found {found}")
    out.print("\nEvery figure is as expected. Servers and data are being removed.")


def _busiest(runs: list[JobRun]) -> JobRun:
    """Return the run that did most, by the sum of its figures."""
    return max(runs, key=lambda run: sum(value for value in run.result.values() if isinstance(value, int)))


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _leave(_signal: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)
