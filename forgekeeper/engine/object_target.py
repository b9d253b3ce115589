"""Objects in stores as a target: if a store does not answer, the objects in other stores are still deleted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import structlog

from forgekeeper.engine.target import DeletionResult, Fence, ItemTarget, KeptItem
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.queue import QueueItem
from forgekeeper.sources.register.entries import UploadEntry
from forgekeeper.targets import stores
from forgekeeper.targets.objects import ObjectStore
from forgekeeper.targets.outcomes import OUTSIDE_PREFIXES_REASON, StoreUnavailable

log = structlog.get_logger(__name__)


Placed = TypeVar("Placed", QueueItem, UploadEntry)
"""An item with the path of an object."""


class DeleteConditions(NamedTuple):
    """Instants for paths, see `ObjectStore.delete`."""

    unless_changed_since: Mapping[str, datetime] | None = None
    uploads_begun_before: Mapping[str, datetime] | None = None


class ObjectTarget(ItemTarget[Placed]):
    """The object stores of one run.

    The run fails if a store of *required_locations* is unavailable.  Without *required_locations*, each
    configured store is opened when an item is in it.  *store_errors* has the error of each store that is unavailable.
    """

    audit_key = "path"

    def __init__(
        self,
        settings: Settings,
        required_locations: Sequence[str] = (),
        conditions: Callable[[Sequence[Placed]], DeleteConditions] = lambda _items: DeleteConditions(),
    ) -> None:
        self.store_errors: dict[str | None, Exception] = {}
        self._settings, self._required_locations = settings, required_locations
        self._conditions: Callable[[Sequence[Placed]], DeleteConditions] = conditions
        self._stores: dict[str, ObjectStore | None] = {}

    @property
    def available_locations(self) -> list[str]:
        """The locations of the open stores."""
        return [name for name, store in self._stores.items() if store is not None and name not in self.store_errors]

    def open_store(self, location: str | None) -> None:
        """Open the store at the location, unless it is open, unavailable or not configured."""
        try:
            self._get_store(location)
        except StoreUnavailable as error:
            self.handle_error(location, error)

    def _get_store(self, location: str | None) -> ObjectStore | None:
        if location is None or location in self.store_errors:
            return None
        if location not in self._stores:
            self._stores[location] = stores.for_location(location, self._settings)
        return self._stores[location]

    def list_scopes(self) -> list[str | None]:
        # Versions with a single store recorded None.
        return [None, *self._required_locations] if self._required_locations else list(self._settings.object_stores)

    def find_states_after_crash(
        self, scope: str | None, until: float, rows: Sequence[Mapping[str, Any]]
    ) -> list[str | None]:
        location, there = scope or self._required_locations[-1], dict[str, bool]()
        try:
            if (store := self._get_store(location)) is not None:
                there = store.check_present([row["path"] for row in rows], until=until)
        except StoreUnavailable as error:
            if location in self._required_locations:
                self.handle_error(location, error)
        states = {True: "kept", False: "deleted", None: None}
        return [states[there.get(row["path"])] for row in rows]

    def find_undeletable(self, scope: str | None, items: Sequence[Placed]) -> dict[Placed, KeptItem]:
        self.open_store(scope)
        return dict.fromkeys(items, KeptItem(None, "unavailable")) if scope in self.store_errors else {}

    def delete(self, scope: str | None, items: Sequence[Placed], fence: Fence[Placed]) -> DeletionResult[Placed]:
        store, error = self._get_store(scope), None
        assert store is not None, "the items of other scopes were kept"
        of_path = defaultdict[str, list[Placed]](list)
        for one in items:
            of_path[one.path].append(one)

        def find_lost(paths: Sequence[str]) -> list[str]:
            lost = set(fence.find_lost([one for path in paths for one in of_path[path]]))
            return [path for path in paths if lost.issuperset(of_path[path])]

        conditions = self._conditions(items)._asdict()
        try:
            known = store.delete(
                list(of_path), until=fence.until, find_lost=find_lost, meanwhile=fence.prepare_next, **conditions
            )
        except StoreUnavailable as unavailable:
            known, error = unavailable.confirmed, unavailable
        outside = [path for path, outcome in known.items() if OUTSIDE_PREFIXES_REASON in outcome.reason]
        if outside:
            log.error("objects not deleted", reason=OUTSIDE_PREFIXES_REASON, objects=len(outside), first=outside[0])
        states = {one: known[one.path] for one in items if one.path in known}
        return DeletionResult(states, error=error, has_begun=error is None or error.began)

    def handle_error(self, scope: str | None, error: Exception) -> None:
        log.error("object store unavailable", location=scope, error=str(error))
        self.store_errors[scope] = error
