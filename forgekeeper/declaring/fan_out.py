"""Fan-out as values: what a run asks for, and what came of it; how it is done is the delivery's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Keyed = tuple[str, tuple[Any, ...]]
"""A message's id and the child's arguments: ids, as JSON has them."""


@dataclass(frozen=True)
class Enqueued:
    """How many were put in, how many were on their way already or skipped by a hook, and whether we stopped early."""

    enqueued: int = 0
    deduplicated: int = 0
    queue_full: bool = False
