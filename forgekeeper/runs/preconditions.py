"""What has to be true of the world before a batch may delete anything in it."""

from __future__ import annotations

from collections.abc import Iterator

from forgekeeper.batches import BatchSpec
from forgekeeper.database.schema import misread
from forgekeeper.installation import agreement
from forgekeeper.runs import clocks
from forgekeeper.runs.blocked import Blocked
from forgekeeper.settings import Settings


def require(batch: BatchSpec, settings: Settings) -> None:
    """Raise `Blocked` where *batch*, or a child of it, must not work; asked once, before it begins."""
    clocks.require(settings)
    try:
        agreement.require(batch.deletes_from, settings)
    except agreement.Disagreement as disagreement:
        raise Blocked("installation", str(disagreement)) from None
    for sentence in misreadings(batch):
        raise Blocked("schema", sentence)


def misreadings(batch: BatchSpec) -> Iterator[str]:
    """Say what the batch would take for all there is, though it is not; nothing when it may run."""
    yield from misread(batch.tables)
    yield from batch.misreadings()
