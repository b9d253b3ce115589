"""The loop that removes records of the engine's own, counted and written into the audit chunk by chunk."""

from __future__ import annotations

from typing import Any

from forgekeeper.database.writes import writing
from forgekeeper.declaring.removal import Removal
from forgekeeper.deleting.outcome import add
from forgekeeper.runs.run import Run


def remove(run: Run[Any], removal: Removal) -> str | None:
    """Remove them; return why it ended before all were gone, None where none is left.

    A budget that has ended leaves the first chunk.
    """
    count = removal.chunk
    while count == removal.chunk:
        with writing():
            count = removal.remove(removal.chunk)
            if count and removal.record is not None:
                run.audit.done(removal.record, ids=(), count=count)
        if removal.counted is not None:
            add(run.outcome, removal.counted, count)
        run.step("removed")
        if run.deadline.passed(count) and count == removal.chunk:
            return "deadline"
    return None
