"""Processes and heartbeats: each scheduler, worker and `forgekeeper run` has one row.

A run belongs to the process that started it; the heartbeat of that process keeps both rows alive.  If heartbeats are
missing for `dead_after`, the first process that notices reopens the runs.  The next run of a batch sends its children.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from importlib import metadata
from typing import Annotated, Any, NotRequired

import peewee as pw
import structlog
from playhouse.pool import MaxConnectionsExceeded
from playhouse.postgres_ext import DateTimeTZField
from psycopg2.extras import Json
from pydantic import Field
from typing_extensions import TypedDict

from forgekeeper.ledger.job_runs import JobRun, StartedRun
from forgekeeper.platform import migrations
from forgekeeper.platform.database import Base, BigIdentityField, Document, database, default_sql, release_connection
from metrics.logs import describe_error
from metrics.threads import CriticalThread

ROW_DELETION_TIMEOUT_SECONDS = 2.0
"""Maximum seconds that a process waits at its end for the deletion of its row; a row that stays expires."""

# The row is read as JSON, because tables of the first versions lack the column `migration`.
SELECT_OLDER_PROCESSES = """
    select format('%%s %%s:%%s (version %%s)', kind, host, pid, version) from processes
    where silent_from > clock_timestamp() and coalesce(to_jsonb(processes) ->> 'migration', '') < %s
    order by kind, host, pid
"""
# As text: peewee takes longer to write this statement than PostgreSQL to execute it, and every process sends it often.
UPDATE_HEARTBEAT = """
    update processes set alive_at = clock_timestamp(), silent_from = clock_timestamp() + %(dead_after)s{facts}
    where id = %(id)s
"""

log = structlog.get_logger(__name__)


class LostRun(Exception):
    """Another process may have the run: this process's heartbeat was missing for too long."""


class WatchedRun:
    """The row of a started run.

    It is lost if a heartbeat finds it taken or none succeeds for *dead_after*.  *so_far* returns the run's result so
    far.
    """

    def __init__(self, started: StartedRun, so_far: Callable[[], dict[str, Any]], *, dead_after: timedelta) -> None:
        self.started = started
        self.so_far = so_far
        self._dead_after = dead_after.total_seconds()
        self._alive = time.monotonic()
        self._taken = False

    def note_heartbeat(self, *, ours: bool) -> None:
        """Record the finding of a heartbeat: whether the run is still *ours*."""
        self._alive = time.monotonic()
        self._taken = self._taken or not ours

    def require_ours(self) -> None:
        """Raise `LostRun` if the run was taken from this process, or may have been."""
        if self._taken or time.monotonic() - self._alive > self._dead_after:
            run = self.started
            raise LostRun(
                f"attempt {run.attempt} has lost run {run.id} of {run.batch}: its heartbeat was missing for too long"
            )


class MessageInProgress(TypedDict):
    """A message that a process has worked on for some *seconds*."""

    what: str
    message_id: str
    run: NotRequired[int | None]
    seconds: Annotated[float, Field(ge=0, lt=1e9)]


class Process(Base):
    """A process; it expires at `silent_from`.

    `migration` is the newest that its version knows.
    """

    grants = "scheduler: select, insert, update, delete; worker: select, insert, update, delete"

    id = BigIdentityField()
    kind = pw.TextField()
    host = pw.TextField()
    pid = pw.IntegerField()
    version = pw.TextField()
    migration = pw.TextField(null=True)
    started_at = DateTimeTZField(constraints=default_sql("clock_timestamp()"))
    alive_at = DateTimeTZField()
    silent_from = DateTimeTZField()
    draining = pw.BooleanField(constraints=default_sql("false"))
    queues = Document(list[str], null=True)
    timetable = Document(dict[str, str], null=True)
    at_work = Document(list[MessageInProgress], null=True)

    class Meta:
        table_name = "processes"

    @property
    def name(self) -> str:
        """The process's name in the ledger and the logs."""
        return f"{self.host}:{self.pid}"

    def is_silent(self, instant: datetime) -> bool:
        """Return whether the process has expired at *instant*."""
        return bool(self.silent_from <= instant)

    @classmethod
    def list_all(cls) -> list[Process]:
        """Return all processes without an orderly end: living and expired processes."""
        return list(cls.select().order_by(cls.kind, cls.host, cls.pid, cls.id))

    @classmethod
    def find_older(cls, migration: str) -> list[str]:
        """Name the living processes that do not know the *migration*, with their versions.

        Works on the table of every version that has it.
        """
        return [name for (name,) in database.execute_sql(SELECT_OLDER_PROCESSES, (migration,)).fetchall()]

    @classmethod
    def record_heartbeat(
        cls, entry: Process | None, *, dead_after: timedelta, facts: dict[str, Any], **identity: Any
    ) -> Process:
        """Send a heartbeat; insert a row if the process has none, with its first start time.

        Deletes an older row with the same name, as process ids are reused.  If that process still lives, as with two
        containers that share a host's name, its next heartbeat inserts its row again, and both rows stay.
        """
        if entry is not None:
            values = {name: Json(value) if isinstance(value, (dict, list)) else value for name, value in facts.items()}
            statement = UPDATE_HEARTBEAT.format(facts="".join(f", {name} = %({name})s" for name in facts))
            if database.execute_sql(statement, values | {"dead_after": dead_after, "id": entry.id}).rowcount:
                return entry
        instant = pw.fn.clock_timestamp()
        facts = {"alive_at": instant, "silent_from": instant + dead_after} | facts
        # A later insertion follows a pruning while this process was frozen, or a restore of a backup without the row.
        started = instant if entry is None else entry.started_at
        same = [getattr(cls, name) == identity[name] for name in ("kind", "host", "pid")]
        cls.delete().where(*same, cls.started_at < started).execute()
        row = cls.insert(identity | facts | {"started_at": started})
        entered: Process = next(iter(row.returning(cls.id, cls.started_at).execute()))
        return entered


