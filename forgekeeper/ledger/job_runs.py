"""The ledger: every tick of a batch and every manual run, each in exactly one state.

A batch's open row (claimed, enqueued or started) is its lock.  A change of state is one guarded update.  A second
update changes nothing, and its return value says so.  All times are the database's, so a machine with a wrong clock
claims nothing early and repeats nothing.  `docs/architecture/README.md` draws the states.

A restored database assigns the numbers of its lost runs again.  So each run has a token, which its message carries, and
each attempt has another token, which all its changes repeat.  Messages and attempts of lost runs then change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import orjson
import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.ledger import transitions
from forgekeeper.ledger.holds import Batch, Hold, Kind
from forgekeeper.ledger.retry_delays import MAX_LOSSES, MAX_RETRIES
from forgekeeper.platform.database import Base, BigIdentityField, Document, database, default_sql

UNSTARTED_STATES = ("claimed", "enqueued")
OPEN_STATES = (*UNSTARTED_STATES, "started")
CLOCK_TOLERANCE = timedelta(seconds=2)
"""How far a scheduler's clock may be ahead before its tick is refused."""


class RunHealth(NamedTuple):
    """A summary of the batch's runs; *failures* are the failures since its last success."""

    last_run: datetime | None
    duration: timedelta | None
    last_success: datetime | None
    failures: int
    running_since: datetime | None


class StartedRun(NamedTuple):
    """A started run, ours until this process expires; *token* is the token of this attempt."""

    id: int
    batch: str
    token: str
    attempt: int
    failures: int
    tick: datetime | None


