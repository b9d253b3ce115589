"""The engine: everything that a batch should not have to think about.

It knows no batch, no table and no key of a forge by name.  What a batch is written with is imported from here; each
name is loaded when it is used first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgekeeper.batches import Record as Record
    from forgekeeper.batches import Threshold as Threshold
    from forgekeeper.database import Base
    from forgekeeper.declaring.answers import Changes as Changes
    from forgekeeper.declaring.answers import Children as Children
    from forgekeeper.declaring.answers import Note as Note
    from forgekeeper.declaring.answers import Recoverable as Recoverable
    from forgekeeper.declaring.answers import Rows as Rows
    from forgekeeper.declaring.answers import Skip as Skip
    from forgekeeper.declaring.answers import Spared as Spared
    from forgekeeper.declaring.answers import Subject as Subject
    from forgekeeper.declaring.answers import Total as Total
    from forgekeeper.declaring.items import Items as Items
    from forgekeeper.declaring.items import Kept as Kept
    from forgekeeper.declaring.objects import Locations as Locations
    from forgekeeper.declaring.objects import NamedBy as NamedBy
    from forgekeeper.declaring.objects import Objects as Objects
    from forgekeeper.declaring.objects import Queue as Queue
    from forgekeeper.declaring.objects import Retry as Retry
    from forgekeeper.deleting.decorators import batch as batch
    from forgekeeper.deleting.decorators import child as child
    from forgekeeper.runs.preconditions import Blocked as Blocked
    from metrics.catalogue import Counter as Counter

    Table = Base

_NAMES = {
    "forgekeeper.batches": ["Record", "Threshold"],
    "forgekeeper.database": ["Table"],
    "forgekeeper.declaring.answers": [
        "Changes",
        "Children",
        "Note",
        "Recoverable",
        "Rows",
        "Skip",
        "Spared",
        "Subject",
        "Total",
    ],
    "forgekeeper.declaring.items": ["Items", "Kept"],
    "forgekeeper.declaring.objects": ["Locations", "NamedBy", "Objects", "Queue", "Retry"],
    "forgekeeper.deleting.decorators": ["batch", "child"],
    "forgekeeper.runs.preconditions": ["Blocked"],
    "metrics.catalogue": ["Counter"],
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load what a batch is written with, when it is used first."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), "Base" if name == "Table" else name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
