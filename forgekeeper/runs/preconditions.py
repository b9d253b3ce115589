"""What has to be true of the world before a batch may delete anything in it."""

from __future__ import annotations

from forgekeeper.settings import Settings
from forgekeeper import clocks
from forgekeeper.installation import agreement
from forgekeeper.runs import tables
from forgekeeper.runs.blocked import Blocked


def require(batch: str, settings: Settings) -> None:
    """Raise `Blocked` where *batch*, or a child of that name, must not work; asked once, before it begins."""
    clocks.require(settings)
    try:
        agreement.require(batch, settings)
    except agreement.Disagreement as disagreement:
        raise Blocked("installation", str(disagreement)) from None
    for sentence in tables.misreadings(batch):
        raise Blocked("schema", sentence)
