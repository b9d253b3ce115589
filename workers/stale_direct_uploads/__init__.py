"""Delete uploads that began three hours ago and never completed (batch 100).

Runs every six minutes.  Stale entries are claimed from the register, oldest first, remembered
in PostgreSQL as reaped, their objects deleted in bulk, the entries forgotten.  A claim that a
crash leaves behind is taken up by a later run.  A bad entry, an unknown location or a store that
is down stops nobody else.

Redis may go back and give an entry out again that has completed or was reaped.  So it is not the
register that decides about an object, but PostgreSQL, under the upload's lock: no row that names
it, committed before a sweep remembers it as reaped, and none after.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import groupby
from typing import Any

import structlog

from forgekeeper.audit.intents import Intended, Item, close_earlier
from forgekeeper.batches import Record, Threshold, batch
from forgekeeper.connections import client
from forgekeeper.database import database, probe
from forgekeeper.database.backlog import Backlog
from forgekeeper.database.stakes import Stake
from forgekeeper.database.writes import writing
from forgekeeper.redis_values import moment
from forgekeeper.runs.blocked import Blocked
from forgekeeper.runs.run import Run
from forgekeeper.runs.totals import Amount
from forgekeeper.settings import Settings
from forgekeeper.shown import backlog_readings
from forgekeeper.storage import owners, stores
from forgekeeper.storage.objects import OUTSIDE, Objects, StoreUnavailable, is_normal
from forgekeeper.storage.objects import Outcome as Deletion
from forgekeeper.storage.outbox import DeletedObject
from forgekeeper.storage.settled import SettledUpload
from metrics.catalogue.metric import Reading
from models import JobArtifact
from workers.stale_direct_uploads import foreseen, register, sample
from workers.stale_direct_uploads.entries import Claim, Entry

MAX_UPLOAD_DURATION = register.MAX_UPLOAD_DURATION
MAX_EXEC_DURATION = timedelta(seconds=250)
CHUNK = 1_000
LOCKED = 250
"""So many locks of uploads are held at once: PostgreSQL has room for some thousands by default."""
BACKOFF = timedelta(minutes=6)
"""The next run: sooner nobody would look."""

SEARCHED = 1_000
"""How many pending uploads are searched for some of a location's; its share may be small."""

RECORD = "stale_upload"
NAMED = 10
"""So many locations that are not configured are named in the line about them."""
OTHERS = "others"

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
    cron_sentence="When uploads that never completed are deleted.",
    pace_sentence="Uploads deleted per second; unset: no limit.",
    budget=MAX_EXEC_DURATION,
    time_limit=timedelta(minutes=6),
    outcome=Outcome,
    tables=[JobArtifact, DeletedObject, SettledUpload],
    misreadings=lambda: [said] if (said := unread_register()) else [],
    deletes_from="stores",
    records=[
        Record("pending_upload", examined=("total_pending_entries",), backlog=True),
        Record(
            "stale_upload",
            processed=("total_deleted_stale_entries",),
            errors={"object_storage": ("failed_entries",)},
            objective=timedelta(hours=1),
        ),
        Record("failed_upload", given_up=True),
    ],
    thresholds=[
        Threshold("duration", above=250),
        Threshold("consecutive_failures", above=2),
        Threshold("backlog", above=10_000, found=("total_pending_entries",), done=("total_deleted_stale_entries",)),
    ],
    collector="uploads",
    steps=["claimed", "remembered", "deleted", "forgotten"],
    commands="workers.stale_direct_uploads.commands",
)
def stale_direct_uploads(run: Run[Outcome]) -> None:
    """Delete uploads that began three hours ago and never completed.

    Raises `StoreUnavailable` when stores did not answer, after everything at the others was done.
    """
    if not run.settings.object_stores:
        raise Blocked("no_store", "no object store is configured; set FORGEKEEPER_OBJECT_STORES")
    if mended := register.set_right(client):
        log.warning("uploads of a time to come set right", entries=mended)
    sweep, outcome = Sweep(run), run.outcome
    sweep.close_interrupted()
    outcome.total_pending_entries = register.unsettled(client)
    try:
        while (limit := run.brakes.free(CHUNK)) and (claim := sweep.claim(limit)).entries:
            run.step("claimed")
            sweep.work_through(claim)
            if run.deadline.passed(len(claim.entries)):
                # Not when it was asked to stop.
                outcome.execution_timeout = run.deadline.left() == 0
                break
    finally:
        sweep.tell_of_unknown()
    sweep.report()


