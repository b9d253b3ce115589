"""The command `buckets`, which shows the buckets of a batch."""

from __future__ import annotations

from typing import Annotated

import typer

from forgekeeper.api.batches import BATCHES
from forgekeeper.cli.connection import connect_command
from forgekeeper.cli.terminal import Json, format_time, print_json, print_table, wrong_use
from forgekeeper.platform.connections import client
from forgekeeper.sources.buckets import BucketSet


def buckets(
    batch: Annotated[str | None, typer.Argument(help="The batch, if several have buckets.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Show the free buckets, and the owner and last heartbeat of each claimed bucket."""
    shares = find_bucket_set(batch)
    with connect_command("buckets"):
        found = shares.read_states(client)
    if json:
        print_json(found)
        return
    rows = [(one["number"], format_time(one["since"]), one["token"] or "unknown") for one in found["occupied"]]
    print_table(
        ("bucket", "last heartbeat", "owner"), sorted([*rows, *((free, "", "") for free in found["available"])])
    )


def find_bucket_set(batch: str | None) -> BucketSet:
    """Return the buckets of the batch, or of the only batch with buckets if None."""
    named = {one.name: one.buckets.name for one in BATCHES.values() if one.buckets is not None}
    if batch is None and len(named) == 1:
        (batch,) = named
    if batch not in named:
        wrong_use(f"name a batch with buckets: {', '.join(named) or 'there is none'}")
    return BucketSet(named[batch])


COMMANDS = {"buckets": buckets}
