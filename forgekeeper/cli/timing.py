"""What commands say of clocks that are wrong, and of what was written by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forgekeeper import clocks
from forgekeeper.batches import BATCHES
from forgekeeper.cli.console import moment
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import Settings


def compared(settings: Settings) -> dict[str, Any]:
    """Compare the clocks."""
    return {
        f"{found.clock}_to_{found.reference}": {
            "seconds": round(found.seconds, 3),
            "trouble": found.sentence() if found.exceeds(settings.clock_tolerance) else None,
        }
        for found in clocks.differences()
    }


def ahead() -> dict[str, Any]:
    """Sum up each batch's ticks whose time has not come."""
    return {name: found._asdict() for name in BATCHES if (found := JobRun.ahead(name)).ticks}


def warnings(clocks: dict[str, Any], ahead: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for whatever is wrong; nothing if all is well."""
    yield from (found["trouble"] for found in clocks.values() if found["trouble"])
    for name, found in ahead.items():
        yield (
            f"{name}: {found['ticks']} tick(s) were claimed before their time, up to that of "
            f"{moment(found['newest'])}: PostgreSQL's clock was ahead; they hold nothing back and run again"
        )