class JobRun(Base):
    """One tick of a batch, or one manual run (without a tick)."""

    grants = "scheduler: select, insert, update; worker: select, update, delete; exporter: select"

    id = BigIdentityField()
    batch = pw.TextField()
    tick = DateTimeTZField(null=True)
    state = pw.TextField()
    token = pw.UUIDField(constraints=default_sql("gen_random_uuid()"))
    attempt_token = pw.UUIDField(null=True)
    reason = pw.TextField(null=True)
    attempt = pw.IntegerField(constraints=default_sql("0"))
    failures = pw.IntegerField(constraints=default_sql("0"))
    losses = pw.IntegerField(constraints=default_sql("0"))
    retry_at = DateTimeTZField(null=True)
    claimed_by = pw.TextField(null=True)
    claimed_at = DateTimeTZField(null=True)
    enqueued_at = DateTimeTZField(null=True)
    started_by = pw.TextField(null=True)
    started_at = DateTimeTZField(null=True)
    alive_at = DateTimeTZField(null=True)
    finished_at = DateTimeTZField(null=True)
    result = Document(dict[str, Any], null=True)
    error = pw.TextField(null=True)
    cancelled_at = DateTimeTZField(null=True)
    cancelled_reason = pw.TextField(null=True)
    cancelled_by = pw.TextField(null=True)
    ordinary = pw.BooleanField(null=True)

    class Meta:
        table_name = "job_runs"

    @classmethod
    def select_newest_first(cls, batch: str) -> pw.ModelSelect[JobRun]:
        """Select the batch's rows, newest first."""
        return cls.select().where(cls.batch == batch).order_by(cls.id.desc())

    @classmethod
    def find_open(cls, batch: str) -> JobRun | None:
        """Return the batch's open row, its lock."""
        row: JobRun | None = cls.select_newest_first(batch).where(cls.state.in_(OPEN_STATES)).first()
        return row

    @classmethod
    def find_by_tick(cls, batch: str, tick: datetime) -> JobRun | None:
        """Return the tick's row, or else the newest row whose tick was set aside as not yet due."""
        taken = cls.tick.is_null() & pw.SQL("(result ->> 'set_aside')::timestamptz = %s", (tick,))
        rows = cls.select().where(cls.batch == batch, (cls.tick == tick) | taken)
        row: JobRun | None = rows.order_by(cls.tick.is_null(), cls.id.desc()).first()
        return row

    @classmethod
    def last_ended(cls, batch: str) -> JobRun | None:
        """Return the newest run of the batch that was started and has ended."""
        row: JobRun | None = (
            cls.select_newest_first(batch).where(cls.started_at.is_null(False), cls.finished_at.is_null(False)).first()
        )
        return row

    @classmethod
    def read_health(cls, batch: str) -> RunHealth:
        """Summarise the batch's runs."""
        return RunHealth(*database.execute_sql(transitions.SELECT_HEALTH, {"batch": batch}).fetchone())

    @classmethod
    def newest_tick(cls, batch: str) -> datetime | None:
        """Return the newest tick with a row whose time has arrived."""
        come = cls.tick <= pw.fn.clock_timestamp() + CLOCK_TOLERANCE
        tick: datetime | None = cls.select(pw.fn.max(cls.tick)).where(cls.batch == batch, come).scalar()
        return tick

    @classmethod
    def claim(cls, batch: str, tick: datetime, *, by: str, reason: str | None) -> int | None:
        """Claim the tick if it is due and the batch has no hold and no open run.

        Returns the row's id.  The newer tick supersedes a retry that still waits, of an older tick or a manual run,
        because it does the same work.  Of several schedulers one gets the id, the others None.
        """
        with database.atomic() as transaction:
            ahead = cls.tick > pw.fn.clock_timestamp() + CLOCK_TOLERANCE
            gives_way = cls.tick.is_null() | (cls.tick < tick) | ahead
            waits = (cls.batch == batch) & (cls.state == "enqueued") & (cls.failures > 0)
            superseded = {"state": "failed", "reason": "superseded", "finished_at": pw.fn.clock_timestamp()}
            cls.update(superseded).where(waits, gives_way).execute()
            values = {"batch": batch, "tick": tick, "by": by, "reason": reason, "tolerance": CLOCK_TOLERANCE}
            row = database.execute_sql(transitions.INSERT_CLAIM, values).fetchone()
            if row is None:
                # Another scheduler's tick, a hold or an open run: the retry is not superseded.
                transaction.rollback()
        return row[0] if row else None

    @classmethod
    def record_ticks(
        cls, batch: str, ticks: Sequence[datetime], state: str, *, by: str, reason: str | None = None
    ) -> int:
        """Record ticks that will not run; return the number of ticks that had no row yet."""
        values = {"batch": batch, "ticks": list(ticks), "state": state, "reason": reason, "by": by}
        return int(database.execute_sql(transitions.INSERT_TICKS, values).rowcount)

    @classmethod
    def claim_manual(cls, batch: str, *, by: str) -> int | None:
        """Open a manual run for a worker to start; None if the batch has an open run."""
        row = cls.insert(batch=batch, state="claimed", claimed_by=by, claimed_at=pw.fn.clock_timestamp())
        inserted = list(row.on_conflict_ignore().returning(cls.id).tuples().execute())
        return inserted[0][0] if inserted else None

    @classmethod
    def retry_now(cls, batch: str) -> int | None:
        """End the wait of the batch's run for its retry; return its id, None if no run waits."""
        waits = (cls.state == "enqueued") & (cls.retry_at > pw.fn.clock_timestamp())
        rows = cls.update(retry_at=None).where(cls.batch == batch, waits).returning(cls.id).execute()
        return next((row.id for row in rows), None)

    @classmethod
    def mark_sent(cls, batch: str, *, again_after: timedelta) -> JobRun | None:
        """Mark the batch's open run as sent, and return it for sending; None if none is to send.

        It is not sent if it runs, waits for its retry, is held, or was marked less than *again_after* ago.
        """
        row = database.execute_sql(transitions.MARK_RUN_SENT, {"batch": batch, "again_after": again_after}).fetchone()
        return None if row is None else cls(**dict(zip(("id", "batch", "token", "tick"), row, strict=True)))

    @classmethod
    def mark_unsent(cls, run_id: int) -> None:
        """Let the next `mark_sent` return the run, unless it has started."""
        database.execute_sql(transitions.MARK_RUN_UNSENT, {"id": run_id})

    @classmethod
    def start(cls, batch: str, run_id: int, *, token: UUID, by: str) -> StartedRun | None:
        """Start the batch's run; return None if that is not possible.

        It may be started, closed or held, wait for its retry, or lack a row.  After a restore, a database older than
        the message may have another run with that number and another *token*.
        """
        values = {"id": run_id, "batch": batch, "token": str(token), "by": by}
        row = database.execute_sql(transitions.START_RUN, values).fetchone()
        return StartedRun(*row) if row else None

    @classmethod
    def start_here(cls, batch: str, *, by: str) -> StartedRun | None:
        """Start the waiting row, or a new row; None if a run is started or the batch is held."""
        with database.atomic() as transaction:
            cls.retry_now(batch)
            if cls.find_open(batch) is None:
                cls.claim_manual(batch, by=by)
            waiting = cls.find_open(batch)
            started = None if waiting is None else cls.start(batch, waiting.id, token=waiting.token, by=by)
            if started is None:
                transaction.rollback()
        return started

    @classmethod
    def keep_alive(cls, runs: Sequence[StartedRun], results: Sequence[dict[str, Any]] | None = None) -> set[int]:
        """Record that the runs are alive, with their results; return the ids of runs still ours."""
        values = {
            "ids": [run.id for run in runs],
            "tokens": [run.token for run in runs],
            "results": list(map(_dump_result, results)) if results else [None] * len(runs),
        }
        return {row[0] for row in database.execute_sql(transitions.KEEP_RUNS_ALIVE, values).fetchall()}

    @classmethod
    def succeed(cls, run: StartedRun, result: dict[str, Any], *, ordinary: bool | None = None) -> str | None:
        """Close the run with its result.

        Like the methods below it returns the new state, None if another process has taken the run meanwhile.
        """
        return _close_run(
            transitions.CLOSE_SUCCEEDED, run, result, partial(Batch.unblock, run.batch, run.id), ordinary=ordinary
        )

    @classmethod
    def block(cls, run: StartedRun, result: dict[str, Any], *, reason: str, sentence: str) -> str | None:
        """Close the run as blocked, and record that its batch is blocked."""
        note = partial(Batch.block, run.batch, reason=reason, sentence=sentence)
        return _close_run(transitions.CLOSE_BLOCKED, run, result, note, reason=reason)

    @classmethod
    def hold(cls, run: StartedRun, result: dict[str, Any], *, kind: Kind, sentence: str, by: str) -> str | None:
        """Close the run as skipped, and hold its batch."""
        hold = Hold.insert(batch=run.batch, kind=kind, reason=sentence, by=by)
        return _close_run(transitions.CLOSE_HELD, run, result, hold.execute)

    @classmethod
    def fail(
        cls,
        run: StartedRun,
        error: str,
        result: dict[str, Any] | None = None,
        *,
        delay: timedelta,
        retries: int = MAX_RETRIES,
    ) -> str | None:
        """Let the run wait *delay* for its retry, or end it after *retries* retries.

        It keeps its result so far.
        """
        unblock = partial(Batch.unblock, run.batch, run.id)
        return _close_run(transitions.CLOSE_FAILED, run, result, unblock, error=error, delay=delay, retries=retries)

    @classmethod
    def reopen_lost(cls, batch: str, *, dead_after: timedelta) -> list[dict[str, Any]]:
        """Reopen runs of workers that expired *dead_after* ago; return their facts.

        The third loss makes a run poison.
        """
        values = {"batch": batch, "dead_after": dead_after, "max_losses": MAX_LOSSES}
        taken = database.execute_sql(transitions.REOPEN_LOST_RUNS, values).fetchall()
        return [dict(zip(("id", "state", "worker", "losses"), row, strict=True)) for row in taken]

    @classmethod
    def is_superseded(cls) -> pw.Node:
        """Return the condition for closed runs that are not the newest of their batch."""
        newer = cls.alias()
        followed = pw.fn.exists(newer.select(pw.SQL("1")).where(newer.batch == cls.batch, newer.id > cls.id))
        condition: pw.Node = cls.state.not_in(OPEN_STATES) & followed
        return condition


JobRun.add_index(pw.SQL("create unique index job_runs_batch_tick on job_runs (batch, tick)"))
JobRun.add_index(
    pw.SQL("create unique index one_open_run on job_runs (batch) where state in ('claimed', 'enqueued', 'started')")
)
JobRun.add_index(pw.SQL("create index job_runs_batch_id on job_runs (batch, id)"))
JobRun.add_index(pw.SQL("create index job_runs_finished_at on job_runs (finished_at)"))


def _close_run(
    statement: str, run: StartedRun, result: dict[str, Any] | None, note: Callable[[], object], **facts: Any
) -> str | None:
    """Close the run if it is still ours, call *note* for its batch, and return its state."""
    values = {"id": run.id, "token": run.token, "result": None if result is None else _dump_result(result), **facts}
    with database.atomic():
        row = database.execute_sql(statement, values).fetchone()
        if row is None:
            return None
        note()
    return str(row[0])


def _dump_result(result: dict[str, Any]) -> str:
    return orjson.dumps(result).decode()
