"""Boot of a process: what a message may call is declared to the broker."""

from __future__ import annotations

from forgekeeper import boot
from forgekeeper.process.actors import declare
from forgekeeper.process.broker import broker
from forgekeeper.settings import reading


def load_batches() -> None:
    """Import the modules of batches, and make actors of what they declare; idempotent.  Raises `SettingsError`."""
    boot.declare(reading.modules())
    declare(broker)
