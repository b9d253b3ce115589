"""Endpoints of holds and exclusions."""

from __future__ import annotations

from typing import Any

from forgekeeper.cli import exclude, status
from forgekeeper.cli.console.pages import PageRequest
from forgekeeper.cli.console.web_api.endpoints import endpoint
from forgekeeper.cli.console.web_api.models import ExclusionsAnswer, HoldsAnswer
from forgekeeper.ledger.holds import Hold
from forgekeeper.platform.database import now
from forgekeeper.platform.database.exclusions import Exclusion


@endpoint("/holds", HoldsAnswer)
def read_holds(_request: PageRequest) -> dict[str, Any]:
    """Read the holds in force of every batch: pauses, stops, and holds of the circuit breaker and of new batches."""
    return {"at": now(), "holds": [{"batch": hold.batch} | status.hold_facts(hold) for hold in Hold.list_active()]}


@endpoint("/exclusions", ExclusionsAnswer)
def read_exclusions(_request: PageRequest) -> dict[str, Any]:
    """Read the exclusions in force, as in `forgekeeper exclude list --json`."""
    return exclude.list_facts(Exclusion.list_in_force())
