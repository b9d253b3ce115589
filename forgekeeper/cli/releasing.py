"""`release`: let batches go that a brake holds, or that a brake would hold."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from forgekeeper.audit import acts
from forgekeeper.batches import BATCHES, BatchSpec
from forgekeeper.cli.connection import batch_named, connected
from forgekeeper.cli.console import All, Json, answer, moment, wrong_use
from forgekeeper.cli.running import Names
from forgekeeper.database import database
from forgekeeper.runs.batch import Batch as BatchRow
from forgekeeper.runs.holds import BRAKES, Hold

FIRST = "0001_ledger"
"""Whoever applies this migration makes a new installation."""
Reason = Annotated[str, typer.Option(help="Why it may go on; the audit keeps it.")]
Expect = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Let the next run, with its children, delete so many records at most."),
]


def release(
    reason: Reason,
    batches: Names = None,
    everything: All = False,
    expect: Expect = None,
    json: Json = False,
) -> None:
    """Let batches go that a brake holds, from their next tick on.

    For a day their breaker lets go what it would hold, until a run is ordinary again; with --expect it is one run, and
    as much as was said.  Of a batch that is not held this is remembered likewise.
    """
    chosen = _chosen(batches or [], everything=everything)
    if not reason.strip():
        wrong_use("say why with --reason: the audit keeps it")
    with connected("release", redis_needed=False):
        held = [batch.name for batch in chosen if let_go(batch, reason=reason, expect=expect)]
    names = [batch.name for batch in chosen]
    limit = "" if expect is None else f", {expect:,} records at most in the next run"
    said = [
        f"{name} " + ("runs again from its next tick" if name in held else "was not held") + limit for name in names
    ]
    answer({"released": names, "were_held": held, "expect": expect, "reason": reason}, "\n".join(said), json=json)


def let_go(batch: BatchSpec, *, reason: str, expect: int | None = None) -> bool:
    """Release the batch, and record it; return False when it was not held."""
    with database.atomic():
        before, after = _state(batch.name), {"held": None, "expect": expect}
        held = BatchRow.release(batch.name, reason=reason, by=acts.who().name, expect=expect)
        acts.record("release", batch.name, batch=batch.name, reason=reason, before=before, after=after)
    return held


def hold_new() -> list[str]:
    """Hold each batch that deletes, as nobody has seen what it will delete; return their names."""
    names = [batch.name for batch in BATCHES.values() if batch.deletes]
    BatchRow.register(names)
    for name in names:
        Hold.add(name, "new", reason=_never_seen(name), by=acts.who().name)
    return names


def let_new_go(*, reason: str) -> None:
    """Release what is held as new, and let the breaker of each batch that deletes begin with this.

    That is part of another act, and none of its own.
    """
    for batch in BATCHES.values():
        if batch.deletes and all(hold.kind == "new" for hold in Hold.standing(*BRAKES, batch=batch.name)):
            BatchRow.release(batch.name, reason=reason, by=acts.who().name)


def _never_seen(name: str) -> str:
    return (
        f"nobody has looked at what it will delete: `forgekeeper run {name} --dry-run` shows it,"
        f" `forgekeeper release {name} --reason REASON` lets it go"
    )


def _chosen(names: list[str], *, everything: bool) -> list[BatchSpec]:
    if bool(names) == everything:
        wrong_use("name batches, or say --all")
    return [batch for batch in BATCHES.values() if batch.deletes] if everything else [*map(batch_named, names)]


def _state(name: str) -> dict[str, Any]:
    hold = next(iter(Hold.standing(*BRAKES, batch=name)), None)
    if hold is None:
        return {"held": None}
    return {"held": moment(hold.since), "reason": hold.kind, "sentence": hold.reason}
