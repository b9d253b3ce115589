"""A register as a source of objects: entries are claimed, recorded as reaped, and forgotten or retried.

A claim that a crash leaves behind expires, and a later run takes it.  A bad entry, an unknown location or a store that
is away stops no other entry.

Redis may return to an earlier state, and give an entry out again that has completed or was reaped.  So PostgreSQL
decides about an object, not the register, under the upload's lock: an object is deleted if no row named it when a run
recorded the upload as reaped, and after that record no upload to the path completes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import structlog

from forgekeeper.api.answers import Mistake
from forgekeeper.api.objects import Objects
from forgekeeper.audit.deletions import AuditItem
from forgekeeper.engine.object_target import DeleteConditions, ObjectTarget
from forgekeeper.engine.run import Run
from forgekeeper.engine.source import ItemSource
from forgekeeper.engine.target import ItemState, KeptItem
from forgekeeper.guards.preconditions import Blocked
from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination.redis_values import to_datetime
from forgekeeper.platform.database.queries import KeyPage
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.register.entries import UNPRINTABLE_CHARACTERS, UploadClaim, UploadEntry
from forgekeeper.sources.register.not_excluded import UnexcludedEntries
from forgekeeper.sources.register.redis_register import RedisRegister, written_before
from forgekeeper.sources.settled import SettledUpload
from forgekeeper.targets import stores
from forgekeeper.targets.objects import is_below, is_normal
from forgekeeper.targets.outcomes import OUTSIDE_PREFIXES_REASON, StoreUnavailable

MAX_UPLOAD_LOCKS = 500
"""Maximum locks of uploads that are held at once: PostgreSQL has room for 6,400 by default.

