"""Who works: queues, processes and what each works on; and who holds leases, and what documents show besides."""

from __future__ import annotations

from typing import Any

from forgekeeper.api.batches import all_declared
from forgekeeper.cli import process_list, status
from forgekeeper.cli.console.pages import Asked, page
from forgekeeper.ledger.processes import Process
from forgekeeper.platform.database import now


@page("/processes", "processes.html", "Queues and processes")
def processes(_asked: Asked) -> dict[str, Any]:
    """Show what waits in each queue, who lives, what each works on, and what is wrong with that."""
    with status.Looks() as looks:
        instant, known = now(), Process.known()
        queues = status.queue_facts(known, instant, looks)
    wrong = [*([looks.trouble] if looks.trouble else []), *process_list.warnings(known, instant)]
    return {"at": instant, "queues": queues, "processes": process_list.facts_of(known, instant), "warnings": wrong}


@page("/leases", "leases.html", "Leases and buckets")
def leases(_asked: Asked) -> dict[str, Any]:
    """Show who holds which lease, and what documents show of their own, as buckets; None where Redis is away."""
    with status.Looks() as looks:
        held = looks.ask(process_list.held)
        declared = {name: part for one in all_declared() for name, part in one.statuses.items()}
        parts = {name: (part.sentence, looks.ask(part.look)) for name, part in declared.items()}
    shown = {name: None if found is None else (say(found), _rows(found)) for name, (say, found) in parts.items()}
    return {"at": now(), "leases": held, "parts": shown, "warnings": [looks.trouble] if looks.trouble else []}


def _rows(found: Any) -> list[tuple[str, Any]]:
    """Return what a document shows of its own as rows: under which word it lies, and what."""
    if not isinstance(found, dict):
        return [("", found)]
    return [(word, one) for word, some in found.items() for one in (some if isinstance(some, list) else [some])]
