"""Objects that a queue names: claimed, looked at, deleted in their stores, and removed from the queue or retried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import peewee as pw
import structlog

from forgekeeper.api.answers import Backlog
from forgekeeper.api.batches import batch_of
from forgekeeper.api.items import Deleted, Ended, Fence, Item, Items, Kept, Page, State
from forgekeeper.api.objects import Objects, Owner
from forgekeeper.api.shown import BUSY, PASSED_OVER, Look, Part, Refused, numbers
from forgekeeper.engine.items import deleted_at, stood_at
from forgekeeper.engine.object_items import ObjectItems
from forgekeeper.engine.run import Run
from forgekeeper.guards.preconditions import Blocked
from forgekeeper.platform.database import exclusions, now, queries
from forgekeeper.platform.database.naming import relation_name
from forgekeeper.platform.database.queries import START, Stake, among, positions
from forgekeeper.platform.database.survey import expected, held, selected
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.queue import QueueItem, QueueTable
from forgekeeper.targets import stores
from forgekeeper.targets.objects import ObjectStore, is_below, is_normal
from forgekeeper.targets.outcomes import StoreUnavailable

log = structlog.get_logger(__name__)


def bind_objects(objects: Objects[Any], run: Run[Any]) -> Items[QueueItem]:
    """Return the objects of an answer as items of one run."""
    return _QueuedObjects(objects, run)


class _QueuedObjects(ObjectItems[QueueItem]):
    """The objects of an answer, for one run."""

    project = "project_id"

    def __init__(self, objects: Objects[Any], run: Run[Any]) -> None:
        super().__init__(objects, run)
        self._table = QueueTable(objects, run.declared.batch.name)
        self._stores: dict[str, ObjectStore] = {}
        self._left: tuple[int, str | None] | None = None

    def begin(self) -> dict[str, Any]:
        for location in self._objects.locations:
            try:
                store = stores.at(location, self._settings)
            except StoreUnavailable as error:
                self.interrupted(location, error)
            else:
                self._stores |= {} if store is None else {location: store}
        self.visibility = self._settings.object_visibility
        return {}

    def end(self, ended: Ended) -> dict[str, Any]:
        if ended.error is not None:
            return {}
        due = self._table.not_excluded(now())
        self._left = self._table.elsewhere(self._stores, due)
        stopped = "store_unavailable" if self._away else "no_store" if self._left else ended.stopped or "drained"
        return {"stopped": stopped, "remaining": due.count()}

    def failure(self) -> Exception | None:
        if self._away:
            return next(iter(self._away.values()))
        return None if self._left is None else _no_store(*self._left)

    def interrupted(self, scope: str | None, error: Exception) -> None:
        super().interrupted(scope, error)
        self._stores.pop(str(scope), None)

    def scope(self, one: QueueItem) -> str | None:
        return one.location

    def scopes(self) -> list[str | None]:
        # None is of a version that had one store.
        return [None, *self._objects.locations]

    def due_of(self, keys: Sequence[int]) -> set[int]:
        return among(self._objects.queue.model.select(), keys)

    def key(self, one: QueueItem) -> int:
        return one.id

    def next(self, page: Page) -> list[int]:
        due = self._table.at(self._stores, self._table.not_excluded(now()))
        by = self._objects.queue.due_at
        return [one.key for one in positions(due, by, START, limit=page.limit, without=page.without)]

    def claim(self, page: Page) -> list[QueueItem]:
        return self._table.claim(
            now(),
            locations=self._stores,
            visibility=self._settings.object_visibility,
            limit=page.limit,
            only=page.only,
            without=page.without,
        )

    def look(self, items: Sequence[QueueItem]) -> dict[QueueItem, Kept]:
        return find_kept(self._objects, items, self._settings)

    def mark(self, items: Sequence[QueueItem], kept: Mapping[QueueItem, State]) -> dict[QueueItem, Item | State]:
        ours = self._table.lock_ours(items)
        for one, became in kept.items():
            log.error("object kept", reason=became.reason, path=one.path)
        return {one: kept.get(one) or _item(one) for one in items if one.id in ours}

    def delete(self, items: Sequence[QueueItem], fence: Fence[QueueItem]) -> Deleted[QueueItem]:
        return deleted_at(self._stores[str(items[0].location)], {one: one.path for one in items}, fence)

    def find_lost(self, items: Sequence[QueueItem]) -> list[QueueItem]:
        claimed = self._table.find_ours(items)
        return [one for one in items if one.id not in claimed]

    def settle(self, states: Mapping[QueueItem, State]) -> dict[str, int]:
        for one in (one for one, became in states.items() if became.state == "changed"):
            log.error("object kept, it was written again", path=one.path)
        reference = self._objects.unless
        unsure = None if reference is None or reference.unsure is None else Kept(reference.unsure.sentence)
        failed = {one for one, became in states.items() if became.state == "failed" or became == unsure}
        self._table.remove({one.id: one.path for one in states if one not in failed})
        if failed and (given_up := self._table.fail(list(failed))):
            log.error("objects given up", objects=given_up)
        return Counter(became.state for became in states.values())

    def settle_earlier(self, rows: Sequence[Mapping[str, Any]]) -> list[bool]:
        removed = self._table.remove({row["id"]: row["path"] for row in rows})
        return [row["id"] in removed for row in rows]

    def put_back(self, items: Sequence[QueueItem]) -> None:
        self._table.put_back(items, now())

    def became(self, scope: str | None, until: float, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        location = scope or self._objects.locations[-1]
        store = self._stores.get(location)
        try:
            return [None] * len(rows) if store is None else stood_at(store, rows, until=until)
        except StoreUnavailable as error:
            self.interrupted(location, error)
            return [None] * len(rows)


def _no_store(key: int, location: str | None) -> Blocked:
    if location is None:
        return Blocked("no_store", f"object {key} has a location that its batch does not name")
    return Blocked("no_store", f"no object store {location!r} is configured; set FORGEKEEPER_OBJECT_STORES")


def _item(one: QueueItem) -> Item:
    return Item(one.id, one.path, {"path": one.path, "project_id": one.project_id, "due": one.created_at})


def find_kept(objects: Objects[Any], items: Sequence[QueueItem], settings: Settings) -> dict[QueueItem, Kept]:
    """Return the items whose objects rows of other tables name, and why each is kept."""
    if objects.unless is None:
        return {}
    owner, unsure = objects.unless
    named = _find_named(owner, items, settings)
    uncertain = set() if unsure is None else _find_named(unsure, list(named), settings)
    return {one: Kept(unsure.sentence if one in uncertain else owner.sentence) for one in named}


def _find_named(owner: Owner, items: Sequence[QueueItem], settings: Settings) -> set[QueueItem]:
    """Return the items whose objects the *owner* names."""
    found = set[QueueItem]()
    for location in {str(one.location) for one in items}:
        here = [one for one in items if str(one.location) == location]
        named = stores.named_by(owner, location, [one.path for one in here], settings)
        found |= {one for one in here if one.path in named}
    return found


def find_some_objects(objects: Objects[Any], location: str) -> list[str]:
    """Return the paths of some objects at the location: of rows that keep theirs, and of objects to delete."""
    sample = None if objects.unless is None else getattr(objects.unless.owner, "sample", None)
    named = [] if sample is None else sample(location)
    return [*named, *QueueTable(objects, "").sample(location)]


def count_backlog(objects: Objects[Any], batch: str, now: datetime) -> Backlog:
    """Count the objects to delete."""
    due_at = objects.queue.due_at
    return Backlog.of(QueueTable(objects, batch).not_excluded(now).order_by(due_at), oldest=due_at)


def stake_of_objects(objects: Objects[Any], batch: str, now: datetime) -> Stake:
    """Return what the breaker weighs: the objects to delete, of these and those that other rows name."""
    owners = () if objects.unless is None else (objects.unless.owner,)
    return Stake.rows(QueueTable(objects, batch).not_excluded(now), of=owners)


def refused_objects(objects: Objects[Any], batch: str) -> Refused:
    """Return what lies in quarantine: the objects that were given up."""
    table = QueueTable(objects, batch)
    return Refused(
        kind=objects.called,
        record=f"dead_{objects.called}",
        count=lambda: queries.count(table.given_up()),
        entries=lambda _settings, limit: table.entries(limit),
        retry=lambda keys: table.retry(numbers(keys)),
        discard=lambda keys: table.discard(numbers(keys)),
    )


def preview_objects(objects: Objects[Any], look: Look) -> Iterator[Part]:
    """Count the objects that would be deleted, by the queue alone: the stores are not asked."""
    table, due_at = QueueTable(objects, batch_of(look.batch)), objects.queue.due_at
    part, bad, position = look.part(objects.record), look.passed_over(objects.record), START
    query = table.not_excluded(look.now)
    due = selected(query, due_at)
    part.keep(PASSED_OVER, due.among(bad))
    model = objects.queue.model
    locked = model.select().where(pw.SQL(held(relation_name(model), alias='"t1"')))
    while places := positions(query, due_at, position, limit=objects.chunk, without=bad):
        keys = [place.key for place in places]
        items, busy = table.items(keys), among(locked, keys)
        kept = find_kept(objects, items, look.settings)
        for one in items:
            if reason := _reason_to_stay(one, kept, look.settings, busy=one.id in busy):
                part.keep(reason, 1)
            else:
                part.one(str(one.id), one.path, one.claimed_until, size=look.size, project=one.project_id)
        position = places[-1]
        look.told(part)
        if look.over():
            part.guess(expected(due, bad))
            break
    part.keep(exclusions.REASON, queries.count(table.due(look.now).where(table.excluded)))
    part.keep("fresh", queries.count(table.later(look.now)))
    part.keep("dead", queries.count(table.given_up()))
    yield part


def _reason_to_stay(one: QueueItem, kept: Mapping[QueueItem, Kept], settings: Settings, *, busy: bool) -> str | None:
    """Return why an object stays."""
    location = str(one.location)
    if busy:
        return BUSY
    if location not in settings.object_stores:
        return "no_store"
    if one in kept:
        return "named"
    if not is_normal(one.path):
        return "invalid"
    return None if is_below(settings.object_prefixes.get(location, ()), one.path) else "outside"
