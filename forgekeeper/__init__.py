"""The engine: everything that a batch should not have to think about.

It knows no batch, no table and no key of a forge by name.  What a batch is written with is imported from here; each
name is loaded when it is used first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgekeeper.audit.subjects import Subject as Subject
    from forgekeeper.batches import Record as Record
    from forgekeeper.batches import Threshold as Threshold
    from forgekeeper.database import Base as Table
    from forgekeeper.declaring.answers import Note as Note
    from forgekeeper.declaring.answers import Skip as Skip
    from forgekeeper.declaring.changes import Changes as Changes
    from forgekeeper.declaring.children import Children as Children
    from forgekeeper.declaring.items import Items as Items
    from forgekeeper.declaring.items import Kept as Kept
    from forgekeeper.declaring.rows import Rows as Rows
    from forgekeeper.declaring.rows import Total as Total
    from forgekeeper.deleting.decorators import batch as batch
    from forgekeeper.deleting.decorators import child as child
    from forgekeeper.runs.blocked import Blocked as Blocked
    from metrics.catalogue.metric import Counter as Counter

_HOMES = {
    "forgekeeper.audit.subjects": ("Subject",),
    "forgekeeper.batches": ("Record", "Threshold"),
    "forgekeeper.database": ("Base",),
    "forgekeeper.declaring.answers": ("Note", "Skip"),
    "forgekeeper.declaring.changes": ("Changes",),
    "forgekeeper.declaring.children": ("Children",),
    "forgekeeper.deleting.decorators": ("batch", "child"),
    "forgekeeper.declaring.items": ("Items", "Kept"),
    "forgekeeper.declaring.rows": ("Rows", "Total"),
    "forgekeeper.runs.blocked": ("Blocked",),
    "metrics.catalogue.metric": ("Counter",),
}
_NAMES = {name: (home, name) for home, names in _HOMES.items() for name in names}
_NAMES["Table"] = _NAMES.pop("Base")

__all__ = [
    "Blocked",
    "Changes",
    "Children",
    "Counter",
    "Items",
    "Kept",
    "Note",
    "Record",
    "Rows",
    "Skip",
    "Subject",
    "Table",
    "Threshold",
    "Total",
    "batch",
    "child",
]


def __getattr__(name: str) -> Any:
    """Load what a batch is written with, when it is used first."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, found = _NAMES[name]
    return getattr(import_module(home), found)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