class Sweep:
    """One run through the register; *away* are the locations that it has had to stop, and why."""

    def __init__(self, run: Run[Outcome]) -> None:
        self._run = run
        self._outcome = run.outcome
        self._away: dict[str, str] = {}
        self._unknown: Counter[str] = Counter()
        self._example = ""
        self._given_up = 0
        self._settings = run.settings
        self._deadline = run.deadline

    def close_interrupted(self) -> None:
        """Say what has become of uploads that runs before ours were at, where their stores answer."""
        for location in self._settings.object_stores:
            with suppress(StoreUnavailable):
                close_earlier(self._run.audit, RECORD, partial(self._look, location), name="path", scope=location)

    def _look(self, location: str, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        store = stores.at(location, self._settings)
        until = time.monotonic() + self._deadline.left()
        there = {} if store is None else store.present([row["path"] for row in rows], until=until)
        return [None if row["path"] not in there else "kept" if there[row["path"]] else "deleted" for row in rows]

    def claim(self, limit: int) -> Claim:
        """Claim up to *limit* of the next entries, of locations that answer."""
        return register.claim(
            client,
            stale_after=MAX_UPLOAD_DURATION,
            visibility=self._settings.upload_visibility,
            limit=limit,
            ttl=self._settings.upload_visibility / 5,
            skip_locations=self._away,
        )

    def report(self) -> None:
        """Raise `StoreUnavailable` when a location had to be stopped; the message names each."""
        reasons = "; ".join(self._away.values())
        if self._away:
            # A ledger cuts long sentences: where there are several, their names come first.
            several = f"{', '.join(sorted(self._away))}: " if len(self._away) > 1 else ""
            raise StoreUnavailable(several + reasons, {})

    def tell_of_unknown(self) -> None:
        """Say, once, how many entries have a location that no store is configured for, and name one of them."""
        if self._unknown:
            log.error(
                "no store is configured",
                locations=list(self._unknown),
                entries=self._unknown.total(),
                given_up=self._given_up,
                first=self._example,
            )

    def work_through(self, claim: Claim) -> None:
        """Delete the claim's objects, location by location."""
        bad = {entry for entry in claim.entries if entry.malformed or not is_normal(entry.path)}
        if bad:
            log.error("upload entries malformed", entries=len(bad), first=min(entry.member for entry in bad))
            self._outcome.failed_entries += register.reject(client, claim, bad)
        for location, entries in _by_location(entry for entry in claim.entries if entry not in bad):
            self._at(location, claim, entries)

    def _within(self, store: Objects, claim: Claim, entries: list[Entry]) -> list[Entry]:
        """Reject the entries whose objects may not be deleted wherever they are from; return the rest."""
        outside = [entry for entry in entries if not store.may_delete(entry.path)]
        if outside:
            log.error("uploads rejected", reason=OUTSIDE, entries=len(outside), first=outside[0].member)
            self._outcome.failed_entries += register.reject(client, claim, outside)
        return [entry for entry in entries if store.may_delete(entry.path)]

    def _doomed(self, location: str, claim: Claim, entries: list[Entry], told: Intended[Entry]) -> list[Entry]:
        """Remember as reaped what nobody answers for, tell of it, and return it; drop the entries of the rest.

        What a producer is completing just now is left alone: its claim runs out, and a later run looks again.
        """
        doomed = []
        for start in range(0, len(entries), LOCKED):
            some = {entry.path: entry for entry in entries[start : start + LOCKED]}
            with database.atomic():
                free = SettledUpload.lock_free(location, list(some))
                kept = owners.answered_for(JobArtifact, location, free, self._settings)
                going = [path for path in free if path not in kept]
                SettledUpload.reap(location, going, self._run.number)
                told.begin({some[path]: _item(some[path]) for path in going})
            self._keep(claim, {some[path]: reason for path, reason in kept.items()})
            doomed += [some[path] for path in going]
        return doomed

    def _keep(self, claim: Claim, reasons: dict[Entry, str]) -> None:
        for entry, reason in reasons.items():
            log.error("upload kept", location=entry.location, path=entry.path, reason=reason)
        register.keep(client, claim, list(reasons))

    def _at(self, location: str, claim: Claim, entries: list[Entry]) -> None:
        told = Intended[Entry](self._run.audit, RECORD, scope=location, location=location)
        try:
            store = stores.at(location, self._settings)
            if store is None:
                self._fail_unknown(location, claim, entries)
                return
            entries = self._within(store, claim, entries)
            if claim.expired(time.monotonic()):
                # Another location may have taken all the time: given back, they need not wait for the claim to run out.
                log.warning("claim dropped, too old to be acted on", entries=len(entries))
                register.put_back(client, claim, entries)
                return
            if self._deadline.halted():
                register.put_back(client, claim, entries)
                return
            entries = self._within_limits(claim, entries)
            reserved = len(entries)
            entries = self._doomed(location, claim, entries, told)
            self._run.brakes.give_back(reserved - len(entries))
            self._run.step("remembered")
            if not entries:
                return
            until = min(claim.until, time.monotonic() + self._deadline.left())
            seen = {entry.path: register.last_seen(entry.adopted) for entry in entries if entry.adopted is not None}
            known = store.delete([entry.path for entry in entries], until=until, unless_changed_since=seen)
            self._run.step("deleted")
            self._settle(claim, entries, known, told)
            if not known and self._deadline.left() > 0:
                self._stop(location, f"{location}: no answer while the claim lasted")
        except StoreUnavailable as error:
            if not error.began:
                self._run.brakes.give_back()
            self._settle(claim, entries, error.known, told)
            self._stop(location, str(error))

    def _within_limits(self, claim: Claim, entries: list[Entry]) -> list[Entry]:
        """Reserve what may go, and give the rest back."""
        granted = self._run.brakes.reserve(len(entries)).records
        if entries[granted:]:
            register.put_back(client, claim, entries[granted:])
        return entries[:granted]

    def _stop(self, location: str, reason: str) -> None:
        log.error("object store unavailable", location=location, error=reason)
        self._away[location] = reason

    def _settle(self, claim: Claim, entries: list[Entry], known: dict[str, Deletion], told: Intended[Entry]) -> None:
        """Forget what is gone, spend an attempt on what failed, give the rest back untried."""
        states = {entry: known[entry.path] for entry in entries if entry.path in known}
        gone = [entry for entry, outcome in states.items() if outcome.state in ("deleted", "missing")]
        changed = [entry for entry, outcome in states.items() if outcome.state == "changed"]
        went, settled = Amount(len(gone)), len(gone) + len(changed)
        with writing():
            told.end({entry: states[entry].state for entry in told.open() if entry in states})
            self._run.brakes.settle(went, of=settled)
        self._run.brakes.went(went, of=settled)
        self._keep(claim, dict.fromkeys(changed, "its object was written since it was registered"))
        SettledUpload.forget(entries[0].location, [entry.path for entry in changed])
        self._outcome.total_deleted_stale_entries += register.forget(client, claim, gone)
        self._run.step("forgotten")
        self._fail(claim, {entry: outcome.reason for entry, outcome in states.items() if outcome.state == "failed"})
        register.put_back(client, claim, [entry for entry in entries if entry not in states])

    def _fail_unknown(self, location: str, claim: Claim, entries: list[Entry]) -> None:
        for entry in entries:
            self._given_up += register.fail(client, claim, entry, backoff=BACKOFF)
            self._outcome.failed_entries += 1
        self._example = self._example or entries[0].member
        # Of locations that are any number of noise no more is kept than is told.
        self._unknown[location if len(self._unknown) < NAMED or location in self._unknown else OTHERS] += len(entries)

    def _fail(self, claim: Claim, reasons: dict[Entry, str]) -> None:
        for entry, reason in reasons.items():
            last = register.fail(client, claim, entry, backoff=BACKOFF)
            log.warning("upload not deleted", location=entry.location, path=entry.path, reason=reason, given_up=last)
            self._outcome.failed_entries += 1


def _item(entry: Entry) -> Item:
    due = None if entry.registered is None else moment(entry.registered) + MAX_UPLOAD_DURATION
    return Item(None, entry.path, {"path": entry.path, "due": due})


def _by_location(entries: Iterator[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    ordered = sorted(entries, key=lambda entry: entry.location)
    for location, group in groupby(ordered, key=lambda entry: entry.location):
        yield location, list(group)


def unread_register() -> str | None:
    """Say that uploads are registered where nobody looks, None when none are."""
    count = register.unread(client)
    if not count:
        return None
    return (
        f"Redis has a hash {register.REFERENCE} with {count} uploads, which nobody here reads: let the forge register "
        f"them as docs/uploads.md says, or give forgekeeper a Redis of its own"
    )


@stale_direct_uploads.backlog("pending_upload")
def pending(_now: datetime) -> Backlog:
    """Count the uploads that are on their way."""
    return Backlog(register.census(client, MAX_UPLOAD_DURATION).pending)


@stale_direct_uploads.backlog("stale_upload")
def stale(_now: datetime) -> Backlog:
    """Count the uploads that are due, and since when the oldest is."""
    found = register.census(client, MAX_UPLOAD_DURATION)
    return Backlog(found.due, found.due_since)


@stale_direct_uploads.at_stake
def at_stake(_now: datetime) -> Stake:
    """Look at the uploads that are due, of all in the register."""
    found = register.census(client, MAX_UPLOAD_DURATION)
    return Stake(due=lambda _bound: found.due, of=lambda _bound: found.pending)


@stale_direct_uploads.given_up("failed_upload")
def failed() -> int:
    """Count the uploads that were given up."""
    return register.census(client, MAX_UPLOAD_DURATION).failed


@stale_direct_uploads.collector("uploads", database=False)
def readings(_settings: Settings) -> Iterator[Reading]:
    """Read all of it in one look, which needs no database."""
    batch, found = stale_direct_uploads.name, register.census(client, MAX_UPLOAD_DURATION)
    yield Reading("backlog_records", found.pending, (batch, "pending_upload"))
    yield from backlog_readings(batch, "stale_upload", Backlog(found.due, found.due_since))
    yield Reading("given_up_records", found.failed, (batch, "failed_upload"))


@stale_direct_uploads.objects
def known(location: str) -> list[str]:
    """Return some pending uploads, of which the objects should lie at the location."""
    return register.sampled(client, location, SEARCHED)[: probe.SIZE]


stale_direct_uploads.preview(foreseen.foreseen)
stale_direct_uploads.sample(sample.add)
stale_direct_uploads.present(sample.present)
stale_direct_uploads.proof(sample.proof)
stale_direct_uploads.left(sample.left)
