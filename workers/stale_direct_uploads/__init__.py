"""Delete uploads that began three hours ago and never completed (batch 100).

Runs every six minutes.  Stale entries are claimed from the register, oldest first, recorded in PostgreSQL as reaped,
their objects deleted in bulk, the entries forgotten.  A claim that a crash leaves behind is taken up by a later run.  A
bad entry, an unknown location or a store that is down stops no other.

Redis may go back and give an entry out again that has completed or was reaped.  So PostgreSQL decides about an object,
not the register, under the upload's lock: no row that names it, committed before a run records it as reaped, and none
after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import structlog

from forgekeeper import Blocked, Items, Kept, Record, Threshold, batch
from forgekeeper.api.answers import Backlog
from forgekeeper.api.items import Deleted, Ended, Fence, Item, Page, State
from forgekeeper.api.shown import Refused, backlog_readings
from forgekeeper.engine.items import deleted_at, stood_at
from forgekeeper.engine.work import run_number, settings
from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination.values import moment
from forgekeeper.platform.database import survey
from forgekeeper.platform.database.queries import Stake
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.settled import SettledUpload
from forgekeeper.targets import stores
from forgekeeper.targets.objects import ObjectStore
from forgekeeper.targets.outcomes import StoreUnavailable
from metrics.catalogue import Reading
from models import JobArtifact, PathlessArtifact
from workers.stale_direct_uploads import bridge, failed, kept, preview, register
from workers.stale_direct_uploads.entries import UNFIT, Claim, Entry, is_malformed, unfit
from workers.stale_direct_uploads.keys import EPOCH, FAILED, MAX_UPLOAD_DURATION

MAX_EXEC_DURATION = timedelta(seconds=250)
CHUNK = 1_000
LOCKED = 250
"""How many locks of uploads are held at once: PostgreSQL has room for some thousands by default."""
BACKOFF = timedelta(minutes=6)
"""The next run."""

KEPT = ("kept", "changed")
PREPARED_AGAIN = "the forge has registered it once more"
SEARCHED = 1_000
"""How many pending uploads are searched for some at a location; its share may be small."""

log = structlog.get_logger(__name__)


@dataclass
class Outcome:
    """What a run comes to, in the document's words; it grows with each chunk."""

    total_pending_entries: int = 0
    total_deleted_stale_entries: int = 0
    execution_timeout: bool = False
    failed_entries: int = 0


@batch(
    document=100,
    cron="*/6 * * * *",
    budget=MAX_EXEC_DURATION,
    time_limit=timedelta(minutes=6),
    outcome=Outcome,
    tables=[DeletedObject, SettledUpload],
    reads=[JobArtifact, PathlessArtifact],
    misreadings=lambda: register.unread(client),
    deletes_from="stores",
    epoch_key=EPOCH,
    records=[
        Record("pending_upload", examined=("total_pending_entries",), backlog=True),
        Record(
            "stale_upload",
            processed=("total_deleted_stale_entries",),
            errors={"object_storage": ("failed_entries",)},
            objective=timedelta(hours=1),
            excluded_by=("pattern",),
        ),
        Record("failed_upload", refused=True),
    ],
    thresholds=[
        Threshold("duration", above=250),
        Threshold("consecutive_failures", above=2),
        Threshold("backlog", above=10_000, found=("total_pending_entries",), done=("total_deleted_stale_entries",)),
    ],
    collector="uploads",
    commands="workers.stale_direct_uploads.commands",
)
def stale_direct_uploads(now: datetime) -> Items[Entry]:
    """Delete uploads that began three hours ago and never completed.

    Raises `StoreUnavailable` when stores did not answer, after everything at the others was done.
    """
    return _StaleUploads()


