"""What a run of batch 100 would delete: read from the register, which stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter

from forgekeeper.api.shown import BUSY, Look, Part
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import exclusions
from forgekeeper.sources.settled import SettledUpload
from forgekeeper.targets import stores
from forgekeeper.targets.objects import ObjectStore
from forgekeeper.targets.outcomes import StoreUnavailable
from models import JobArtifact
from workers.stale_direct_uploads import bridge, register
from workers.stale_direct_uploads.entries import Entry, unfit
from workers.stale_direct_uploads.kept import not_excluded
from workers.stale_direct_uploads.register import Due

LOCATION = attrgetter("entry.location")


def uploads(look: Look) -> Iterator[Part]:
    """Count the uploads whose objects would be deleted; what is kept is kept for the reasons of a run."""
    part, read = look.part("stale_upload"), 0
    for page in register.due(client):
        read += len(page)
        free = not_excluded(page)
        part.keep(exclusions.REASON, len(page) - len(free))
        for location, found in groupby(sorted(free, key=LOCATION), key=LOCATION):
            some = list(found)
            try:
                reasons = _reasons(location, some, look)
            except StoreUnavailable:
                reasons = ["store_unavailable"] * len(some)
            for due, reason in zip(some, reasons, strict=True):
                if reason is not None:
                    part.keep(reason, 1)
                else:
                    part.one(due.entry.member, due.entry.path, due.since, size=look.size)
        look.told(part)
        if look.over():
            due_in_all = register.census(client).due
            part.guess(round(part.records * due_in_all / read) if read else due_in_all)
            break
    yield part


def _reasons(location: str, found: list[Due], look: Look) -> list[str | None]:
    """Return why each would be kept, None of what would be deleted; all of it before any is counted."""
    store = stores.at(location, look.settings)
    unfits = [unfit(due.entry, look.settings) for due in found]
    paths = [due.entry.path for due, reason in zip(found, unfits, strict=True) if reason is None]
    kept = stores.answered_for(JobArtifact, location, paths, look.settings) if paths else {}
    stays = dict.fromkeys(kept, "named") | dict.fromkeys(SettledUpload.locked(location, paths), BUSY)
    again = bridge.named(client, [due.entry.member for due in found if not due.bridged])
    return [
        reason
        or ("prepared_again" if entry.member in again else None)
        or stays.get(entry.path)
        or ("changed" if store is not None and _changed(entry, store) else None)
        for (entry, _since, _bridged), reason in zip(found, unfits, strict=True)
    ]


def _changed(entry: Entry, store: ObjectStore) -> bool:
    """Return whether an adopted object was written since; one that does not exist was not."""
    if entry.adopted is None:
        return False
    written = store.written(entry.path)
    return written is not None and written >= register.last_seen(entry.adopted)
