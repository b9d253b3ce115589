"""Endpoints of the installation: its state, servers, processes, queues, leases and buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from forgekeeper.cli import buckets, process_list, status
from forgekeeper.cli.console import server_states
from forgekeeper.cli.console.pages import PageRequest
from forgekeeper.cli.console.web_api.endpoints import BATCH, ServerAway, endpoint
from forgekeeper.cli.console.web_api.models import (
    BucketsAnswer,
    InstallationAnswer,
    LeasesAnswer,
    ProcessesAnswer,
    QueuesAnswer,
    StatusAnswer,
)
from forgekeeper.ledger.heartbeats import Process, read_version
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import now
from forgekeeper.platform.installation import Installation

ReadResult = TypeVar("ReadResult")


@endpoint("/status", StatusAnswer)
def read_status(request: PageRequest) -> dict[str, Any]:
    """Read the whole state: batches, queues, processes, amounts and warnings, as in `forgekeeper status --json`."""
    return status.gather_facts(request.settings)


@endpoint("/installation", InstallationAnswer)
def read_installation(request: PageRequest) -> dict[str, Any]:
    """Read the installation: its id, the console's version, and its servers and places with their errors."""
    with status.TolerantReader() as reader:
        states = server_states.list_states(request.settings, reader.trouble)
    return {
        "at": now(),
        "installation": Installation.find_id(),
        "version": read_version(),
        "servers": [one._asdict() for one in states],
    }


@endpoint("/queues", QueuesAnswer)
def read_queues(_request: PageRequest) -> dict[str, Any]:
    """Read the queues with their messages and workers, as in `forgekeeper status --json`."""
    with status.TolerantReader() as reader:
        instant, known = now(), Process.list_all()
        queues = status.queue_facts(known, instant, reader)
    return {"at": instant, "queues": queues, "redis": {"trouble": reader.trouble}}


@endpoint("/processes", ProcessesAnswer)
def read_processes(_request: PageRequest) -> dict[str, Any]:
    """Read the schedulers and workers with their present work, as in `forgekeeper processes --json`."""
    return process_list.list_facts()


@endpoint("/leases", LeasesAnswer)
def read_leases(_request: PageRequest) -> dict[str, Any]:
    """Read the held leases, longest held first, as in `forgekeeper leases --json`."""
    return {"leases": _read_redis(process_list.list_held_leases)}


@endpoint("/buckets", BucketsAnswer, query=(BATCH,))
def read_buckets(request: PageRequest) -> dict[str, Any]:
    """Read the buckets of a batch, free and claimed, as in `forgekeeper buckets BATCH --json`."""
    shares = buckets.find_bucket_set(request.query.get(BATCH.name))
    return _read_redis(lambda: shares.read_states(client))


def _read_redis(read: Callable[[], ReadResult]) -> ReadResult:
    """Call *read*; raise `ServerAway` if Redis fails."""
    with status.TolerantReader() as reader:
        found = reader.read_or_none(read)
    if found is None:
        raise ServerAway("; ".join([*([reader.trouble] if reader.trouble else []), *reader.refused]))
    return found
