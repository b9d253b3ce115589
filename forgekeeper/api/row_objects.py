"""The object that a row names, by the columns with its path and location."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import peewee as pw

from forgekeeper.api.mistakes import Mistake
from forgekeeper.platform.database import Base

FORGE_COLUMNS = ("project_id", "file_store", "store_dir", "file", "pick_up_at")
"""Columns of a forge's own outbox; forgekeeper's outbox has the same columns."""


@dataclass(frozen=True)
class RowObject:
    """An object at *path* in the store that the number in the column *location* means.

    *theirs* is the forge's own outbox, for ``FORGEKEEPER_OBJECTS=theirs``.
    """

    path: pw.Field[Any]
    _: KW_ONLY
    location: pw.Field[Any]
    theirs: type[Base] | None = None

    def __post_init__(self) -> None:
        """Refuse columns that name no object."""
        name = type(self).__name__
        if not isinstance(self.path, pw.TextField):
            raise Mistake(f"{name}: path has to be a text column (TextField)")
        if not isinstance(self.location, pw.IntegerField) or self.location.model is not self.path.model:
            model = self.path.model.__name__
            raise Mistake(f"{name} of {model}: location has to be a column of {model} for whole numbers (IntegerField)")
        if self.theirs is not None:
            lacks = [column for column in FORGE_COLUMNS if column not in self.theirs._meta.columns]
            if lacks:
                raise Mistake(f"{name}: {self.theirs.__name__} lacks the column {lacks[0]}, which objects need")
