"""What begins the attempts of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from forgekeeper.batches import BatchSpec, ChildSpec
from forgekeeper.declaring.answers import Enqueued, Keyed
from forgekeeper.failpoints import arm
from forgekeeper.runs.attempt import Attempt
from forgekeeper.runs.ledger import Started
from forgekeeper.runs.processes import Heartbeat
from forgekeeper.settings import Settings

FanOut = Callable[[int, ChildSpec, Sequence[Keyed]], Enqueued]
"""How the run of a number sends children."""


class Runner:
    """Begins attempts; the *heartbeat* of their process keeps their rows alive, one of its own where none is given."""

    def __init__(self, settings: Settings, fan_out: FanOut, heartbeat: Heartbeat | None = None) -> None:
        arm(settings.failpoints)
        self._settings = settings
        self._fan_out = fan_out
        self._heartbeat = heartbeat or Heartbeat("run", dead_after=settings.dead_after)
        if heartbeat is None:
            self._heartbeat.start()

    def stop(self) -> None:
        """End the heartbeat; runs that are still open will be found lost."""
        self._heartbeat.stop()

    def attempt(self, batch: BatchSpec, started: Started, *, final: bool = False) -> Attempt:
        """Make an attempt at a run that has been started."""
        return Attempt(
            batch,
            self._settings,
            message_id=str(started.id),
            number=started.id,
            started=started,
            heartbeat=self._heartbeat,
            fan_out=partial(self._fan_out, started.id),
            final=final,
        )

    def child(self, child: ChildSpec, message_id: str, *, run: int | None = None) -> Attempt:
        """Make an attempt at a child, of the *run* that has sent it where that is known."""
        return Attempt(child, self._settings, message_id=message_id, number=run)
