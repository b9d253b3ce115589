"""Boot: the modules that declare batches are imported, and their actors made."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from forgekeeper.process.actors import declare
from forgekeeper.process.broker import broker


def load_batches(modules: Iterable[str] = ("workers",)) -> None:
    """Import *modules*, which declare batches, and make actors of what they declare; idempotent."""
    for module in modules:
        import_module(module)
    declare(broker)
