"""What this process has counted, for the endpoint that shows all processes of a worker together."""

from __future__ import annotations

from contextlib import suppress

from metrics.catalogue.labels import LEVELS, NO_BATCH
from metrics.instruments import Instruments

WORKER = Instruments("worker")
BREACHES = "forgekeeper_threshold_breaches_total"
DEAD_LETTERS = "forgekeeper_run_dead_letters_total"


def dead_lettered(actor: str) -> None:
    """Count a message of that actor, which may be anything, as a dead letter."""
    known = WORKER.has(DEAD_LETTERS, actor)
    WORKER.inc(DEAD_LETTERS, actor if known else NO_BATCH)
    if WORKER.has(BREACHES, actor, "dead_letter"):
        WORKER.inc(BREACHES, actor, "dead_letter")


def line_written(level: str) -> None:
    """Count a log line; there is no line about one that cannot be counted."""
    with suppress(Exception):
        WORKER.inc("forgekeeper_log_messages_total", level if level in LEVELS else "info")
