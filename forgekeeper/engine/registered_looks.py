"""Looks at a register: backlogs, quarantine, gauges, the breaker's stake, previews.

The entries are read, and stay unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from forgekeeper.api.answers import Backlog
from forgekeeper.api.batches import Declared
from forgekeeper.api.objects import Objects
from forgekeeper.api.shown import BUSY, Entry, Look, Part, Refused, backlog_readings
from forgekeeper.engine.register_source import UNFIT, find_answered, find_unfit
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import exclusions, survey
from forgekeeper.platform.database.queries import Stake
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.register.entries import Census, DueEntry, UploadEntry
from forgekeeper.sources.register.failed import FailedUploads
from forgekeeper.sources.register.not_excluded import NotExcluded
from forgekeeper.sources.register.redis_register import RedisRegister, last_seen
from forgekeeper.sources.settled import SettledUpload
from forgekeeper.targets import stores
from forgekeeper.targets.objects import ObjectStore
from forgekeeper.targets.outcomes import StoreUnavailable
from metrics.catalogue import Reading

MAX_SEARCHED = 1_000
"""Pending entries that are searched for some at a location, as its share may be small."""
LOCATION = attrgetter("entry.location")


def show_register(declared: Declared, objects: Objects[Any]) -> None:
    """Let every look at the objects read the register that the run claims from."""
    shown = _Shown(objects, declared.batch.name)
    shown.register.keys.declare_types()
    declared.batch.registered = objects
    declared.batch.epoch_key = shown.register.keys.epoch
    declared.batch.misreadings = partial(shown.register.unread, client)
    declared.batch.objects(shown.find_known_paths)
    declared.batch.at_stake(shown.weigh_stake)
    declared.backlog(shown.pending)(shown.count_pending)
    declared.backlog(objects.record)(shown.count_due)
    declared.quarantines(shown.refused())
    # In Redis all is read in one look, which needs no database.
    declared.collector(declared.collected_as, database=False)(shown.read_gauges)
    declared.preview(shown.preview)


class _Shown:
    """The objects of a register as the declaration of their *batch* shows them."""

    def __init__(self, objects: Objects[Any], batch: str) -> None:
        self._objects, self._batch = objects, batch
        self.register = RedisRegister(objects.register)
        self._not_excluded = NotExcluded(self.register, batch)
        self.pending, self._failed = f"pending_{objects.called}", f"failed_{objects.called}"

    def count_pending(self, _now: datetime) -> Backlog:
        """Count the uploads that have neither completed nor been settled."""
        return Backlog(self.register.census(client).pending)

    def count_due(self, _now: datetime) -> Backlog:
        """Count the due uploads, and find the instant since when the oldest is due."""
        found = self._census()
        return Backlog(found.due, found.due_since)

    def weigh_stake(self, _now: datetime) -> Stake:
        """Return the uploads that are due, of all in the register."""
        found = self._census()
        return Stake(due=lambda _bound: found.due, of=lambda _bound: found.pending)

    def _census(self) -> Census:
        return self._not_excluded.census(client)

    def refused(self) -> Refused:
        """Return the entries in quarantine."""
        failed = FailedUploads(self.register)

        def explain(settings: Settings, entry: UploadEntry) -> str:
            return UNFIT.get(find_unfit(entry, settings) or "", "the store refused to delete it: the log says why")

        def entries(settings: Settings, limit: int) -> Iterator[Entry]:
            return failed.entries(client, partial(explain, settings), limit)

        return Refused(
            kind=self._objects.called,
            record=self._failed,
            count=lambda: failed.count(client),
            entries=entries,
            retry=partial(failed.retry, client),
            discard=partial(failed.discard, client),
            redis=True,
        )

    def read_gauges(self, _settings: Settings) -> Iterator[Reading]:
        """Read backlogs and quarantine; excluded entries count as due, as exclusions are in the database."""
        found = self.register.census(client)
        yield Reading("backlog_records", found.pending, (self._batch, self.pending))
        yield from backlog_readings(self._batch, self._objects.record, Backlog(found.due, found.due_since))
        yield Reading("quarantine_records", found.failed, (self._batch, self._failed))

    def find_known_paths(self, location: str) -> list[str]:
        """Return some pending uploads, whose objects should be at the location."""
        return self.register.sampled(client, location, MAX_SEARCHED)[: survey.SAMPLED]

    def preview(self, look: Look) -> Iterator[Part]:
        """Count the uploads whose objects would be deleted; others are kept for the reasons of a run."""
        part, read = look.part(self._objects.record), 0
        for page in self.register.due(client):
            read += len(page)
            free = self._not_excluded.filter(page)
            part.keep(exclusions.REASON, len(page) - len(free))
            for location, found in groupby(sorted(free, key=LOCATION), key=LOCATION):
                self._preview_location(part, location, list(found), look)
            look.told(part)
            if look.over():
                due_in_all = self.register.census(client).due
                part.guess(round(part.records * due_in_all / read) if read else due_in_all)
                break
        yield part

    def _preview_location(self, part: Part, location: str, some: list[DueEntry], look: Look) -> None:
        try:
            reasons = self._find_reasons(location, some, look.settings)
        except StoreUnavailable:
            reasons = ["store_unavailable"] * len(some)
        for due, reason in zip(some, reasons, strict=True):
            if reason is not None:
                part.keep(reason, 1)
            else:
                part.one(due.entry.member, due.entry.path, due.since, size=look.size)

    def _find_reasons(self, location: str, found: list[DueEntry], settings: Settings) -> list[str | None]:
        """Return why each entry would be kept, None if its object would be deleted; all before any is counted."""
        store = stores.at(location, settings)
        unfits = [find_unfit(due.entry, settings) for due in found]
        paths = [due.entry.path for due, reason in zip(found, unfits, strict=True) if reason is None]
        kept = find_answered(self._objects, location, paths, settings) if paths else {}
        stays = dict.fromkeys(kept, "named") | dict.fromkeys(SettledUpload.locked(location, paths), BUSY)
        again = self.register.bridge.named(client, [due.entry.member for due in found if not due.bridged])
        return [
            reason
            or ("prepared_again" if entry.member in again else None)
            or stays.get(entry.path)
            or ("changed" if store is not None and _has_changed(entry, store) else None)
            for (entry, _since, _bridged), reason in zip(found, unfits, strict=True)
        ]


def _has_changed(entry: UploadEntry, store: ObjectStore) -> bool:
    """Return whether an adopted object was written since; an object that does not exist was not."""
    if entry.adopted is None:
        return False
    written = store.written(entry.path)
    return written is not None and written >= last_seen(entry.adopted)
