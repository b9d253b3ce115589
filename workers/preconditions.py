"""What has to be true of the world before a batch may delete anything in it."""

from __future__ import annotations

from settings import Settings


def require(batch: str, settings: Settings) -> None:
    """Raise `Blocked` where *batch*, or a child of that name, must not work; asked once, before it begins."""
