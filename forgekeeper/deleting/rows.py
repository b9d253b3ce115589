"""The loop that deletes rows: chunk by chunk, until none is left or the run has to end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import structlog

from forgekeeper.audit.deletions import Audit
from forgekeeper.database import database
from forgekeeper.database.chunks import IN_ORDER, START, Position, page
from forgekeeper.database.prepared import Prepared
from forgekeeper.database.writes import write_first
from forgekeeper.declaring.rows import Rows
from forgekeeper.deleting.outcome import add
from forgekeeper.deleting.statement import Composed, Shape
from forgekeeper.runs.bad_records import BadRecords
from forgekeeper.runs.run import Run
from forgekeeper.runs.totals import NONE, Amount

log = structlog.get_logger(__name__)


class Chunk(NamedTuple):
    """What a chunk came to: how many rows and bytes went, and how far that reaches."""

    rows: int
    bytes: int
    reached: Position


def delete(run: Run[Any], rows: Rows[Any]) -> str | None:
    """Delete the rows; return why it ended before all were gone, None where none is left.

    Each chunk is one statement: whatever ends the process, a row, its line in the audit and what it takes of limits go
    together or stay.
    """
    sweep = Sweep(run, rows)
    with run.bad_records(rows.record, rows.select(), error_kind=run.error_kind(rows.record)) as bad:
        while limit := run.brakes.free(rows.chunk):
            before = sweep.deleted
            if not sweep.chunk(bad, limit):
                break
            run.step(rows.step)
            if run.deadline.passed(sweep.deleted - before):
                return "deadline"
        else:
            return "deadline"
    if not hasattr(run.outcome, rows.counted) and sweep.deleted:
        log.info("old records removed", record=rows.record, records=sweep.deleted)
    return None


class Sweep:
    """One pass over the rows, from the oldest on."""

    def __init__(self, run: Run[Any], rows: Rows[Any]) -> None:
        self._run = run
        self._rows = rows
        self._composed = Composed(rows)
        self._audited = _audited(run.audit, rows)
        self._position = START
        self.deleted = 0

    def chunk(self, bad: BadRecords, limit: int) -> bool:
        """Delete the next chunk, but bad records; return False where nothing was found, or nothing may go."""
        limit = self._reserve(bad, limit)
        if not limit:
            return False
        following = partial(page, self._rows.select(), self._rows.since, self._position, limit=limit, without=bad.keys)
        reached = bad.chunk(partial(self._take, bad, limit), following)
        self._run.brakes.give_back()
        if reached is not None:
            self._position = reached
        return reached is not None

    def _reserve(self, bad: BadRecords, limit: int) -> int:
        """Reserve what the next chunk needs and no more; return how many rows that is."""
        brakes = self._run.brakes
        if not brakes.limited:
            return limit
        values = self._values(bad, None)
        next_ = database.execute_sql(write_first() + IN_ORDER + self._composed.sizes(limit, bad.keys), values)
        sizes = [size for (size,) in next_.fetchall()]
        return brakes.reserve(len(sizes), sum(sizes), least=sizes[0]).records if sizes else 0

    def _take(self, bad: BadRecords, limit: int, only: Sequence[int] | None) -> Position | None:
        """Delete up to *limit* rows beyond our position, of *only* some keys; return how far that came.

        Rows that another transaction has locked are passed over, not waited for; so is one that was changed while we
        looked: a later run sees it as it is then.
        """
        brakes, of = self._run.brakes, None if only is None else len(only)
        room = brakes.room
        size = "size" if self._rows.size is not None else "0"
        recorded = self._audited + brakes.settled("deleted", size=size, part=of is not None)
        shape = Shape(limit, only is not None, bool(bad.keys), room is not None, recorded)
        values = self._values(bad, only) | {"room": room} | brakes.values(of) | self._run.audit.values
        row = database.execute_sql(self._statement(shape), values).fetchone()
        brakes.went(Amount(*row[:2]) if row else NONE, of=of)
        if row is None:
            return None
        self._grow(Chunk(row[0], row[1], Position(*row[2:])))
        return Position(*row[2:])

    def _values(self, bad: BadRecords, only: Sequence[int] | None) -> dict[str, Any]:
        chosen = {"only": only, "without": list(bad.keys)}
        return self._composed.condition.values | chosen | self._position._asdict()

    def _statement(self, shape: Shape) -> str:
        text, first = self._composed.text(shape), write_first() + IN_ORDER
        if shape.only or shape.limit != self._rows.chunk:
            return first + text
        # Planned for each chunk, a run took a third longer: `python -m benchmarks statuses`.
        return Prepared(f"delete_{self._rows.record}", text, first=first)

    def _grow(self, chunk: Chunk) -> None:
        outcome, rows = self._run.outcome, self._rows
        self.deleted += chunk.rows
        add(outcome, rows.counted, chunk.rows)
        add(outcome, "batches", chunk.rows > 0)
        if rows.counted_bytes is not None:
            add(outcome, rows.counted_bytes, chunk.bytes)


def _audited(audit: Audit, rows: Rows[Any]) -> str:
    name = None if rows.name is None else "named"
    columns = {name: f"audit_{name}" for name in rows.audit}
    return audit.clause(rows.record, "deleted", id="key", name=name, due=due(rows.after), **columns)


def due(after: timedelta) -> str:
    """Return when a row became due, in SQL over its *since*."""
    return f"since + interval '{after.total_seconds():.6f} s'" if after else "since"
