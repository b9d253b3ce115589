"""A queue as a source of objects: items are claimed in its table, removed, retried or put back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from forgekeeper.api.objects import ObjectOwner, Objects
from forgekeeper.audit.deletions import AuditItem
from forgekeeper.engine.object_target import ObjectTarget
from forgekeeper.engine.run import Run
from forgekeeper.engine.source import KeyedSource
from forgekeeper.engine.target import ItemState, KeptItem
from forgekeeper.guards.preconditions import Blocked
from forgekeeper.platform.database import exclusions, now
from forgekeeper.platform.database.queries import START_POSITION, KeyPage, filter_keys, list_positions
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.queue import QueueItem, QueueTable
from forgekeeper.targets import stores

log = structlog.get_logger(__name__)


class QueueSource(KeyedSource[QueueItem]):
    """The queue of an answer, for one run: items at the locations of stores that are available."""

    def __init__(self, objects: Objects[Any], run: Run[Any]) -> None:
        self.record, self.chunk_size, self.visibility = objects.record, objects.chunk, run.settings.object_visibility
        self.target = ObjectTarget[QueueItem](run.settings, objects.locations)
        self._objects, self._settings = objects, run.settings
        self._table = QueueTable(objects, run.declared.batch.name)
        if objects.share is not None:
            self.share = exclusions.condition_sql(objects.queue.model, objects.share)

    def begin_run(self) -> dict[str, Any]:
        for location in self._objects.locations:
            self.target.open_store(location)
        return {}

    def end_run(self, stopped: str | None, error: Exception | None) -> tuple[dict[str, Any], Exception | None]:
        if error is not None:
            return {}, None
        due = self._table.select_not_excluded(now())
        left = self._table.find_elsewhere(self.target.available_locations, due)
        unavailable = next(iter(self.target.store_errors.values()), None)
        stopped = "store_unavailable" if unavailable else "no_store" if left else stopped or "drained"
        fields = {"stopped": stopped, "remaining": due.count()}
        return fields, unavailable or (_no_store(*left) if left else None)

    def find_scope(self, one: QueueItem) -> str | None:
        return one.location

    def exclusion_key(self, one: QueueItem) -> tuple[int | None, str]:
        return one.project_id, one.path

    def item_key(self, one: QueueItem) -> int:
        return one.id

    def find_keys(self, page: KeyPage) -> list[int]:
        due = self._table.restrict_to_locations(self.target.available_locations, self._table.select_not_excluded(now()))
        by = self._objects.queue.due_at
        return [one.key for one in list_positions(due, by, START_POSITION, limit=page.limit, without=page.without)]

    def find_due(self, keys: Sequence[int]) -> set[int]:
        return filter_keys(self._objects.queue.model.select(), keys)

    def claim_next(self, page: KeyPage) -> list[QueueItem]:
        visibility = self._settings.object_visibility
        return self._table.claim(now(), page, locations=self.target.available_locations, visibility=visibility)

    def find_kept(self, items: Sequence[QueueItem]) -> dict[QueueItem, KeptItem]:
        return find_referenced_items(self._objects, items, self._settings)

    def mark_for_deletion(
        self, items: Sequence[QueueItem], kept: Mapping[QueueItem, ItemState]
    ) -> dict[QueueItem, AuditItem | ItemState]:
        ours = self._table.lock_still_claimed(items)
        for one, became in kept.items():
            log.error("object kept", reason=became.reason, path=one.path)
        return {one: kept.get(one) or _make_audit_item(one) for one in items if one.id in ours}

    def find_lost(self, items: Sequence[QueueItem]) -> list[QueueItem]:
        claimed = self._table.find_still_claimed(items)
        return [one for one in items if one.id not in claimed]

    def settle(self, states: Mapping[QueueItem, ItemState]) -> dict[str, int]:
        for one in (one for one, became in states.items() if became.state == "changed"):
            log.error("object kept, it was written again", path=one.path)
        reference = self._objects.unless
        unsure = None if reference is None or reference.unsure is None else KeptItem(reference.unsure.sentence)
        failed = {one for one, became in states.items() if became.state == "failed" or became == unsure}
        self._table.remove({one.id: one.path for one in states if one not in failed})
        if failed and (given_up := self._table.record_failures(list(failed))):
            log.error("objects given up", objects=given_up)
        return Counter(became.state for became in states.values())

    def settle_earlier(self, rows: Sequence[Mapping[str, Any]]) -> list[bool]:
        removed = self._table.remove({row["id"]: row["path"] for row in rows})
        return [row["id"] in removed for row in rows]

    def put_back(self, items: Sequence[QueueItem]) -> None:
        self._table.put_back(items, now())


def _no_store(key: int, location: str | None) -> Blocked:
    if location is None:
        return Blocked("no_store", f"object {key} has a location that its batch does not name")
    return Blocked("no_store", f"no object store {location!r} is configured; set FORGEKEEPER_OBJECT_STORES")


def _make_audit_item(one: QueueItem) -> AuditItem:
    return AuditItem(one.id, one.path, {"path": one.path, "project_id": one.project_id, "due": one.created_at})


def find_referenced_items(
    objects: Objects[Any], items: Sequence[QueueItem], settings: Settings
) -> dict[QueueItem, KeptItem]:
    """Return the items whose objects rows of other tables name, and why each is kept."""
    if objects.unless is None:
        return {}
    owner, unsure = objects.unless
    named = _find_referenced_by(owner, items, settings)
    uncertain = set() if unsure is None else _find_referenced_by(unsure, list(named), settings)
    return {one: KeptItem(unsure.sentence if one in uncertain else owner.sentence) for one in named}


def _find_referenced_by(owner: ObjectOwner, items: Sequence[QueueItem], settings: Settings) -> set[QueueItem]:
    """Return the items whose objects the *owner* names."""
    found = set[QueueItem]()
    for location in {str(one.location) for one in items}:
        here = [one for one in items if str(one.location) == location]
        named = stores.find_named_paths(owner, location, [one.path for one in here], settings)
        found |= {one for one in here if one.path in named}
    return found
