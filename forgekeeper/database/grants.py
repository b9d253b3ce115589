"""What each process does with a table: each model says it of its own."""

from __future__ import annotations

from typing import NamedTuple

PROCESSES = ("scheduler", "worker", "exporter")
"""The processes that may have roles of their own.  A person at a terminal may do what all of them do, and more."""
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
"""Of a table that does not say: workers may do everything."""
