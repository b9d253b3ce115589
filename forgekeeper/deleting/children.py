"""The loop that sends children, a page of them at a time."""

from __future__ import annotations

from itertools import islice
from typing import Any

from forgekeeper.database.writes import engine
from forgekeeper.declaring.children import Children
from forgekeeper.deleting.outcome import add
from forgekeeper.runs.run import Run


def send(run: Run[Any], children: Children) -> str | None:
    """Send each child, unless it is on its way; return why it ended before all were, None where all are sent."""
    calls, outcome = iter(children.calls()), run.outcome
    while page := list(islice(calls, children.page)):
        with engine():
            sent = run.fan_out(children.child, page)
        setattr(outcome, children.sent, getattr(outcome, children.sent) + sent.enqueued)
        add(outcome, "deduplicated", sent.deduplicated)
        if children.all_of is not None:
            add(outcome, children.all_of, sent.enqueued + sent.deduplicated)
        run.step("enqueued")
        if sent.queue_full:
            return "queue_full"
        if run.deadline.passed():
            return "deadline"
    return None
