"""The loop that deletes what lies outside the database: claimed, intended, deleted and settled, a chunk at a time."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from functools import partial
from typing import Any, Generic, NamedTuple

import peewee as pw
import structlog

from forgekeeper.api.items import Deleted, Ended, Fence, Item, Items, One, Page, State
from forgekeeper.audit.deletions import REPEATED, EarlierIntent, Intended, find_earlier
from forgekeeper.engine.run import BadRecords, Run, of_a_record
from forgekeeper.ledger.totals import Amount
from forgekeeper.platform.database import exclusions
from forgekeeper.platform.database.sessions import engine, writing
from forgekeeper.targets.objects import ObjectStore
from forgekeeper.targets.outcomes import OUTSIDE, StoreUnavailable
from metrics.logs import describe

log = structlog.get_logger(__name__)


def delete(run: Run[Any], items: Items[Any]) -> str | None:
    """Delete the items; return why it ended before all were gone, None where none is left.

    What goes is said in the audit before, and settled after, with what it takes of limits: else it counts as gone.
    """
    try:
        with engine():
            run.note(items.begin())
        until = time.monotonic() + run.deadline.left()
        for scope in items.scopes():
            _close_earlier(run, items, scope, until)
        # Where items are in no table, none is passed over: what fails, fails the run.
        with run.bad_records(items.record, items.due_of) if items.keyed else nullcontext() as bad:
            stopped = _Pass(run, items, bad).whole()
    except Exception as error:
        run.note(items.end(Ended(error=error)))
        raise
    run.note(items.end(Ended(stopped, timed_out=stopped == "deadline" and run.deadline.left() == 0)))
    if failure := items.failure():
        raise failure
    return stopped


def _close_earlier(run: Run[Any], items: Items[Any], scope: str | None, until: float) -> None:
    """Close intents that earlier attempts left open; count the items that they deleted and did not count."""
    became = partial(items.became, scope, until)
    for found in find_earlier(run.audit, items.record, became, name=items.name, scope=scope):
        ended, deleted, counted = [], 0, 0
        with writing():
            for earlier in found:
                states, settled = _settle_earlier(items, earlier)
                ended.append(earlier.close_as(states))
                if settled is not None:
                    deleted += settled
                    counted += run.brakes.settle_earlier(earlier.intent.run, settled, of=len(states))
            run.audit.outcomes(items.record, ended)
        run.brakes.note_earlier(counted)
        run.add(items.deleted_field, deleted)


def _settle_earlier(items: Items[Any], earlier: EarlierIntent) -> tuple[Sequence[str], int | None]:
    """Settle the items of an earlier intent; return their states, and how many were deleted by it and not counted."""
    closed = items.settle_earlier([row for row, state in earlier.found() if state == "deleted"])
    if closed is None:
        return earlier.states, None
    # An item that is not there any more was claimed, deleted and recorded again since.
    next_closed = iter(closed)
    states = [REPEATED if state == "deleted" and not next(next_closed) else state for state in earlier.states]
    return states, sum(closed)


class _Lot(NamedTuple, Generic[One]):
    """Items of a scope that are ours: those that are *going*, and why others stay."""

    going: list[One]
    kept: dict[One, State]
    intended: Intended[One]


class _Pass(Generic[One]):
    """One pass over the items."""

    def __init__(self, run: Run[Any], items: Items[One], bad: BadRecords | None) -> None:
        self._run = run
        self._items = items
        self._understood = items.gone | items.stays
        self._bad = bad
        self._after = 0
        self._ours_until = 0.0
        self._settled = self._going = 0

    def whole(self) -> str | None:
        """Delete chunk after chunk; return why it ended."""
        run, items = self._run, self._items
        while items.most is None or self._settled < items.most:
            limit = run.brakes.free(items.chunk)
            claimed, more = self._claim(limit) if limit else ([], True)
            if not more:
                return None
            if not claimed:
                break
            run.step("claimed")
            before = self._going
            stopped = self._chunk(claimed)
            # What stays costs nothing of the pace: of a store that is away there may be any number.
            if stopped is not None or run.deadline.passed(self._going - before):
                return stopped or "deadline"
        else:
            return items.at_most if items.next(self._page(1)) else None
        return "deadline"

    def _page(self, limit: int, only: Sequence[int] | None = None) -> Page:
        return Page(limit, self._after, only, self._bad.keys if self._bad else ())

    def _claim(self, limit: int) -> tuple[list[One], bool]:
        """Claim what comes next, bad records aside; return it, and whether there was anything at all."""
        # What was claimed is ours for so long; it is counted from before the claim.
        visible, left = self._items.visibility, self._run.deadline.left()
        self._ours_until = time.monotonic() + (left if visible is None else visible.total_seconds())
        claimed: list[One] = []

        def claim(only: Sequence[int] | None) -> int | None:
            with writing() if self._bad else engine():
                found = self._items.claim(self._page(limit, only))
            claimed.extend(found)
            return self._items.key(found[-1]) if found and self._bad else None

        if self._bad is None:
            claim(None)
            return claimed, bool(claimed)
        reached = self._bad.chunk(claim, lambda: self._items.next(self._page(limit)))
        self._after = self._after if reached is None else reached
        return claimed, reached is not None

    def _chunk(self, claimed: Sequence[One]) -> str | None:
        """Delete what was claimed, scope by scope; return why the run has to end."""
        by_scope = defaultdict[str, list[One]](list)
        for one in self._not_excluded(claimed):
            by_scope[self._items.scope(one) or ""].append(one)
        for scope, these in sorted(by_scope.items()):
            stopped = self._of_scope(scope or None, these)
            self._run.brakes.leave_used()
            if stopped is not None:
                return stopped
        return None

    def _not_excluded(self, claimed: Sequence[One]) -> list[One]:
        """Leave what people exclude as it was claimed."""
        excluded = exclusions.among(self._run.declared.batch.name, partial(map, self._items.excludable, claimed))
        return [one for place, one in enumerate(claimed) if place not in excluded]

    def _of_scope(self, scope: str | None, these: Sequence[One]) -> str | None:
        if self._too_late(these):
            return None
        if self._run.lease is not None:
            self._run.lease.check()
        kept = dict(self._items.look(these))
        intended = Intended[One](self._run.audit, self._items.record, scope=scope)
        with self._giving_back(intended):
            lot = self._marked(intended, these, kept)
        self._going += len(lot.going)
        self._run.step("marked")
        if not lot.going:
            self._settle(lot, {})
            return None
        with engine(), self._giving_back(intended):
            found = self._items.delete(lot.going, self._fence(lot))
        if not found.began:
            self._run.brakes.give_back()
        if found.error is None:
            self._run.step("deleted")
        self._settle(lot, found.states)
        if found.error is not None:
            return self._items.interrupted(scope, found.error)
        if not found.states and self._run.deadline.left() > 0:
            self._items.unanswered(scope)
        return None

    def _giving_back(self, intended: Intended[One]) -> AbstractContextManager[None]:
        """Give back what is reserved for items that were not announced, if what is done within fails."""
        # Without an audit nothing says what was.
        return self._run.brakes.giving_back(lambda: len(intended.open())) if self._run.audit.on else nullcontext()

    def _fence(self, lot: _Lot[One]) -> Fence[One]:
        def announce(items: Mapping[One, Item]) -> None:
            with writing():
                self._record_look(items)
                lot.intended.begin(items)
            self._run.step("announced")

        until = min(self._ours_until, time.monotonic() + self._run.deadline.left())
        return Fence(until, announce, self._find_lost)

    def _record_look(self, items: Mapping[One, Item]) -> None:
        try:
            with writing():
                self._items.record_look(items)
        except (pw.PeeweeException, ValueError) as error:
            if not of_a_record(error):
                raise
            log.warning("look not recorded", record=self._items.record, error=describe(error))

    def _find_lost(self, items: Sequence[One]) -> Collection[One]:
        if self._run.lease is not None:
            self._run.lease.check()
        return items if self._is_expired() else self._items.find_lost(items)

    def _is_expired(self) -> bool:
        return self._items.visibility is not None and time.monotonic() > self._ours_until

    def _too_late(self, these: Sequence[One]) -> bool:
        """Say whether nothing may be done about a claim any more; then it is given up."""
        if self._items.visibility is None:
            return False
        if expired := self._is_expired():
            log.warning("claim dropped, too old to be acted on", items=len(these))
        if late := expired or self._run.deadline.halted():
            self._put_back(these)
        return late

    def _put_back(self, these: Sequence[One]) -> None:
        if these:
            with writing():
                self._items.put_back(these)

    def _marked(self, intended: Intended[One], these: Sequence[One], kept: dict[One, State]) -> _Lot[One]:
        """Reserve what limits let, and say what is about to go, while it is ours; give back what is not."""
        free = [one for one in these if one not in kept]
        surplus = free[self._run.brakes.reserve(len(free)).records :] if free else []
        self._put_back(surplus)
        if surplus and self._bad:
            self._after = min(map(self._items.key, surplus)) - 1
        given = set(surplus)
        ours = [one for one in these if one not in given]
        lot = _Lot[One]([], {}, intended)
        for start in range(0, len(ours), self._items.marked):
            some = ours[start : start + self._items.marked]
            with writing():
                marked = self._items.mark(some, kept)
                intended.begin({one: said for one, said in marked.items() if isinstance(said, Item)})
            for one, said in marked.items():
                if said is None or isinstance(said, Item):
                    lot.going.append(one)
                else:
                    lot.kept[one] = said
        self._run.brakes.give_back(len(free) - len(surplus) - len(lot.going))
        return lot

    def _settle(self, lot: _Lot[One], states: Mapping[One, State]) -> None:
        """Close what is known; what is not, goes back."""
        bad, known = self._bad, {**lot.kept, **states}
        failed = bad.failed if bad else 0
        settled = [one for one, became in known.items() if became.state not in self._items.waits]
        sure = [one for one in settled if known[one].state in self._understood]
        others = [one for one in settled if known[one].state not in self._understood]
        self._run.brakes.give_back(len(known) - len(settled))
        self._close(lot, known, sure)
        self._run.step("settled")
        self._close(lot, known, others)
        # The world is as it is, whatever stands in the way of a row.
        if left := {one: known[one].state for one in lot.intended.open() if one in known}:
            with lot.intended.ending(left):
                pass
        self._put_back([one for one in lot.going if one not in known])
        if bad and self._items.all_bad and bad.error is not None and bad.failed - failed == len(settled):
            raise bad.error  # none at all: not these records, but what their table is in

    def _close(self, lot: _Lot[One], known: Mapping[One, State], these: Sequence[One]) -> None:
        def close(some: Sequence[One]) -> None:
            self._close_some(lot.intended, {one: known[one] for one in some}, set(lot.going))

        if these and self._bad:
            by_key = {self._items.key(one): one for one in these}
            self._bad.each(lambda keys: close([by_key[key] for key in keys]), list(by_key))
        elif these:
            close(these)

    def _close_some(self, intended: Intended[One], states: dict[One, State], going: set[One]) -> None:
        items, brakes = self._items, self._run.brakes
        ours = {one: became.state for one, became in states.items() if one in going}
        went = Amount(sum(state in items.gone for state in ours.values()))
        of = sum(state in self._understood for state in ours.values())
        with intended.ending(ours):
            counts = items.settle(states)
            if of:
                brakes.settle(went, of=of)
        if of:
            brakes.went(went, of=of)
        with engine():
            counts = Counter(counts) + Counter(items.forget(states))
        for field, count in counts.items():
            self._run.add(field, count)
            self._settled += count


def deleted_at(
    store: ObjectStore,
    paths: Mapping[One, str],
    fence: Fence[One],
    *,
    unless_changed_since: Mapping[str, datetime] | None = None,
    uploads_begun_before: Mapping[str, datetime] | None = None,
) -> Deleted[One]:
    """Delete the objects at the *paths* of items; return the known outcomes, also if the store does not answer.

    See `ObjectStore.delete`.
    """
    of_path = defaultdict[str, list[One]](list)
    for one, path in paths.items():
        of_path[path].append(one)

    def find_lost(some: Sequence[str]) -> list[str]:
        lost = set(fence.find_lost([one for path in some for one in of_path[path]]))
        return [path for path in some if lost.issuperset(of_path[path])]

    error: StoreUnavailable | None = None
    conditions = {"unless_changed_since": unless_changed_since, "uploads_begun_before": uploads_begun_before}
    try:
        known = store.delete(list(of_path), until=fence.until, find_lost=find_lost, **conditions)
    except StoreUnavailable as unavailable:
        known, error = unavailable.known, unavailable
    outside = [path for path, outcome in known.items() if OUTSIDE in outcome.reason]
    if outside:
        log.error("objects not deleted", reason=OUTSIDE, objects=len(outside), first=outside[0])
    states = {one: known[path] for one, path in paths.items() if path in known}
    return Deleted(states, error=error, began=error is None or error.began)


def stood_at(store: ObjectStore, rows: Sequence[Mapping[str, Any]], *, until: float) -> list[str | None]:
    """Say of the objects of a dead attempt whether they are there; None of those of which the store says nothing."""
    there = store.present([row["path"] for row in rows], until=until)
    return [None if row["path"] not in there else "kept" if there[row["path"]] else "deleted" for row in rows]
