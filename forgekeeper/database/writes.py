"""Writes of the engine, in sessions that may only read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from forgekeeper.database import database

WRITE = "set transaction read write; "


@contextmanager
def writing() -> Iterator[None]:
    """Open a transaction that may write."""
    with database.atomic():
        yield
