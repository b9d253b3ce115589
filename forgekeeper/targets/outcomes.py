"""Outcomes of deleting objects, and the error of a store that cannot be believed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ObjectOutcome:
    """The result for one object; if it *failed*, the object may still be there."""

    state: Literal["deleted", "missing", "failed", "changed", "locked"]
    reason: str = ""


OBJECT_DELETED = ObjectOutcome("deleted")
OBJECT_MISSING = ObjectOutcome("missing")
OBJECT_CHANGED = ObjectOutcome("changed")
"""The object was kept: it was written after the last look at it."""
CLAIM_LOST = ObjectOutcome("locked", "another worker has claimed it")
OUTSIDE_PREFIXES_REASON = "outside the folders of FORGEKEEPER_OBJECT_PREFIXES"
"""Why an object stays: deletion is limited to some folders."""


class StoreUnavailable(Exception):
    """The store's answers about objects that are not in *confirmed* do not count.

    If the deletion had not *begun*, no request was sent that could delete an object.
    """

    error_kind = "object_storage"
    began = True

    def __init__(self, message: str, confirmed: dict[str, ObjectOutcome]) -> None:
        super().__init__(message)
        self.confirmed = confirmed
