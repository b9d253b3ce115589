"""What becomes of a dead letter that somebody replays: a child goes back, a batch gets a new run."""

from __future__ import annotations

from typing import NamedTuple

import structlog

from forgekeeper.batches import BATCHES, BatchSpec
from forgekeeper.cli.running import held_back, overlapping, send_by_hand
from forgekeeper.delivery import dead_letters
from forgekeeper.delivery.dead_letters import DeadLetter
from forgekeeper.identity import identity
from forgekeeper.process.broker import broker
from forgekeeper.process.run_messages import RunMessages
from forgekeeper.runs import reconcile
from forgekeeper.runs.ledger import JobRun

DONE = {"on_its_way", "overlap", "paused", "stopped", "held", "gone"}
"""Why a letter is kept although nothing is wrong: what it asks for happens anyhow, or is held back."""

log = structlog.get_logger(__name__)


class Verdict(NamedTuple):
    """What became of the letter: *kept* says why it still lies there, if it does; *run* is the batch's new run."""

    sentence: str
    kept: str | None = None
    run: int | None = None


class Replay:
    """Replays dead letters one by one; a dry one changes nothing and says what would become of them."""

    def __init__(self, *, dry: bool) -> None:
        self.dry = dry
        self._promised: set[str] = set()

    def __call__(self, letter: DeadLetter) -> Verdict:
        """Replay the letter, unless there is a reason to keep it."""
        if letter.fault:
            return Verdict(f"{letter.id} is kept: {letter.fault}; it can be purged", "malformed")
        name = letter.message.actor_name
        if name not in broker.actors:
            hint = "replay it with a forgekeeper that has it, or purge it"
            return Verdict(f"{letter.id} is kept: there is no actor {name!r}; {hint}", "unknown_actor")
        verdict = self._batch(letter, BATCHES[name]) if name in BATCHES else self._child(letter)
        if verdict.kept is None and not self.dry:
            facts = {"id": letter.id, "queue": letter.queue, "actor": name, "by": identity()}
            log.warning("dead letter replayed", **facts, **({"run": verdict.run} if verdict.run else {}))
        return verdict

    def _batch(self, letter: DeadLetter, batch: BatchSpec) -> Verdict:
        """Send the batch as a run by hand; its message's own row has been closed for long."""
        if self.dry:
            return self._promise(letter, batch)
        # Should the open row be the letter's own, this closes it.
        reconcile.send(batch.name, RunMessages(batch))
        sent = send_by_hand(batch, recorded=True)
        if sent.run is None:
            return Verdict(f"{letter.id} is kept: {sent.sentence}", sent.skipped)
        dead_letters.remove(broker, letter)
        return Verdict(sent.sentence, run=sent.run)

    def _promise(self, letter: DeadLetter, batch: BatchSpec) -> Verdict:
        if back := held_back(batch):
            return Verdict(f"{letter.id} is kept: {back[1]}", back[0])
        run = JobRun.open(batch.name)
        if batch.name in self._promised or (run is not None and str(run.id) != letter.id):
            return Verdict(f"{letter.id} is kept: {overlapping(batch)}", "overlap")
        self._promised.add(batch.name)
        return Verdict(f"{letter.id} would become a new run of {batch.name}")

    def _child(self, letter: DeadLetter) -> Verdict:
        if self.dry:
            on_its_way = dead_letters.is_on_its_way(broker, letter)
            became = "on its way" if on_its_way else "replayed"
        else:
            became = dead_letters.replay(broker, letter)
        if became == "on its way":
            return Verdict(f"{letter.id} is kept: a message with its id is on its way already", "on_its_way")
        if became == "gone":
            return Verdict(f"{letter.id} is no dead letter any more: somebody was faster", "gone")
        return Verdict(f"{letter.id} {'would go' if self.dry else 'is'} back in the queue {letter.queue}")