With 250, PostgreSQL needs a third more processor time for an upload.
"""
MAX_UNLOCKED_UPLOADS = 250
"""Maximum uploads between the look at them and their deletion if the forge takes no locks."""
KEPT_UPLOAD_STATES = ("kept", "changed")
PREPARED_AGAIN_REASON = "the forge has registered it again"
UNFIT_REASONS = {
    "malformed": "it names no object",
    "outside": OUTSIDE_PREFIXES_REASON,
    "no_store": "no store is configured for its location",
}
"""Reasons why no object of an entry may be deleted, by the state that the entry gets."""

log = structlog.get_logger(__name__)


class RegisterSource(ItemSource[UploadEntry]):
    """The due entries of a register, for one run.

    Raises `Mistake` if the declaration lacks the register: nothing would notice that Redis has lost the entries.
    """

    max_locked_items = MAX_UPLOAD_LOCKS
    decides_for_good = True

    def __init__(self, objects: Objects[Any], run: Run[Any]) -> None:
        declared = run.declared.batch.registered_objects
        if declared is None or declared.register != objects.register:
            said = "which its declaration lacks: leave records= out, and always return the same register"
            raise Mistake(f"{run.batch} returned the register {objects.register.name!r}, {said}")
        self.record, self.chunk_size, self.visibility = (
            objects.record,
            objects.chunk,
            run.settings.upload_visibility / 5,
        )
        self.target = ObjectTarget[UploadEntry](run.settings, conditions=self._find_conditions)
        self._objects, self._settings, self._deadline = objects, run.settings, run.deadline
        self._register, self._run_number = RedisRegister(objects.register), run.number
        self._not_excluded = UnexcludedEntries(self._register, run.declared.batch.name)
        self._fields = objects.result_fields
        self.deleted_field = self._fields["deleted"]
        self._untried: list[list[UploadEntry]] = []

    def begin_run(self) -> dict[str, Any]:
        if not self._settings.object_stores:
            raise Blocked("no_store", "no object store is configured; set FORGEKEEPER_OBJECT_STORES")
        if corrected := self._register.correct_clock(client):
            log.warning("registration times in the future corrected", entries=corrected)
        if self._register.bridge.is_open(client):
            # A forge that registers uploads in a hash takes no lock: an object is deleted right after the look at it.
            self.chunk_size = min(self.chunk_size, MAX_UNLOCKED_UPLOADS)
            self.decides_for_good = False
        found = self._register.count_entries(client)
        if found.unreadable:
            log.error("uploads without a time kept", entries=found.unreadable, first=found.unreadable_example)
        return {self._fields["pending"]: found.pending, self._fields["failed"]: found.unreadable}

    def end_run(self, stopped: str | None, _error: Exception | None) -> tuple[dict[str, Any], Exception | None]:
        # The next attempt gets the claimed entries of locations that do not answer.
        for entries in self._untried:
            self.put_back(entries)
        is_timed_out = stopped == "deadline" and self._deadline.seconds_left() == 0
        return {self._fields["timed_out"]: is_timed_out}, self._find_failure()

    def _find_failure(self) -> StoreUnavailable | None:
        # The names of all locations that had to be stopped are at the beginning: a ledger cuts long sentences.
        away = self.target.store_errors
        names, reasons = list(map(str, away)), "; ".join(map(str, away.values()))
        said = reasons if len(names) == 1 else f"{', '.join(sorted(names))}: {reasons}"
        return StoreUnavailable(said, {}) if names else None

    def find_scope(self, one: UploadEntry) -> str | None:
        return None if is_malformed(one) else one.location

    def exclusion_key(self, one: UploadEntry) -> tuple[None, str]:
        return None, one.member

    def claim_next(self, page: KeyPage) -> list[UploadEntry]:
        only = None
        if self._not_excluded.has_exclusions():
            only = self._not_excluded.find_next_members(client, page.limit)
        visibility = self._settings.upload_visibility
        return self._register.claim(client, visibility=visibility, limit=page.limit, only=only).entries

    def find_kept(self, items: Sequence[UploadEntry]) -> dict[UploadEntry, KeptItem]:
        states = {entry: find_unfit_state(entry, self._settings) for entry in items}
        kept = {entry: KeptItem(UNFIT_REASONS[state], state) for entry, state in states.items() if state}
        again = self._register.bridge.find_registered(client, [entry.member for entry in items])
        return {entry: KeptItem(PREPARED_AGAIN_REASON) for entry in items if entry.member in again} | kept

    def mark_for_deletion(
        self, items: Sequence[UploadEntry], kept: Mapping[UploadEntry, ItemState]
    ) -> dict[UploadEntry, AuditItem | ItemState]:
        # An upload that its producer is just completing stays: its claim expires, and a later run looks again.
        marked: dict[UploadEntry, AuditItem | ItemState] = {entry: kept[entry] for entry in items if entry in kept}
        some, location = {entry.path: entry for entry in items if entry not in kept}, items[0].location
        if some:
            free = SettledUpload.lock_free(location, list(some))
            answered = find_referenced_paths(self._objects, location, free, self._settings)
            going = [path for path in free if path not in answered]
            SettledUpload.record_reaped(location, going, self._run_number)
            marked |= {some[path]: self._make_audit_item(some[path]) for path in going}
            marked |= {some[path]: KeptItem(reason) for path, reason in answered.items()}
        return marked

    def _make_audit_item(self, entry: UploadEntry) -> AuditItem:
        due = self._due_since(entry)
        # As text, because the intent and the outcome would each format the instant.
        detail = {"location": entry.location, "path": entry.path, "due": due and due.isoformat()}
        return AuditItem(None, entry.path, detail)

    def _due_since(self, entry: UploadEntry) -> datetime | None:
        return (
            None
            if entry.registered_at is None
            else to_datetime(entry.registered_at) + self._objects.register.older_than
        )

    def _find_conditions(self, items: Sequence[UploadEntry]) -> DeleteConditions:
        seen = {entry.path: written_before(entry.adopted_at) for entry in items if entry.adopted_at is not None}
        # An entry without its time of registration was claimed before: it has been stale for some time.
        latest = to_datetime(client.time()[0]) - self._objects.register.older_than
        return DeleteConditions(seen, {entry.path: self._due_since(entry) or latest for entry in items} | seen)

    def find_lost(self, items: Sequence[UploadEntry]) -> list[UploadEntry]:
        return self._register.find_lost(client, _claim_of(items), items)

    def note_unanswered(self, scope: str | None) -> None:
        self.target.handle_error(scope, TimeoutError(f"{scope}: no answer before the claim expired"))

    def settle(self, states: Mapping[UploadEntry, ItemState]) -> dict[str, int]:
        # A changed object stays, so its upload was not reaped after all.
        changed = [entry for entry, became in states.items() if became.state == "changed"]
        if changed:
            SettledUpload.delete_reaped(changed[0].location, [entry.path for entry in changed])
        return {}

    def settle_outside_database(self, states: Mapping[UploadEntry, ItemState]) -> dict[str, int]:
        by = defaultdict[str, list[UploadEntry]](list)
        for entry, became in states.items():
            by[became.state].append(entry)
        self._log_kept(states, by)
        register, claim = self._register, _claim_of(list(states))
        register.forget(client, claim, [entry for state in KEPT_UPLOAD_STATES for entry in by[state]])
        if untried := by["unavailable"]:
            self._untried.append(untried)
        put_aside = register.reject(client, claim, by["malformed"] + by["outside"])
        failed = by["no_store"] + by["failed"]
        for entry in failed:
            last = register.record_failure(client, claim, entry)
            why = {"location": entry.location, "path": entry.path, "reason": states[entry].reason}
            log.warning("upload not deleted", **why, given_up=last)
        deleted = register.forget(client, claim, by["deleted"] + by["missing"])
        return {self._fields["deleted"]: deleted, self._fields["failed"]: put_aside + len(failed)}

    def _log_kept(self, states: Mapping[UploadEntry, ItemState], by: Mapping[str, Sequence[UploadEntry]]) -> None:
        for entry, became in states.items():
            if became.state in KEPT_UPLOAD_STATES:
                reason = became.reason or "its object was written after its registration"
                log.error("upload kept", location=entry.location, path=entry.path, reason=reason)
        for state, reason in UNFIT_REASONS.items():
            if rejected := by.get(state):
                first = min(entry.member for entry in rejected)
                log.error("uploads rejected", reason=reason, entries=len(rejected), first=first)

    def settle_earlier(self, rows: Sequence[Mapping[str, Any]]) -> list[bool]:
        members = [f"{row['location']}:{row['path']}" for row in rows]
        return [bool(dropped) for dropped in self._register.settle(client, "found_deleted", members)]

    def put_back(self, items: Sequence[UploadEntry]) -> None:
        self._register.put_back(client, _claim_of(items), items)


def _claim_of(entries: Sequence[UploadEntry]) -> UploadClaim:
    """Return the claim of some entries of one chunk."""
    return UploadClaim(entries[0].token if entries else "", list(entries))


def is_malformed(entry: UploadEntry) -> bool:
    """Return whether the entry can name no object at any store; any program may write to the register."""
    return not entry.location or bool(UNPRINTABLE_CHARACTERS.search(entry.location)) or not is_normal(entry.path)


def find_unfit_state(entry: UploadEntry, settings: Settings) -> str | None:
    """Return why no object of the entry may be deleted, a key of `UNFIT_REASONS`; None if it may be."""
    if is_malformed(entry):
        return "malformed"
    if entry.location not in settings.object_stores:
        return "no_store"
    return None if is_below(settings.object_prefixes.get(entry.location, ()), entry.path) else "outside"


def find_referenced_paths(
    objects: Objects[Any], location: str, paths: Sequence[str], settings: Settings
) -> dict[str, str]:
    """Return the *paths* that an owner, the outbox or a producer names, and why each is kept."""
    owner = None if objects.unless is None else objects.unless.owner
    return stores.find_kept_paths(owner, location, paths, settings)
