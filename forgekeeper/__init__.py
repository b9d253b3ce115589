"""The engine: everything that a batch should not have to think about.

It knows no batch, no table and no key of a forge by name.  Batches import their names from here; each name is loaded at
its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgekeeper.api.answers import Changes as Changes
    from forgekeeper.api.answers import Children as Children
    from forgekeeper.api.answers import Classes as Classes
    from forgekeeper.api.answers import Kept as Kept
    from forgekeeper.api.answers import Note as Note
    from forgekeeper.api.answers import Rows as Rows
    from forgekeeper.api.answers import Skip as Skip
    from forgekeeper.api.answers import Subject as Subject
    from forgekeeper.api.answers import Total as Total
    from forgekeeper.api.batches import Threshold as Threshold
    from forgekeeper.api.buckets import Buckets as Buckets
    from forgekeeper.api.housekeeping import Housekeeping as Housekeeping
    from forgekeeper.api.objects import Locations as Locations
    from forgekeeper.api.objects import NamedBy as NamedBy
    from forgekeeper.api.objects import Objects as Objects
    from forgekeeper.api.objects import Queue as Queue
    from forgekeeper.api.objects import Register as Register
    from forgekeeper.api.objects import Retry as Retry
    from forgekeeper.api.records import Record as Record
    from forgekeeper.api.refs import ChildPerRepository as ChildPerRepository
    from forgekeeper.api.refs import Refs as Refs
    from forgekeeper.api.refs import StatusQueue as StatusQueue
    from forgekeeper.engine.decorators import batch as batch
    from forgekeeper.engine.decorators import child as child
    from forgekeeper.engine.work import settings as settings
    from forgekeeper.guards.preconditions import Blocked as Blocked
    from forgekeeper.platform.database import Base
    from forgekeeper.sources.outbox import Outbox as Outbox
    from forgekeeper.sources.register.producer import Producer as Producer
    from metrics.catalogue import Counter as Counter

    Table = Base

_NAMES = {
    "forgekeeper.api.batches": ["Record", "Threshold"],
    "forgekeeper.platform.database": ["Table"],
    "forgekeeper.api.answers": [
        "Changes",
        "Children",
        "Classes",
        "Note",
        "Rows",
        "Skip",
        "Kept",
        "Subject",
        "Total",
    ],
    "forgekeeper.api.buckets": ["Buckets"],
    "forgekeeper.api.housekeeping": ["Housekeeping"],
    "forgekeeper.api.objects": ["Locations", "NamedBy", "Objects", "Queue", "Register", "Retry"],
    "forgekeeper.api.refs": ["ChildPerRepository", "Refs", "StatusQueue"],
    "forgekeeper.engine.decorators": ["batch", "child"],
    "forgekeeper.engine.work": ["settings"],
    "forgekeeper.guards.preconditions": ["Blocked"],
    "forgekeeper.sources.outbox": ["Outbox"],
    "forgekeeper.sources.register.producer": ["Producer"],
    "metrics.catalogue": ["Counter"],
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), "Base" if name == "Table" else name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
