"""`release`: let batches go that a brake holds."""

from __future__ import annotations

from typing import Annotated

import typer

from forgekeeper.audit import acts
from forgekeeper.batches import BATCHES
from forgekeeper.cli.connection import batch_named, connected
from forgekeeper.cli.console import HELD, All, Json, answer, err, moment, say, wrong_use
from forgekeeper.cli.running import Names
from forgekeeper.database import database, now
from forgekeeper.runs import releases
from forgekeeper.runs.batch import Batch as BatchRow
from forgekeeper.runs.breaker import amount
from forgekeeper.runs.holds import BRAKES, Hold

FIRST = "0001_ledger"
"""Whoever applies this migration makes a new installation."""


def release(
    reason: Annotated[str, typer.Option(help="Why it may go on; the audit keeps it.")],
    batches: Names = None,
    everything: All = False,
    expect: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Let so many records go, not as many as are due.")
    ] = None,
    json: Json = False,
) -> None:
    """Let batches go that a brake holds, from their next tick on: as many records as are due now.

    So many a preview shows, and no more go by the release, whatever becomes due meanwhile; --expect says another
    number.  It ends with the first run that is an ordinary one again.  A batch that no brake holds stays as it is, and
    so does one whose records cannot be counted now: then the status is 3.
    """
    if bool(batches) == everything:
        wrong_use("name the batches, or say --all")
    if not reason.strip():
        wrong_use("say why with --reason: the audit keeps it")
    deleting = [batch for batch in BATCHES.values() if batch.deletes]
    chosen = deleting if everything else [*map(batch_named, batches or ())]
    said, stay, released = list[str](), list[str](), dict[str, int | None]()
    with connected("release", redis_needed=False):
        for batch in chosen:
            held = Hold.standing(*BRAKES, batch=batch.name)
            number = amount(batch, now()) if held and expect is None else expect
            if held and number is None and batch.stake is not None:
                stay.append(batch.name)
            elif held and _let_go(batch.name, number, reason=reason):
                released[batch.name] = number
                limit = "" if number is None else f"; {number:,} records may go, and no more"
                said.append(f"{batch.name} runs again from its next tick{limit}")
            else:
                said.append(f"{batch.name} is held by no brake: there is nothing to release")
    facts = {"released": [*released], "expect": released, "still_held": stay, "reason": reason}
    answer(facts, "\n".join(said), json=json)
    say(
        (f"{name} is still held: what is due cannot be counted now; say with --expect how many go" for name in stay),
        err,
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


def hold_new() -> list[str]:
    """Hold each batch that deletes, as nobody has seen what it will delete; return their names."""
    names = [batch.name for batch in BATCHES.values() if batch.deletes]
    BatchRow.register(names)
    for name in names:
        sentence = (
            f"nobody has looked at what it will delete: `forgekeeper run {name} --dry-run` shows it,"
            f" `forgekeeper release {name} --reason REASON` lets it go"
        )
        Hold.add(name, "new", reason=sentence, by=acts.who().name)
    return names
