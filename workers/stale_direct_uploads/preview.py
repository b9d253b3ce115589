"""What a run of batch 100 would delete: read from the register, which stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from forgekeeper.connections import client
from forgekeeper.database import LAST_INSTANT
from forgekeeper.declaring.preview import BUSY, Look, Part
from forgekeeper.storage import owners, stores
from forgekeeper.storage.objects import Objects, StoreUnavailable, is_normal
from forgekeeper.storage.settled import SettledUpload
from models import JobArtifact
from workers.stale_direct_uploads import register
from workers.stale_direct_uploads.entries import Entry
from workers.stale_direct_uploads.register import Due


def uploads(look: Look) -> Iterator[Part]:
    """Count the uploads whose objects would be deleted."""
    part, read = look.part("stale_upload"), 0
    for page in register.due(client, stale_after=register.MAX_UPLOAD_DURATION):
        read += len(page)
        ordered = sorted(page, key=lambda due: due.entry.location)
        for location, found in groupby(ordered, key=lambda due: due.entry.location):
            _at(location, list(found), part, look)
        look.told(part)
        if look.over():
            due = register.census(client, register.MAX_UPLOAD_DURATION).due
            part.guess(round(part.records * due / read) if read else due)
            break
    yield part


def _at(location: str, found: list[Due], part: Part, look: Look) -> None:
    """Count those of a location; what is kept is kept for the reasons of a run."""
    try:
        store = stores.at(location, look.settings)
        for due, reason in zip(found, _reasons(location, found, store, look), strict=True):
            if reason is not None:
                part.keep(reason, 1)
            else:
                part.one(due.entry.member, due.entry.path, due.since, size=look.size)
    except StoreUnavailable:
        part.keep("store_unavailable", len(found))


def _reasons(location: str, found: list[Due], store: Objects | None, look: Look) -> list[str | None]:
    """Return why each would be kept, None of what would be deleted; all of it before any is counted."""
    paths = [due.entry.path for due in found if unfit(due.entry, store) is None]
    kept = owners.answered_for(JobArtifact, location, paths, look.settings) if paths else {}
    locked = SettledUpload.locked(location, paths)
    reasons = []
    for entry, _since in found:
        reason = unfit(entry, store) or (BUSY if entry.path in locked else "named" if entry.path in kept else None)
        if reason is None and store is not None and _changed(entry, store):
            reason = "changed"
        reasons.append(reason)
    return reasons


def unfit(entry: Entry, store: Objects | None) -> str | None:
    """Return why nothing of the entry may be deleted, None where it may."""
    if entry.malformed or not is_normal(entry.path):
        return "malformed"
    if store is None:
        return "no_store"
    return None if store.may_delete(entry.path) else "outside"


def _changed(entry: Entry, store: Objects) -> bool:
    """Return whether an adopted object was written since; one that does not exist was not."""
    if entry.adopted is None or store.has(entry.path, before=register.last_seen(entry.adopted)):
        return False
    return store.has(entry.path, before=LAST_INSTANT)
