"""Delete the objects whose artifacts are gone: the outbox of batch 11.

Runs every minute.  It claims rows of the outbox, deletes their objects in bulk, and removes the rows.  A row's
`file_store` says at which location its object lies.  An object that a live artifact still names stays, and its row is
removed.  If an artifact without a path may have the object, the row stays, too: like that of an object that cannot be
deleted it is tried ten times, and then is in quarantine for a person.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal

import peewee as pw
import structlog

from forgekeeper import Blocked, Items, Kept, Record, batch
from forgekeeper.database import exclusions, now, queries, survey
from forgekeeper.database.queries import START, Stake, among, positions
from forgekeeper.database.survey import expected, held, selected
from forgekeeper.declaring.answers import Backlog
from forgekeeper.declaring.items import Deleted, Ended, Fence, Item, Page, State
from forgekeeper.declaring.shown import BUSY, PASSED_OVER, Entry, Look, Part, Refused, numbers
from forgekeeper.deleting.items import deleted_at, stood_at
from forgekeeper.deleting.work import settings
from forgekeeper.settings import Settings
from forgekeeper.storage import stores
from forgekeeper.storage.objects import Objects, is_below, is_normal
from forgekeeper.storage.outbox import LOCATIONS, DeletedObject
from forgekeeper.storage.outcomes import StoreUnavailable
from models import JobArtifact, PathlessArtifact, ProjectGroup

NAME = "delete_objects"
CHUNK = 1_000
FIRST_RETRY = timedelta(minutes=1)
MAX_RUNTIME = timedelta(minutes=4)
NAMED_BY_ARTIFACT, UNCERTAIN = Kept(JobArtifact.sentence), Kept(PathlessArtifact.sentence)

log = structlog.get_logger(__name__)


@dataclass
class Outcome:
    """What a run comes to; it grows with each chunk.  *remaining* are due afterwards, *kept* stay for an artifact."""

    deleted: int = 0
    missing: int = 0
    failed: int = 0
    remaining: int = 0
    stopped: Literal["drained", "deadline", "store_unavailable", "no_store"] = "drained"
    kept: int = 0


@batch(
    cron="* * * * *",
    queue="objects",
    budget=MAX_RUNTIME,
    time_limit=timedelta(minutes=6),
    outcome=Outcome,
    tables=[DeletedObject],
    # What live artifacts name, and what people exclude.
    reads=[JobArtifact, PathlessArtifact, ProjectGroup],
    deletes_from="artifacts",
    released_with="expired_job_artifacts",
    records=[
        Record(
            "deleted_object",
            examined=("deleted", "missing", "failed"),
            processed=("deleted", "missing"),
            errors={"database": (), "object_storage": ("failed",)},
            objective=timedelta(hours=1),
            excluded_by=("project", "pattern"),
        ),
        Record("dead_object", refused=True),
    ],
    collector="objects",
)
def delete_objects(now: datetime) -> Items[DeletedObject]:
    """Delete the objects of destroyed artifacts.

    Raises `StoreUnavailable` where a store does not answer, `Blocked` where one is not configured: after the objects of
    the other are gone.
    """
    return _Outbox()


class _Outbox(Items[DeletedObject]):
    record = "deleted_object"
    project = "project_id"
    chunk = CHUNK

    def __init__(self) -> None:
        self._stores: dict[str, Objects] = {}
        self._away: dict[str | None, Exception] = {}
        self._left: DeletedObject | None = None

    def begin(self) -> dict[str, Any]:
        for location in LOCATIONS.values():
            try:
                store = stores.at(location, settings())
            except StoreUnavailable as error:
                self.interrupted(location, error)
            else:
                self._stores |= {} if store is None else {location: store}
        self.visibility = settings().object_visibility
        return {}

    def end(self, ended: Ended) -> dict[str, Any]:
        if ended.error is not None:
            return {}
        due = _due(now())
        self._left = due.where(DeletedObject.file_store.not_in(self._codes())).first()
        stopped = "store_unavailable" if self._away else "no_store" if self._left else ended.stopped or "drained"
        return {"stopped": stopped, "remaining": due.count()}

    def failure(self) -> Exception | None:
        if self._away:
            return next(iter(self._away.values()))
        return None if self._left is None else _no_store(self._left)

    def interrupted(self, scope: str | None, error: Exception) -> None:
        # The other store goes on.
        log.error("object store unavailable", location=scope, error=str(error))
        self._away[scope] = error
        self._stores.pop(str(scope), None)

    def scope(self, one: DeletedObject) -> str | None:
        return one.lies_at

    def scopes(self) -> list[str | None]:
        # None is of a version that had one store.
        return [None, *LOCATIONS.values()]

    def due_of(self, keys: Sequence[int]) -> set[int]:
        return among(DeletedObject.select(), keys)

    def key(self, one: DeletedObject) -> int:
        return int(one.id)

    def next(self, page: Page) -> list[int]:
        due = _due(now()).where(DeletedObject.file_store.in_(self._codes()))
        by = DeletedObject.pick_up_at
        return [one.key for one in positions(due, by, START, limit=page.limit, without=page.without)]

    def claim(self, page: Page) -> list[DeletedObject]:
        claim = partial(DeletedObject.claim_due, now(), stores=self._codes(), visibility=settings().object_visibility)
        return claim(limit=page.limit, only=page.only, without=page.without, batch=NAME)

    def look(self, items: Sequence[DeletedObject]) -> dict[DeletedObject, Kept]:
        named = _find_named(JobArtifact, items, settings())
        uncertain = _find_named(PathlessArtifact, list(named), settings())
        return {row: UNCERTAIN if row in uncertain else NAMED_BY_ARTIFACT for row in named}

    def mark(
        self, items: Sequence[DeletedObject], kept: Mapping[DeletedObject, State]
    ) -> dict[DeletedObject, Item | State]:
        ours = DeletedObject.still_ours(items)
        for row, became in kept.items():
            log.error("object kept", reason=became.reason, path=row.path)
        return {row: kept.get(row) or _item(row) for row in items if row.id in ours}

    def delete(self, items: Sequence[DeletedObject], fence: Fence[DeletedObject]) -> Deleted[DeletedObject]:
        return deleted_at(self._stores[str(items[0].lies_at)], {row: row.path for row in items}, fence)

    def find_lost(self, items: Sequence[DeletedObject]) -> list[DeletedObject]:
        claimed = DeletedObject.still_claimed(items)
        return [row for row in items if row.id not in claimed]

    def settle(self, states: Mapping[DeletedObject, State]) -> dict[str, int]:
        for row in (row for row, became in states.items() if became.state == "changed"):
            log.error("object kept, it was written again", path=row.path)
        left = {row for row, became in states.items() if became.state == "failed" or became == UNCERTAIN}
        DeletedObject.forget([row for row in states if row not in left])
        if left and (died := DeletedObject.fail(list(left), first_retry=FIRST_RETRY)):
            log.error("objects given up", objects=died)
        return Counter(became.state for became in states.values())

    def settle_earlier(self, rows: Sequence[Mapping[str, Any]]) -> list[bool]:
        removed = DeletedObject.forget_paths({row["id"]: row["path"] for row in rows})
        return [row["id"] in removed for row in rows]

    def put_back(self, items: Sequence[DeletedObject]) -> None:
        DeletedObject.put_back(items, now())

    def became(self, scope: str | None, until: float, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        store = self._stores.get(scope or DeletedObject.location)
        try:
            return [None] * len(rows) if store is None else stood_at(store, rows, until=until)
        except StoreUnavailable as error:
            self.interrupted(scope or DeletedObject.location, error)
            return [None] * len(rows)

    def _codes(self) -> list[int]:
        return [code for code, location in LOCATIONS.items() if location in self._stores]


def _no_store(row: DeletedObject) -> Blocked:
    if row.lies_at is None:
        return Blocked("no_store", f"object {row.id} has file_store {row.file_store}, which is no store: 1 or 2 is one")
    return Blocked("no_store", f"no object store {row.lies_at!r} is configured; set FORGEKEEPER_OBJECT_STORES")


def _item(row: DeletedObject) -> Item:
    return Item(row.id, row.path, {"path": row.path, "project_id": row.project_id, "due": row.created_at})


def _due(now: datetime) -> pw.ModelSelect[DeletedObject]:
    return DeletedObject.due(now).where(exclusions.but(DeletedObject.excluded(NAME)))


@delete_objects.backlog("deleted_object")
def due(now: datetime) -> Backlog:
    """Count the objects to delete."""
    return Backlog.of(_due(now).order_by(DeletedObject.pick_up_at), oldest=DeletedObject.pick_up_at)


@delete_objects.at_stake
def at_stake(now: datetime) -> Stake:
    """Look at the objects to delete, of these and those that artifacts name."""
    return Stake.rows(_due(now), of=(JobArtifact,))


@delete_objects.preview
def objects_due(look: Look) -> Iterator[Part]:
    """Count the objects that would be deleted, by the outbox alone: the store is not asked."""
    part, bad, position = look.part("deleted_object"), look.passed_over("deleted_object"), START
    query = _due(look.now)
    due = selected(query, DeletedObject.pick_up_at)
    part.keep(PASSED_OVER, due.among(bad))
    locked = DeletedObject.select().where(pw.SQL(held("deleted_objects", alias='"t1"')))
    while places := positions(query, DeletedObject.pick_up_at, position, limit=CHUNK, without=bad):
        ids = [place.key for place in places]
        those = DeletedObject.select().where(DeletedObject.id.in_(ids))
        rows, busy = list(those.order_by(DeletedObject.pick_up_at, DeletedObject.id)), among(locked, ids)
        named = _find_named(JobArtifact, rows, look.settings)
        for row in rows:
            if reason := _stays(row, named, look.settings, busy=row.id in busy):
                part.keep(reason, 1)
            else:
                part.one(str(row.id), row.path, row.pick_up_at, size=look.size, project=row.project_id)
        position = places[-1]
        look.told(part)
        if look.over():
            part.guess(expected(due, bad))
            break
    part.keep(exclusions.REASON, queries.count(DeletedObject.due(look.now).where(DeletedObject.excluded(NAME))))
    part.keep("fresh", queries.count(DeletedObject.later(look.now)))
    part.keep("dead", queries.count(DeletedObject.dead()))
    yield part


def _find_named(owner: stores.Owner, rows: Sequence[DeletedObject], settings: Settings) -> set[DeletedObject]:
    """Return the rows whose objects the *owner* names."""
    found = set[DeletedObject]()
    for location in {str(row.lies_at) for row in rows}:
        here = [row for row in rows if str(row.lies_at) == location]
        named = stores.named_by(owner, location, [row.path for row in here], settings)
        found |= {row for row in here if row.path in named}
    return found


def _stays(row: DeletedObject, named: set[DeletedObject], settings: Settings, *, busy: bool) -> str | None:
    """Return why an object stays."""
    location = str(row.lies_at)
    if busy:
        return BUSY
    if location not in settings.object_stores:
        return "no_store"
    if row in named:
        return "named"
    if not is_normal(row.path):
        return "invalid"
    return None if is_below(settings.object_prefixes.get(location, ()), row.path) else "outside"


def _dead(_settings: Settings, limit: int) -> Iterator[Entry]:
    for row in DeletedObject.dead().limit(limit):
        yield Entry(str(row.id), f"could not be deleted: {row.path}", row.attempts, row.created_at)


delete_objects.quarantines(
    Refused(
        kind="object",
        record="dead_object",
        count=lambda: queries.count(DeletedObject.dead()),
        entries=_dead,
        retry=lambda keys: DeletedObject.retry(numbers(keys)),
        discard=lambda keys: DeletedObject.discard(numbers(keys)),
    )
)


@delete_objects.objects
def known(location: str) -> list[str]:
    """Return where some objects should lie: of live artifacts, and of those that wait to be deleted."""
    codes = [code for code, place in LOCATIONS.items() if place == location]
    paths = {"ci_job_artifacts": "file_final_path", "deleted_objects": "concat_ws('/', nullif(store_dir, ''), file)"}
    there = [(table, f"case file_store when {code} then {path} end") for code in codes for table, path in paths.items()]
    return [path for table, found in there for path in survey.sample(table, "id", found)]
