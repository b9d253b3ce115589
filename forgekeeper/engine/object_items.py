"""Objects in stores as items of a run: a store that does not answer stops its objects only."""

from __future__ import annotations

from typing import Any

import structlog

from forgekeeper.api.items import Items, One
from forgekeeper.api.objects import Objects
from forgekeeper.engine.run import Run

log = structlog.get_logger(__name__)


class ObjectItems(Items[One]):
    """The objects of an answer, for one run, with the error of each store that is away."""

    def __init__(self, objects: Objects[Any], run: Run[Any]) -> None:
        self.record, self.chunk = objects.record, objects.chunk
        self._objects, self._settings = objects, run.settings
        self._away: dict[str | None, Exception] = {}

    def interrupted(self, scope: str | None, error: Exception) -> None:
        """Log that a store does not answer; the objects in other stores are deleted all the same."""
        log.error("object store unavailable", location=scope, error=str(error))
        self._away[scope] = error
