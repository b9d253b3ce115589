"""The list *Needs attention* of the first page, the most urgent problem first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from forgekeeper.cli.console.server_states import ServerState
from forgekeeper.cli.console.texts import TranslatableText
from forgekeeper.cli.not_deleted import HOLDING_STATES
from forgekeeper.ledger.quarantine import Quarantined

STATES_BY_URGENCY = (
    *("error", "unserved", "unusual", "held", "blocked", "failing", "silent", "late", "missed"),
    *("stopped", "paused", "off"),
)
"""States that need attention, the most urgent first."""
STATES_BY_HOLD = {"pause": "paused", "stop": "stopped", "breaker": "held", "new": "held"}

StatusReport = Mapping[str, Any]


class ProblemLine(NamedTuple):
    """A problem of these *batches*, or of the installation if none, with its *remedy*."""

    state: str
    sentence: str
    batches: Sequence[str]
    remedy: str
    since: datetime | None = None
    by: str = ""
    until: datetime | None = None


def list_problems(found: StatusReport, places: Iterable[ServerState]) -> list[ProblemLine]:
    """Return the problems *found* by `status.gather` and in the places; needs a connection."""
    lines = [ProblemLine("error", sentence, (), "check") for sentence in found["general_warnings"]]
    lines += [
        ProblemLine("error", TranslatableText("%(name)s: %(error)s", name=one.name, error=one.error), (), "check")
        for one in places
        if one.error
    ]
    for one in found["processes"]:
        if one["silent"]:
            process = f"{one['kind']} {one['host']}:{one['pid']}"
            sentence = TranslatableText("%(process)s sends no heartbeat", process=process)
            lines.append(ProblemLine("silent", sentence, (), "unserved", one["alive_at"]))
    for one in found["not_deleted"]:
        if one["word"] not in HOLDING_STATES:
            lines.append(ProblemLine(one["word"], one["sentence"], one["batches"], one["word"], one["since"]))
    for name, batch in found["batches"].items():
        lines += _list_batch_problems(name, batch, found["amounts"].get(name))
    return sorted(lines, key=lambda line: STATES_BY_URGENCY.index(line.state))


def _list_batch_problems(name: str, one: StatusReport, amount: StatusReport | None) -> Iterator[ProblemLine]:
    """Yield the batch's holds, its failing children, and an unusual number of deletions."""
    for hold in one["holds"]:
        state, reason = STATES_BY_HOLD[hold["kind"]], hold["reason"] or TranslatableText("no reason given")
        by = TranslatableText("the circuit breaker") if hold["kind"] == "breaker" else hold["by"]
        yield ProblemLine(state, reason, [name], hold["kind"], hold["since"], by, hold["until"])
    if count := one["children_failing"]:
        newest = Quarantined.oldest_first(batch=name, kind="child").order_by(Quarantined.failed_at.desc()).first()
        sentence = (
            TranslatableText("1 child fails: %(error)s", error=newest.error)
            if count == 1
            else TranslatableText("%(count)s children fail: %(error)s", count=f"{count:,}", error=newest.error)
        )
        yield ProblemLine("failing", sentence, [name], "children", newest.since)
    if amount and amount["unusual"]:
        sentence = TranslatableText(
            "%(today)s records deleted today, at most %(before)s on an earlier day",
            today=f"{amount['today']:,}",
            before=f"{max(amount['before']):,}",
        )
        yield ProblemLine("unusual", sentence, [name], "unusual")
