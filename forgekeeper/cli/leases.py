"""`leases`: which process works on what alone."""

from __future__ import annotations

from typing import Annotated, Any

import structlog
import typer

from forgekeeper.audit import acts
from forgekeeper.cli.connection import connected, require_redis
from forgekeeper.cli.console import Json, Problem, answer, emit, group, table
from forgekeeper.connections import client
from forgekeeper.coordination import leases as locks
from forgekeeper.runs.processes import identity

log = structlog.get_logger(__name__)


def leases_list(json: Json = False) -> None:
    """List the leases that are held, the one held for longest first."""
    with connected("leases"):
        require_redis()
        found = held()
    if json:
        emit({"leases": found})
    else:
        table("", ("lease", "holder", "since", "seconds left"), (one.values() for one in found))


leases = group("leases", "Leases: which process works on what alone, and since when.", leases_list)


@leases.command("break")
def leases_break(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `leases list` shows it.")], json: Json = False
) -> None:
    """Free a lease whose holder hangs.  The holder is not stopped: it learns of it at its next safe point."""
    with connected("leases"):
        require_redis()
        holder = next((one for one in locks.leases(client) if one.name == name), None)
        if holder is not None:
            acts.record("leases break", name, before={"holder": holder.holder, "since": holder.since})
        broken = holder is not None and locks.break_lease(client, name)
    if not broken:
        raise Problem(f"nobody holds the lease {name}; `forgekeeper leases list` shows those that are held")
    log.warning("lease broken", lease=name, by=identity())
    answer({"lease": name, "broken": True}, f"{name} is free", json=json)


def held() -> list[dict[str, Any]]:
    """Return the leases that are held as facts: name, holder, since, and the seconds left unless renewed."""
    return [one._asdict() | {"left": round(one.left.total_seconds(), 1)} for one in locks.leases(client)]