class Heartbeat(CriticalThread):
    """The thread that sends three heartbeats in *dead_after* for the process and its runs.

    *facts* returns further columns of its row.  If the database is down, heartbeats fail and the thread continues.
    """

    def __init__(
        self,
        kind: str,
        *,
        dead_after: timedelta,
        facts: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        super().__init__("heartbeat")
        self._identity = {"kind": kind, "host": socket.gethostname(), "pid": os.getpid(), "version": read_version()}
        self._identity["migration"] = migrations.find_newest()
        self._dead_after = dead_after
        self._interval = dead_after.total_seconds() / 3
        self._facts = facts
        self._entry: Process | None = None
        self._watched: dict[int, WatchedRun] = {}
        self._woken = threading.Event()

    def watch(self, row: WatchedRun) -> None:
        """Keep the row alive from now on; an earlier attempt of ours at the same run is lost."""
        earlier = self._watched.get(row.started.id)
        self._watched[row.started.id] = row
        if earlier is not None:
            earlier.note_heartbeat(ours=False)

    def stop_watching(self, row: WatchedRun) -> None:
        """Stop keeping the row alive; it is closed or lost."""
        if self._watched.get(row.started.id) is row:
            del self._watched[row.started.id]

    def send_now(self) -> None:
        """Send the next heartbeat now."""
        self._woken.set()

    def stop(self, *, within: float = ROW_DELETION_TIMEOUT_SECONDS) -> None:
        """End the thread and delete the row; runs that are still open count as lost."""
        self.stopped.set()
        self._woken.set()
        if self.is_alive():
            self.join(min(within, ROW_DELETION_TIMEOUT_SECONDS))

    def run_until_stopped(self) -> None:
        """Send heartbeats until stopped, sooner after a failure.

        A process expires with its third missing heartbeat.
        """
        while not self.stopped.is_set():
            well = self.take_turn(self._send_heartbeats)
            self._woken.wait(self._interval if well else self._interval / 3)
            self._woken.clear()
        if self._entry is not None:
            self._try_with_connection(Process.delete().where(Process.id == self._entry.id).execute)

    def _send_heartbeats(self) -> None:
        if self._watched:
            self._try_with_connection(self._keep_runs_alive)
        self._try_with_connection(self._keep_alive)

    def _keep_runs_alive(self) -> None:
        rows = list(self._watched.values())
        alive = JobRun.keep_alive([row.started for row in rows], [row.so_far() for row in rows])
        for row in rows:
            row.note_heartbeat(ours=row.started.id in alive)

    def _keep_alive(self) -> None:
        facts = self._facts()
        self._entry = Process.record_heartbeat(self._entry, dead_after=self._dead_after, facts=facts, **self._identity)

    def _try_with_connection(self, change: Callable[[], object]) -> None:
        try:
            database.connect(reuse_if_open=True)
            change()
        except (pw.PeeweeException, MaxConnectionsExceeded) as error:
            log.warning("heartbeat failed", error=describe_error(error))
        finally:
            release_connection()


def read_version() -> str:
    """Return the version of forgekeeper that runs here."""
    try:
        return metadata.version("forgekeeper")
    except metadata.PackageNotFoundError:
        return "source"  # a checkout that is not installed
