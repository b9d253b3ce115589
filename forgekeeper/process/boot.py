"""Boot of a process: what a message may call is declared to the broker."""

from __future__ import annotations

from forgekeeper import boot
from forgekeeper.batches import BATCHES, all_declared
from forgekeeper.process.actors import declare
from forgekeeper.process.broker import broker
from forgekeeper.process.sending import send
from forgekeeper.settings import reading
from metrics.catalogue import table
from metrics.counting import WORKER


def load_batches() -> None:
    """Import the modules of batches; make actors of what they declare, and count it; idempotent.

    Raises `SettingsError`.
    """
    boot.declare(reading.modules())
    declare(broker)
    for batch in BATCHES.values():
        batch.sender = send
    WORKER.know(table(all_declared()))
    if WORKER.in_files:
        WORKER.zero()
