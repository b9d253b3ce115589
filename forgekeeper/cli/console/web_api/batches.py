"""Endpoints of batches."""

from __future__ import annotations

from typing import Any

from forgekeeper.cli import declared, process_list, status
from forgekeeper.cli.console.batch import list_limits
from forgekeeper.cli.console.pages import PageRequest
from forgekeeper.cli.console.web_api.endpoints import endpoint, require_batch
from forgekeeper.cli.console.web_api.models import BatchAnswer, BatchesAnswer
from forgekeeper.guards import breaker
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.ledger.rates import Rate, find_rates
from forgekeeper.platform.database import now


@endpoint("/batches", BatchesAnswer)
def read_batches(request: PageRequest) -> dict[str, Any]:
    """Read every batch: schedule, open run, last run, backlog and holds, as in `forgekeeper status --json`."""
    found = status.gather_facts(request.settings)
    return {name: found[name] for name in ("at", "timetable_of", "batches")}


@endpoint("/batches/{batch}", BatchAnswer)
def read_batch(request: PageRequest) -> dict[str, Any]:
    """Read one batch: its declaration, its present state, and its limits with their use."""
    batch, settings, instant = require_batch(request), request.settings, now()
    schedules, _whose = process_list.read_schedules(Process.list_all(), instant, settings)
    rate = find_rates().get(batch.name, Rate())
    with status.TolerantReader() as reader:
        state = status.rated_facts(batch, schedules[batch.name], instant, reader, rate)
    used = RunTotal.read_usage(batch.name, breaker.NEXT_RUN)
    return {
        "at": instant,
        "batch": batch.name,
        "declared": declared.batch_facts(batch, settings),
        "state": state,
        "limits": [
            {"name": name, "limit": limit, "used": number}
            for name, limit, number in list_limits(settings, batch.name, used)
        ],
        "redis": {"trouble": reader.trouble},
    }
