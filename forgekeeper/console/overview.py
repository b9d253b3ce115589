"""The first screen: what is wrong, then where one is, then each batch."""

from __future__ import annotations

from typing import Any

from forgekeeper.cli import status
from forgekeeper.console.pages import Asked, page


@page("/", "overview.html", "Now", place="Now")
def overview(asked: Asked) -> dict[str, Any]:
    """Show every batch, queue and process, and what is wrong."""
    return status.gather(asked.settings)
