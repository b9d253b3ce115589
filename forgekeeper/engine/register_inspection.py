"""Read-only views of a register: backlogs, quarantine, gauges, share for the circuit breaker, preview."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from forgekeeper.api.answers import Backlog
from forgekeeper.api.batches import Declaration
from forgekeeper.api.inspection import (
    BUSY_REASON,
    PreviewContext,
    PreviewPart,
    RefusedEntry,
    RefusedRecords,
    backlog_readings,
)
from forgekeeper.api.objects import Objects
from forgekeeper.engine.register_source import UNFIT_REASONS, find_referenced_paths, find_unfit_state
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import exclusions, survey
from forgekeeper.platform.database.queries import AffectedShare
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.register.entries import DueEntry, EntryCounts, UploadEntry
from forgekeeper.sources.register.failed_uploads import FailedUploads
from forgekeeper.sources.register.not_excluded import UnexcludedEntries
from forgekeeper.sources.register.redis_register import RedisRegister, written_before
from forgekeeper.sources.settled import SettledUpload
from forgekeeper.targets import stores
from forgekeeper.targets.objects import ObjectStore
from forgekeeper.targets.outcomes import StoreUnavailable
from metrics.catalogue import Reading

MAX_SEARCHED_ENTRIES = 1_000
"""Maximum pending entries that are searched for entries of a location, which may have a small share."""
ENTRY_LOCATION = attrgetter("entry.location")


def declare_register_inspection(declared: Declaration, objects: Objects[Any]) -> None:
    """Add backlogs, quarantine, gauges and preview, all from the register that the run claims from."""
    shown = _RegisterInspection(objects, declared.batch.name)
    shown.register.keys.declare_types()
    declared.batch.registered_objects = objects
    declared.batch.epoch_key = shown.register.keys.epoch
    declared.batch.misreadings = partial(shown.register.describe_unread_uploads, client)
    declared.batch.add_known_objects(shown.sample_paths)
    declared.batch.at_stake(shown.measure_affected_uploads)
    declared.add_backlog(shown.pending_record)(shown.count_pending)
    declared.add_backlog(objects.record)(shown.count_due)
    declared.add_quarantine(shown.define_upload_quarantine())
    # One collector reads all gauges from Redis; it needs no database.
    declared.add_collector(declared.collected_as, database=False)(shown.read_gauges)
    declared.add_preview(shown.preview_uploads)


class _RegisterInspection:
    """The objects of a register as the declaration of their *batch* shows them."""

    def __init__(self, objects: Objects[Any], batch: str) -> None:
        self._objects, self._batch = objects, batch
        self.register = RedisRegister(objects.register)
        self._not_excluded = UnexcludedEntries(self.register, batch)
        self.pending_record, self._failed_record = f"pending_{objects.called}", f"failed_{objects.called}"

    def count_pending(self, _now: datetime) -> Backlog:
        """Count the uploads that have neither completed nor been settled."""
        return Backlog(self.register.count_entries(client).pending)

    def count_due(self, _now: datetime) -> Backlog:
        """Count the due uploads, and find the instant since when the oldest is due."""
        found = self._count_not_excluded()
        return Backlog(found.due, found.due_since)

    def measure_affected_uploads(self, _now: datetime) -> AffectedShare:
        """Return the counts for the circuit breaker: due uploads, of all uploads in the register."""
        found = self._count_not_excluded()
        return AffectedShare(due=lambda _bound: found.due, total=lambda _bound: found.pending)

    def _count_not_excluded(self) -> EntryCounts:
        return self._not_excluded.count_entries(client)

    def define_upload_quarantine(self) -> RefusedRecords:
        """Return the entries in quarantine."""
        failed = FailedUploads(self.register)

        def explain_failure(settings: Settings, entry: UploadEntry) -> str:
            return UNFIT_REASONS.get(
                find_unfit_state(entry, settings) or "", "the store refused to delete it: the log says why"
            )

        def list_entries(settings: Settings, limit: int) -> Iterator[RefusedEntry]:
            return failed.list_entries(client, partial(explain_failure, settings), limit)

        return RefusedRecords(
            kind=self._objects.called,
            record=self._failed_record,
            count=lambda: failed.count(client),
            entries=list_entries,
            retry=partial(failed.retry, client),
            discard=partial(failed.discard, client),
            redis=True,
        )

    def read_gauges(self, _settings: Settings) -> Iterator[Reading]:
        """Read backlogs and quarantine; excluded entries count as due, as exclusions are in the database."""
        found = self.register.count_entries(client)
        yield Reading("backlog_records", found.pending, (self._batch, self.pending_record))
        yield from backlog_readings(self._batch, self._objects.record, Backlog(found.due, found.due_since))
        yield Reading("quarantine_records", found.failed, (self._batch, self._failed_record))

    def sample_paths(self, location: str) -> list[str]:
        """Return some pending uploads, whose objects should be at the location."""
        return self.register.sample_paths(client, location, MAX_SEARCHED_ENTRIES)[: survey.MAX_SAMPLED_ROWS]

    def preview_uploads(self, look: PreviewContext) -> Iterator[PreviewPart]:
        """Count the uploads whose objects would be deleted; others are kept for the reasons of a run."""
        part, read = look.begin_part(self._objects.record), 0
        for page in self.register.read_due_pages(client):
            read += len(page)
            free = self._not_excluded.drop_excluded(page)
            part.add_kept(exclusions.EXCLUDED_REASON, len(page) - len(free))
            for location, found in groupby(sorted(free, key=ENTRY_LOCATION), key=ENTRY_LOCATION):
                self._preview_location(part, location, list(found), look)
            look.on_progress(part)
            if look.is_over():
                due_in_all = self.register.count_entries(client).due
                part.set_estimate(round(part.records * due_in_all / read) if read else due_in_all)
                break
        yield part

    def _preview_location(self, part: PreviewPart, location: str, some: list[DueEntry], look: PreviewContext) -> None:
        try:
            reasons = self._find_reasons_to_keep(location, some, look.settings)
        except StoreUnavailable:
            reasons = ["store_unavailable"] * len(some)
        for due, reason in zip(some, reasons, strict=True):
            if reason is not None:
                part.add_kept(reason, 1)
            else:
                part.add_record(due.entry.member, due.entry.path, due.since, size=look.sample_size)

    def _find_reasons_to_keep(self, location: str, found: list[DueEntry], settings: Settings) -> list[str | None]:
        """Return why each entry would be kept, None if its object would be deleted; all before any is counted."""
        store = stores.for_location(location, settings)
        unfits = [find_unfit_state(due.entry, settings) for due in found]
        paths = [due.entry.path for due, reason in zip(found, unfits, strict=True) if reason is None]
        kept = find_referenced_paths(self._objects, location, paths, settings) if paths else {}
        stays = dict.fromkeys(kept, "named") | dict.fromkeys(SettledUpload.find_locked(location, paths), BUSY_REASON)
        again = self.register.bridge.find_registered(client, [due.entry.member for due in found if not due.bridged])
        return [
            reason
            or ("prepared_again" if entry.member in again else None)
            or stays.get(entry.path)
            or ("changed" if store is not None and _has_changed(entry, store) else None)
            for (entry, _since, _bridged), reason in zip(found, unfits, strict=True)
        ]


def _has_changed(entry: UploadEntry, store: ObjectStore) -> bool:
    """Return whether an adopted object was written since; an object that does not exist was not."""
    if entry.adopted_at is None:
        return False
    written = store.read_last_modified(entry.path)
    return written is not None and written >= written_before(entry.adopted_at)
