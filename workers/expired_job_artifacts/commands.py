"""Who has which bucket: `buckets`."""

from __future__ import annotations

from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import Json, emit, moment, table
from workers.expired_job_artifacts import bucket_states


def buckets(json: Json = False) -> None:
    """Show the artifact buckets: which are free, and who has the others since when."""
    with connected("buckets"):
        found = bucket_states()
    if json:
        emit(found)
        return
    rows = [(number, "available", "", "") for number in found["available"]]
    rows += [(one["number"], "occupied", moment(one["since"]), one["token"] or "unknown") for one in found["occupied"]]
    table("", ("bucket", "state", "last sign of life", "owner"), sorted(rows))


COMMANDS = {"buckets": buckets}
