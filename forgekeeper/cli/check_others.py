"""Findings of `check --watch` on other programs that do the work of a batch.

The number of records due at a fixed instant can only shrink: by deletions of our runs, which are counted, and by other
programs that delete, claim or change records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import NamedTuple

from forgekeeper.api.batches import BATCHES
from forgekeeper.cli.check_places import Finding, ok, warning
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.platform.database import now
from forgekeeper.platform.database.queries import MAX_COUNTED_ROWS
from forgekeeper.platform.database.read_only import read_only_snapshot

LOST_TO_OTHERS_SENTENCE = (
    "{batch}: another program deleted or claimed {count:,} of {due:,} due records: both do the same work, and numbers"
    " that both update are counted twice; switch off that program, or this batch"
)


class _DueCount(NamedTuple):
    due: int
    ours: int


def watch_other_programs(wait: Callable[[], object]) -> Iterator[Finding]:
    """Count due records before and after *wait*; report batches that lost records to others."""
    instant = now()
    before = _count_due(instant)
    wait()
    after = _count_due(instant)
    taken = {
        name: seen.due - after[name].due - (after[name].ours - seen.ours)
        for name, seen in before.items()
        if name in after and seen.due < MAX_COUNTED_ROWS
    }
    for name, count in taken.items():
        if count > 0:
            yield warning("others", LOST_TO_OTHERS_SENTENCE.format(batch=name, count=count, due=before[name].due))
    if not any(count > 0 for count in taken.values()):
        yield ok("others", "no other program deleted or claimed due records")


def _count_due(instant: datetime) -> dict[str, _DueCount]:
    """Return for each batch the remaining records due at *instant*, and its runs' deletions."""
    found = {}
    for name, batch in BATCHES.items():
        with read_only_snapshot(name):
            if batch.deletes_records and (due := batch.sum_backlogs(instant)) is not None:
                found[name] = _DueCount(due.records, RunTotal.sum_of_batch(name))
    return found
