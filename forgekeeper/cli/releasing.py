"""`release`: let batches go that a brake holds."""

from __future__ import annotations

from typing import Annotated

import typer

from forgekeeper.audit import acts
from forgekeeper.batches import BATCHES, BatchSpec
from forgekeeper.cli.connection import batch_named, connected
from forgekeeper.cli.console import HELD, All, Json, answer, err, moment, wrong_use
from forgekeeper.cli.running import Names
from forgekeeper.database import database, now
from forgekeeper.runs import releases
from forgekeeper.runs.batch import Batch as BatchRow
from forgekeeper.runs.holds import BRAKES, Hold
from forgekeeper.runs.previewing import amount

FIRST = "0001_ledger"
"""Whoever applies this migration makes a new installation."""
Reason = Annotated[str, typer.Option(help="Why it may go on; the audit keeps it.")]
Expect = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Let so many records go, not as many as are due."),
]


def release(
    reason: Reason,
    batches: Names = None,
    everything: All = False,
    expect: Expect = None,
    json: Json = False,
) -> None:
    """Let batches go that a brake holds, from their next tick on: as many records as are due now.

    So many a preview shows, and no more go by the release, whatever becomes due meanwhile; --expect says another
    number.  It ends with the first run that is an ordinary one again.  A batch that no brake holds stays as it is, and
    so does one whose records cannot be counted now: then the status is 3.
    """
    chosen = _chosen(batches or [], everything=everything)
    if not reason.strip():
        wrong_use("say why with --reason: the audit keeps it")
    with connected("release", redis_needed=False):
        held = [batch for batch in chosen if Hold.standing(*BRAKES, batch=batch.name)]
        amounts = {batch.name: amount(batch, now()) if expect is None else expect for batch in held}
        stay = [batch.name for batch in held if amounts[batch.name] is None and batch.stake is not None]
        given = {name: number for name, number in amounts.items() if name not in stay}
        released = {name: number for name, number in given.items() if _let_go(name, number, reason=reason)}
    said = "\n".join(_sentence(batch.name, released) for batch in chosen if batch.name not in stay)
    answer({"released": [*released], "expect": released, "still_held": stay, "reason": reason}, said, json=json)
    for name in stay:
        err.print(
            f"{name} is still held: what is due cannot be counted now; `forgekeeper run {name} --dry-run` says why,"
            " --expect says how many records may go"
        )
    if stay:
        raise typer.Exit(HELD)


def _let_go(name: str, expect: int | None, *, reason: str) -> bool:
    """Release the batch, and record it; return False when nothing holds it any more."""
    with database.atomic():
        lifted = releases.give(name, reason=reason, by=acts.who().name, expect=expect)
        if lifted:
            (hold, *_) = lifted
            before = {"held": moment(hold.since), "reason": hold.kind, "sentence": hold.reason}
            after = {"held": None, "expect": expect}
            acts.record("release", name, batch=name, reason=reason, before=before, after=after)
    return bool(lifted)


def _sentence(name: str, released: dict[str, int | None]) -> str:
    if name not in released:
        return f"{name} is held by no brake: there is nothing to release"
    number = released[name]
    limit = "" if number is None else f"; {number:,} records may go, and what is due beyond waits for the run after"
    return f"{name} runs again from its next tick{limit}"


def hold_new() -> list[str]:
    """Hold each batch that deletes, as nobody has seen what it will delete; return their names."""
    names = [batch.name for batch in BATCHES.values() if batch.deletes]
    BatchRow.register(names)
    for name in names:
        Hold.add(name, "new", reason=_never_seen(name), by=acts.who().name)
    return names


def _never_seen(name: str) -> str:
    return (
        f"nobody has looked at what it will delete: `forgekeeper run {name} --dry-run` shows it,"
        f" `forgekeeper release {name} --reason REASON` lets it go"
    )


def _chosen(names: list[str], *, everything: bool) -> list[BatchSpec]:
    if bool(names) == everything:
        wrong_use("name batches, or say --all")
    return [batch for batch in BATCHES.values() if batch.deletes] if everything else [*map(batch_named, names)]
