"""Objects in stores as a target: if a store does not answer, the objects in other stores are still deleted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import structlog

from forgekeeper.engine.target import Deleted, Fence, KeptItem, Target
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.queue import QueueItem
from forgekeeper.sources.register.entries import UploadEntry
from forgekeeper.targets import stores
from forgekeeper.targets.objects import ObjectStore
from forgekeeper.targets.outcomes import OUTSIDE, StoreUnavailable

log = structlog.get_logger(__name__)


Placed = TypeVar("Placed", QueueItem, UploadEntry)
"""An item with the path of an object."""


class Conditions(NamedTuple):
    """Instants for paths, see `ObjectStore.delete`."""

    unless_changed_since: Mapping[str, datetime] | None = None
    uploads_begun_before: Mapping[str, datetime] | None = None


class ObjectTarget(Target[Placed]):
    """The object stores of one run.

    The run fails if the store at a *needed* location is unavailable.  Without *needed*, each configured store is opened
    when an item is in it.  *away* has the error of each store that is unavailable.
    """

    name = "path"

    def __init__(
        self,
        settings: Settings,
        needed: Sequence[str] = (),
        conditions: Callable[[Sequence[Placed]], Conditions] = lambda _items: Conditions(),
    ) -> None:
        self.away: dict[str | None, Exception] = {}
        self._settings, self._needed = settings, needed
        self._conditions: Callable[[Sequence[Placed]], Conditions] = conditions
        self._stores: dict[str, ObjectStore | None] = {}

    @property
    def available(self) -> list[str]:
        """The locations of the open stores."""
        return [name for name, store in self._stores.items() if store is not None and name not in self.away]

    def open(self, location: str | None) -> None:
        """Open the store at the location, unless it is open, unavailable or not configured."""
        try:
            self._store(location)
        except StoreUnavailable as error:
            self.interrupted(location, error)

    def _store(self, location: str | None) -> ObjectStore | None:
        if location is None or location in self.away:
            return None
        if location not in self._stores:
            self._stores[location] = stores.at(location, self._settings)
        return self._stores[location]

    def scopes(self) -> list[str | None]:
        # Versions with a single store recorded None.
        return [None, *self._needed] if self._needed else list(self._settings.object_stores)

    def became(self, scope: str | None, until: float, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        location, there = scope or self._needed[-1], dict[str, bool]()
        try:
            if (store := self._store(location)) is not None:
                there = store.present([row["path"] for row in rows], until=until)
        except StoreUnavailable as error:
            if location in self._needed:
                self.interrupted(location, error)
        states = {True: "kept", False: "deleted", None: None}
        return [states[there.get(row["path"])] for row in rows]

    def look(self, scope: str | None, items: Sequence[Placed]) -> dict[Placed, KeptItem]:
        self.open(scope)
        return dict.fromkeys(items, KeptItem(None, "unavailable")) if scope in self.away else {}

    def delete(self, scope: str | None, items: Sequence[Placed], fence: Fence[Placed]) -> Deleted[Placed]:
        store, error = self._store(scope), None
        assert store is not None, "the items of other scopes were kept"
        of_path = defaultdict[str, list[Placed]](list)
        for one in items:
            of_path[one.path].append(one)

        def find_lost(paths: Sequence[str]) -> list[str]:
            lost = set(fence.find_lost([one for path in paths for one in of_path[path]]))
            return [path for path in paths if lost.issuperset(of_path[path])]

        conditions = self._conditions(items)._asdict()
        try:
            known = store.delete(list(of_path), until=fence.until, find_lost=find_lost, **conditions)
        except StoreUnavailable as unavailable:
            known, error = unavailable.known, unavailable
        outside = [path for path, outcome in known.items() if OUTSIDE in outcome.reason]
        if outside:
            log.error("objects not deleted", reason=OUTSIDE, objects=len(outside), first=outside[0])
        states = {one: known[one.path] for one in items if one.path in known}
        return Deleted(states, error=error, began=error is None or error.began)

    def interrupted(self, scope: str | None, error: Exception) -> None:
        log.error("object store unavailable", location=scope, error=str(error))
        self.away[scope] = error
