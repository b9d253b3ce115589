"""Who does what with a table: each model says it of its own."""

from __future__ import annotations

from typing import NamedTuple

PROCESSES = ("scheduler", "worker", "exporter")
"""Who may have a role of its own.  Whoever is at a terminal may do by hand what all of them do, and more."""
WORK, BOTH = ("worker",), ("scheduler", "worker")
SEEN = ("worker", "exporter")
PERSON: tuple[str, ...] = ()
"""No process of ours: only commands."""


class Use(NamedTuple):
    """Which processes read a table, and what else is done to it: privilege, columns if not all, processes.

    A row is locked with the privilege to update it; where none is updated, the key's will do.
    """

    readers: tuple[str, ...]
    changes: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = ()


WRITES = tuple((privilege, (), WORK) for privilege in ("insert", "update", "delete"))
EVERYTHING = Use(WORK, WRITES)
"""Of a table that does not say: whoever works may do everything."""