class _StaleUploads(Items[Entry]):
    """The stale entries of the register, location by location."""

    record = "stale_upload"
    called = "member"
    deleted_field = "total_deleted_stale_entries"
    chunk = CHUNK
    marked = LOCKED
    keyed = False

    def __init__(self) -> None:
        self._unavailable: dict[str, str] = {}
        self._untried: list[tuple[Claim, list[Entry]]] = []

    def begin(self) -> dict[str, Any]:
        if not settings().object_stores:
            raise Blocked("no_store", "no object store is configured; set FORGEKEEPER_OBJECT_STORES")
        if corrected := register.correct_clock(client):
            log.warning("uploads registered in the future corrected", entries=corrected)
        self.visibility = settings().upload_visibility / 5
        if bridge.bridges(client):
            # A forge that registers uploads in a hash takes no lock: what is looked at has to go at once.
            self.chunk = LOCKED
        found = register.census(client)
        if found.unreadable:
            log.error("uploads without a time stay", entries=found.unreadable, first=found.first)
        return {"total_pending_entries": found.pending, "failed_entries": found.unreadable}

    def end(self, ended: Ended) -> dict[str, Any]:
        # The next attempt gets what was claimed of locations that do not answer.
        for claim, entries in self._untried:
            register.put_back(client, claim, entries)
        return {"execution_timeout": ended.timed_out}

    def failure(self) -> StoreUnavailable | None:
        # First the names of all locations that had to be stopped: a ledger cuts long sentences.
        names, reasons = self._unavailable.keys(), "; ".join(self._unavailable.values())
        said = reasons if len(names) == 1 else f"{', '.join(sorted(names))}: {reasons}"
        return StoreUnavailable(said, {}) if names else None

    def scope(self, one: Entry) -> str | None:
        return None if is_malformed(one) else one.location

    def scopes(self) -> list[str | None]:
        return list(settings().object_stores)

    def became(self, scope: str | None, until: float, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        with suppress(StoreUnavailable):
            if (store := _store(scope)) is not None:
                return stood_at(store, rows, until=until)
        return [None] * len(rows)

    def claim(self, page: Page) -> list[Entry]:
        only = kept.next_members(client, page.limit) if kept.any_stand() else None
        self._claim = register.claim(client, visibility=settings().upload_visibility, limit=page.limit, only=only)
        return self._claim.entries

    def look(self, items: Sequence[Entry]) -> dict[Entry, Kept]:
        location = self.scope(items[0])
        if location not in self._unavailable:
            try:
                _store(location)
            except StoreUnavailable as error:
                self.interrupted(location, error)
        if location in self._unavailable:
            # Until the run's end they stay claimed: it does not get them again.
            return dict.fromkeys(items, Kept(None, "unavailable"))
        states = {entry: unfit(entry, settings()) for entry in items}
        kept: dict[Entry, Kept] = {entry: Kept(UNFIT[state], state) for entry, state in states.items() if state}
        again = bridge.named(client, [entry.member for entry in items])
        return {entry: Kept(PREPARED_AGAIN) for entry in items if entry.member in again} | kept

    def mark(self, items: Sequence[Entry], kept: Mapping[Entry, State]) -> dict[Entry, Item | State]:
        # An upload whose producer is completing it stays: its claim runs out, and a later run looks again.
        marked: dict[Entry, Item | State] = {entry: kept[entry] for entry in items if entry in kept}
        some, location = {entry.path: entry for entry in items if entry not in kept}, items[0].location
        if some:
            free = SettledUpload.lock_free(location, list(some))
            answered = stores.answered_for(JobArtifact, location, free, settings())
            going = [path for path in free if path not in answered]
            SettledUpload.reap(location, going, run_number())
            marked |= {some[path]: _item(some[path]) for path in going}
            marked |= {some[path]: Kept(reason) for path, reason in answered.items()}
        return marked

    def delete(self, items: Sequence[Entry], fence: Fence[Entry]) -> Deleted[Entry]:
        store = _store(items[0].location)
        assert store is not None, "its entries were kept"
        paths = {entry: entry.path for entry in items}
        seen = {entry.path: register.last_seen(entry.adopted) for entry in items if entry.adopted is not None}
        # An entry whose time of registration is gone was claimed before: it has been stale for some time.
        latest = moment(client.time()[0]) - MAX_UPLOAD_DURATION
        begun = {entry.path: _stale_at(entry) or latest for entry in items} | seen
        return deleted_at(store, paths, fence, unless_changed_since=seen, uploads_begun_before=begun)

    def find_lost(self, items: Sequence[Entry]) -> list[Entry]:
        return register.find_lost(client, self._claim, items)

    def unanswered(self, scope: str | None) -> None:
        self.interrupted(scope, TimeoutError(f"{scope}: no answer while the claim lasted"))

    def interrupted(self, scope: str | None, error: Exception) -> None:
        # The others go on.
        log.error("object store unavailable", location=scope, error=str(error))
        self._unavailable[str(scope)] = str(error)

    def settle(self, states: Mapping[Entry, State]) -> dict[str, int]:
        # What has changed stays, so it was not reaped after all.
        changed = [entry for entry, became in states.items() if became.state == "changed"]
        if changed:
            SettledUpload.forget(changed[0].location, [entry.path for entry in changed])
        return {}

    def forget(self, states: Mapping[Entry, State]) -> dict[str, int]:
        by = defaultdict[str, list[Entry]](list)
        for entry, became in states.items():
            by[became.state].append(entry)
            if became.state in KEPT:
                reason = became.reason or "its object was written since it was registered"
                log.error("upload kept", location=entry.location, path=entry.path, reason=reason)
        for state, reason in UNFIT.items():
            if rejected := by[state]:
                first = min(entry.member for entry in rejected)
                log.error("uploads rejected", reason=reason, entries=len(rejected), first=first)
        register.forget(client, self._claim, [entry for state in KEPT for entry in by[state]])
        self._untried.append((self._claim, by["unavailable"]))
        put_aside = register.reject(client, self._claim, by["malformed"] + by["outside"])
        failed = by["no_store"] + by["failed"]
        for entry in failed:
            last = register.fail(client, self._claim, entry, backoff=BACKOFF)
            why = {"location": entry.location, "path": entry.path, "reason": states[entry].reason}
            log.warning("upload not deleted", **why, given_up=last)
        gone = register.forget(client, self._claim, by["deleted"] + by["missing"])
        return {"total_deleted_stale_entries": gone, "failed_entries": put_aside + len(failed)}

    def settle_earlier(self, rows: Sequence[Mapping[str, Any]]) -> list[bool]:
        members = [f"{row['location']}:{row['path']}" for row in rows]
        return [bool(dropped) for dropped in register.settle(client, "found_deleted", members)]

    def put_back(self, items: Sequence[Entry]) -> None:
        register.put_back(client, self._claim, items)


def _store(location: str | None) -> ObjectStore | None:
    return None if location is None else stores.at(location, settings())


def _stale_at(entry: Entry) -> datetime | None:
    return None if entry.registered is None else moment(entry.registered) + MAX_UPLOAD_DURATION


def _item(entry: Entry) -> Item:
    return Item(None, entry.path, {"location": entry.location, "path": entry.path, "due": _stale_at(entry)})


@stale_direct_uploads.backlog("pending_upload")
def pending(_now: datetime) -> Backlog:
    """Count the uploads that are on their way."""
    return Backlog(register.census(client).pending)


@stale_direct_uploads.backlog("stale_upload")
def stale(_now: datetime) -> Backlog:
    """Count the uploads that are due, and since when the oldest is."""
    found = kept.census(client)
    return Backlog(found.due, found.due_since)


@stale_direct_uploads.at_stake
def at_stake(_now: datetime) -> Stake:
    """Look at the uploads that are due, of all in the register."""
    found = kept.census(client)
    return Stake(due=lambda _bound: found.due, of=lambda _bound: found.pending)


stale_direct_uploads.quarantines(
    Refused(
        kind="upload",
        record="failed_upload",
        count=lambda: int(client.zcard(FAILED)),
        entries=partial(failed.failures, client),
        retry=partial(failed.retry, client),
        discard=partial(failed.discard, client),
        redis=True,
    )
)


@stale_direct_uploads.collector("uploads", database=False)
def readings(_settings: Settings) -> Iterator[Reading]:
    """Read all of it in one look, which needs no database."""
    batch, found = stale_direct_uploads.name, register.census(client)
    yield Reading("backlog_records", found.pending, (batch, "pending_upload"))
    yield from backlog_readings(batch, "stale_upload", Backlog(found.due, found.due_since))
    yield Reading("quarantine_records", found.failed, (batch, "failed_upload"))


@stale_direct_uploads.objects
def known(location: str) -> list[str]:
    """Return some pending uploads, of which the objects should lie at the location."""
    return register.sampled(client, location, SEARCHED)[: survey.SAMPLED]


stale_direct_uploads.preview(preview.uploads)
