"""What has to be true of the world before a batch may delete anything in it."""

from __future__ import annotations

from settings import Settings
from workers import clocks


def require(batch: str, settings: Settings) -> None:  # noqa: ARG001, no condition is one batch's alone yet
    """Raise `Blocked` where *batch*, or a child of that name, must not work; asked once, before it begins."""
    clocks.require(settings)
