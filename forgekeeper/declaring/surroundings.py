"""What a batch may know of the process that it runs in."""

from __future__ import annotations

from contextvars import ContextVar

from forgekeeper.settings import Settings

SETTINGS: ContextVar[Settings] = ContextVar("settings")

NUMBER: ContextVar[int | None] = ContextVar("number", default=None)


def settings() -> Settings:
    """Return the settings of this process; for use within a batch's function, while it runs.

    Raises `LookupError` elsewhere: a declaration must not depend on settings.
    """
    return SETTINGS.get()


def run_number() -> int | None:
    """Return the number of this run, None beside the ledger."""
    return NUMBER.get()
