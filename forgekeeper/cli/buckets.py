"""The command `buckets`, which shows the buckets of a batch."""

from __future__ import annotations

from typing import Annotated

import typer

from forgekeeper.api.batches import BATCHES
from forgekeeper.cli.connection import connected
from forgekeeper.cli.terminal import Json, emit, moment, table, wrong_use
from forgekeeper.platform.connections import client
from forgekeeper.sources.buckets import BucketSet


def buckets(
    batch: Annotated[
        str | None, typer.Argument(help="Of this batch, if several have buckets.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Show the artifact buckets: which are free, and who has the others since when."""
    shares = _find(batch)
    with connected("buckets"):
        found = shares.states(client)
    if json:
        emit(found)
        return
    rows = [(one["number"], moment(one["since"]), one["token"] or "unknown") for one in found["occupied"]]
    table(("bucket", "last heartbeat", "owner"), sorted([*rows, *((free, "", "") for free in found["available"])]))


def _find(batch: str | None) -> BucketSet:
    """Return the buckets of the batch, or of the only batch with buckets if None."""
    named = {one.name: one.buckets.name for one in BATCHES.values() if one.buckets is not None}
    if batch is None and len(named) == 1:
        (batch,) = named
    if batch not in named:
        wrong_use(f"name a batch that has buckets: {', '.join(named) or 'none has'}")
    return BucketSet(named[batch])


COMMANDS = {"buckets": buckets}
