"""What a run of batch 100 would delete: read from the register, which stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from forgekeeper.connections import client
from forgekeeper.preview import BUSY, Look, Part
from forgekeeper.storage import owners, stores
from forgekeeper.storage.objects import StoreUnavailable, is_normal
from forgekeeper.storage.settled import SettledUpload
from models import JobArtifact
from workers.stale_direct_uploads import register
from workers.stale_direct_uploads.register import Due


def foreseen(look: Look) -> Iterator[Part]:
    """Count the uploads whose objects would be deleted; what was adopted may turn out to have changed since."""
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
    """Count those of a location; what is kept is kept for the reasons of `Sweep`."""
    try:
        store = stores.at(location, look.settings)
    except StoreUnavailable:
        part.keep("store_unavailable", len(found))
        return
    fit = [due for due in found if not due.entry.malformed and is_normal(due.entry.path)]
    part.keep("malformed", len(found) - len(fit))
    if store is None:
        part.keep("no_store", len(fit))
        return
    inside = [due for due in fit if store.may_delete(due.entry.path)]
    part.keep("outside", len(fit) - len(inside))
    paths = [due.entry.path for due in inside]
    kept = owners.answered_for(JobArtifact, location, paths, look.settings) if paths else {}
    busy = SettledUpload.being_settled(location, paths)
    part.keep(BUSY, len(busy))
    for entry, since in inside:
        if entry.path in busy:
            continue
        if entry.path in kept:
            part.keep("named", 1)
        else:
            part.one(entry.member, entry.path, since, size=look.size)
