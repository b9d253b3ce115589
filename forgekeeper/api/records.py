"""The kinds of records that a batch declares, and the fields of its outcome that count them.

They follow from the answer of the batch, unless `@batch` names them (``records=``, ``more_records=``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

Fields = tuple[str, ...]
"""Fields of an outcome, added up."""


@dataclass(frozen=True)
class Record:
    """A kind of record that a batch works on, and the fields of its outcome that count it.

    *errors* maps each kind of error to the fields that count it, or to no fields if each bad record is counted when it
    fails.  *objective* is the longest time that a due record may wait.  With *backlog*, due records are counted without
    an objective, too.  With *refused*, the records are in quarantine.  *bytes* are the fields that add up their sizes.
    *excluded_by* names the means to exclude them: their ``project``, the ``pattern`` of their names.

    >>> record = Record("pipeline", processed=("deleted",), objective=timedelta(hours=1))
    """

    name: str
    examined: Fields = ()
    processed: Fields = ()
    errors: Mapping[str, Fields] = field(default_factory=dict)
    objective: timedelta | None = None
    backlog: bool = False
    refused: bool = False
    bytes: Fields = ()
    excluded_by: tuple[str, ...] = ()

    @property
    def may_be_quarantined(self) -> bool:
        """Whether such records may be in quarantine, as bad or refused records."""
        return self.refused or bool({"database", "state_transition"} & self.errors.keys())
