"""Pages of work: queues and processes; leases and parts that batches declare."""

from __future__ import annotations

from typing import Any

from forgekeeper.api.batches import all_declared
from forgekeeper.cli import process_list, status
from forgekeeper.cli.console.pages import PageRequest, page
from forgekeeper.cli.console.texts import TranslatableText
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.platform.database import now


@page("/processes", "processes.html", TranslatableText("Queues and processes"))
def show_processes(_asked: PageRequest) -> dict[str, Any]:
    """Show each queue's messages, each process and its work, and warnings."""
    with status.TolerantReader() as looks:
        instant, known = now(), Process.list_all()
        queues = status.queue_facts(known, instant, looks)
    wrong = [*([looks.trouble] if looks.trouble else []), *process_list.describe_warnings(known, instant)]
    return {"at": instant, "queues": queues, "processes": process_list.process_facts(known, instant), "warnings": wrong}


@page("/leases", "leases.html", TranslatableText("Leases and buckets"))
def show_leases(_asked: PageRequest) -> dict[str, Any]:
    """Show leases and parts declared by batches, such as buckets; None if Redis is away."""
    with status.TolerantReader() as looks:
        held = looks.read_or_none(process_list.list_held_leases)
        declared = {name: part for one in all_declared() for name, part in one.statuses.items()}
        parts = {name: (part.sentence, looks.read_or_none(part.read)) for name, part in declared.items()}
    shown = {
        name: None if found is None else (say(found), _list_part_rows(found)) for name, (say, found) in parts.items()
    }
    return {"at": now(), "leases": held, "parts": shown, "warnings": [looks.trouble] if looks.trouble else []}


def _list_part_rows(found: Any) -> list[tuple[str, Any]]:
    """Return the facts of a declared part as rows of a word and a fact."""
    if not isinstance(found, dict):
        return [("", found)]
    return [(word, one) for word, some in found.items() for one in (some if isinstance(some, list) else [some])]
