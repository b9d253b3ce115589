"""The loop that changes rows: page by page, until none is left or the run has to end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

from forgekeeper.audit.deletions import Audit
from forgekeeper.database import database
from forgekeeper.database.chunks import START, page
from forgekeeper.database.writes import write_first
from forgekeeper.declaring.rows import Changes
from forgekeeper.deleting.statement import condition
from forgekeeper.runs.bad_records import BadRecords
from forgekeeper.runs.brakes import Brakes
from forgekeeper.runs.run import Run
from forgekeeper.runs.totals import Amount


def change(run: Run[Any], changes: Changes[Any]) -> str | None:
    """Change the rows; return why it ended before all were, None where none is left."""
    position = START
    with run.bad_records(changes.record, changes.select_of_all_shares()) as bad:
        while limit := run.brakes.free(changes.chunk):
            found = page(changes.select(), changes.since, position, limit=limit, without=bad.keys)
            if not found:
                return None
            found = found[: run.brakes.reserve(len(found)).records]
            if not found:
                break
            position = found[-1]
            done = _page(run, changes, bad, [each.key for each in found])
            run.step("changed")
            if run.deadline.passed(done):
                break
    return "deadline"


def _page(run: Run[Any], changes: Changes[Any], bad: BadRecords, keys: Sequence[int]) -> int:
    """Change the rows of these keys, those aside that cannot be; return how many were changed."""
    before, failed = getattr(run.outcome, changes.counted), bad.failed
    try:
        bad.each(partial(_change, run, changes, len(keys)), keys)
        run.brakes.give_back()
    finally:
        run.add("failed", bad.failed - failed)
    done: int = getattr(run.outcome, changes.counted) - before
    run.add("skipped", len(keys) - done - (bad.failed - failed))
    return done


def _change(run: Run[Any], changes: Changes[Any], whole: int, ids: Sequence[int]) -> None:
    """Change some, in one statement with what the audit says; then let the document say so of each."""
    of = None if len(ids) == whole else len(ids)
    rows = execute(changes, run.now, ids, run.audit, run.brakes, of=of)
    run.brakes.went(Amount(len(rows)), of=of)
    run.add(changes.counted, len(rows))
    for row in rows:
        for field, count in changes.each(row).items():
            run.add(field, count)


def execute(
    changes: Changes[Any],
    now: datetime,
    ids: Sequence[int],
    audit: Audit,
    brakes: Brakes,
    *,
    of: int | None = None,
) -> list[tuple[Any, ...]]:
    """Change the rows of these keys that are due still; return a row for each."""
    due = condition(changes.model, changes.due)
    audited = audit.clause(changes.record, "changed", id="id", **changes.audit)
    recorded = audited + brakes.settled("changed", part=of is not None)
    values = {"ids": list(ids), "now": now} | due.values | brakes.values(of) | audit.values
    text = write_first() + changes.statement.format(due=due.text, recorded=recorded)
    rows: list[tuple[Any, ...]] = database.execute_sql(text, values).fetchall()
    return rows
