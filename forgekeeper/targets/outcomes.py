"""Outcomes of deleting objects, and the error of a store that cannot be believed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ObjectOutcome:
    """The result for one object; if it *failed*, the object may still be there."""

    state: Literal["deleted", "missing", "failed", "changed", "locked"]
    reason: str = ""


DELETED = ObjectOutcome("deleted")
MISSING = ObjectOutcome("missing")
CHANGED = ObjectOutcome("changed")
"""Left alone: it was written since it was last looked at."""
LOST = ObjectOutcome("locked", "another worker has claimed it")
OUTSIDE = "outside the folders of FORGEKEEPER_OBJECT_PREFIXES"
"""Why an object stays: deletion is limited to some folders."""


class StoreUnavailable(Exception):
    """Nothing is to be believed about any object of this call that is not in *known*.

    If it had not *begun*, nothing was asked for that could delete an object.
    """

    error_kind = "object_storage"
    began = True

    def __init__(self, message: str, known: dict[str, ObjectOutcome]) -> None:
        super().__init__(message)
        self.known = known
