"""The loop that deletes items of any source in any target: claims, looks, marks, deletes and settles in chunks."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Generic, NamedTuple

import peewee as pw
import structlog

from forgekeeper.audit.deletions import REPEATED, EarlierIntent, Intended, Item, find_earlier
from forgekeeper.engine.run import BadRecords, Run, of_a_record
from forgekeeper.engine.source import KeyedSource, Source
from forgekeeper.engine.target import Fence, One, State, Target
from forgekeeper.ledger.totals import Amount
from forgekeeper.platform.database import exclusions
from forgekeeper.platform.database.queries import Page
from forgekeeper.platform.database.sessions import engine, writing
from metrics.logs import describe

DELETED_STATES = frozenset({"deleted", "missing", "gone"})
"""States of items that count towards limits."""
KEPT_STATES = frozenset({"kept", "changed", "moved", "rejected"})
"""States of items that were not deleted.

Each other state, as ``failed``, has used the limits reserved for the item.
"""
CERTAIN_STATES = DELETED_STATES | KEPT_STATES
WAITING_STATES = frozenset({"locked"})
"""States of items that stay in their source as they were."""
STOPPED_AT_MOST = "max_deletes"
"""Reason why a run stopped after the most items that its source allows."""

log = structlog.get_logger(__name__)


def delete_items(run: Run[Any], source: Source[Any], target: Target[Any]) -> str | None:
    """Delete the items of the source; return why the loop ended before all were deleted, None if none is left.

    The limits are reserved after a look at a chunk.  The audit's intent is committed in the transaction that marks the
    items, its outcome and the used limits in the transaction that settles them.  If the process dies in between, the
    items count as deleted, and the next run finds the intent and asks the target for their state.
    """
    try:
        with engine():
            run.note(source.begin())
        until = time.monotonic() + run.deadline.left()
        for scope in target.scopes():
            _close_earlier(run, source, target, scope, until)
        # Items without a key cannot be passed over: an error of one fails the run.
        passing = run.bad_records(source.record, source.find_due) if isinstance(source, KeyedSource) else nullcontext()
        with passing as bad:
            stopped = _Pass(run, source, target, bad).delete_all()
    except Exception as error:
        run.note(source.end(None, error)[0])
        raise
    fields, failure = source.end(stopped, None)
    run.note(fields)
    if failure is not None:
        raise failure
    return stopped


def _within_share(source: Source[Any], scope: str | None) -> str | None:
    """Return the name of a scope in the audit: a child must not close the intents of a child with another share."""
    return scope if source.share is None else f"{scope or ''}: {source.share}"


def _close_earlier(run: Run[Any], source: Source[Any], target: Target[Any], scope: str | None, until: float) -> None:
    """Close intents that dead attempts left open; count the items that they deleted and did not count."""
    became = partial(target.became, scope, until)
    shared = _within_share(source, scope)
    for found in find_earlier(run.audit, source.record, became, name=target.name, scope=shared):
        ended, deleted, counted = [], 0, 0
        with writing():
            for earlier in found:
                states, settled = _settle_earlier(source, earlier)
                ended.append(earlier.close_as(states))
                if settled is not None:
                    deleted += settled
                    counted += run.brakes.settle_earlier(earlier.intent.run, settled, of=len(states))
            run.audit.outcomes(source.record, ended)
        run.brakes.note_earlier(counted)
        run.add(source.deleted_field, deleted)


def _settle_earlier(source: Source[Any], earlier: EarlierIntent) -> tuple[Sequence[str], int | None]:
    """Settle the items of an earlier intent; return their states, and how many it deleted that were not counted."""
    closed = source.settle_earlier([row for row, state in earlier.found() if state == "deleted"])
    if closed is None:
        return earlier.states, None
    # An item that is not there any more was claimed, deleted and recorded again since.
    next_closed = iter(closed)
    states = [REPEATED if state == "deleted" and not next(next_closed) else state for state in earlier.states]
    return states, sum(closed)


class _Lot(NamedTuple, Generic[One]):
    """Items of a scope that are ours: *going* to be deleted, or *kept*."""

    going: list[One]
    kept: dict[One, State]
    intended: Intended[One]


class _Pass(Generic[One]):
    """One pass over the items of the source.

    *bad* are records to pass over, None if items have no keys.
    """

    def __init__(self, run: Run[Any], source: Source[One], target: Target[One], bad: BadRecords | None) -> None:
        self._run, self._source, self._target, self._bad = run, source, target, bad
        self._after = 0
        self._ours_until = 0.0
        self._settled = self._going = 0

    def delete_all(self) -> str | None:
        """Delete chunk after chunk; return why it ended."""
        run, source = self._run, self._source
        while source.most is None or self._settled < source.most:
            limit = run.brakes.free(source.chunk)
            claimed, more = self._claim(limit) if limit else ([], True)
            if not more:
                return None
            if not claimed:
                break
            run.step("claimed")
            before = self._going
            stopped = self._delete_chunk(claimed)
            # Kept items use nothing of the pace: a store that is away may have any number of them.
            if stopped is not None or run.deadline.passed(self._going - before):
                return stopped or "deadline"
        else:
            return STOPPED_AT_MOST if self._keyed.find_keys(self._page(1)) else None
        return "deadline"

    @property
    def _keyed(self) -> KeyedSource[One]:
        assert isinstance(self._source, KeyedSource), "only items with keys have bad records, or a maximum"
        return self._source

    def _page(self, limit: int, only: Sequence[int] | None = None) -> Page:
        return Page(limit, self._after, only, self._bad.keys if self._bad else ())

    def _claim(self, limit: int) -> tuple[list[One], bool]:
        """Claim the next items without bad records; return them, and whether anything was due at all."""
        # The visibility time is counted from before the claim.
        visible, left = self._source.visibility, self._run.deadline.left()
        self._ours_until = time.monotonic() + (left if visible is None else visible.total_seconds())
        claimed: list[One] = []

        def claim(only: Sequence[int] | None) -> int | None:
            with writing() if self._bad else engine():
                found = self._source.claim(self._page(limit, only))
            claimed.extend(found)
            return self._keyed.key(found[-1]) if found and self._bad else None

        if self._bad is None:
            claim(None)
            return claimed, bool(claimed)
        reached = self._bad.chunk(claim, lambda: self._keyed.find_keys(self._page(limit)))
        self._after = self._after if reached is None else reached
        return claimed, reached is not None

    def _delete_chunk(self, claimed: Sequence[One]) -> str | None:
        """Delete the claimed items, scope by scope; return why the run has to end."""
        by_scope = defaultdict[str, list[One]](list)
        for one in self._remove_excluded(claimed):
            by_scope[self._source.scope(one) or ""].append(one)
        for scope, these in sorted(by_scope.items()):
            stopped = self._delete_in_scope(scope or None, these)
            self._run.brakes.leave_used()
            if stopped is not None:
                return stopped
        return None

    def _remove_excluded(self, claimed: Sequence[One]) -> list[One]:
        """Return the items that nobody excludes; the others stay as they were claimed."""
        excluded = exclusions.among(self._run.declared.batch.name, partial(map, self._source.excludable, claimed))
        return [one for place, one in enumerate(claimed) if place not in excluded]

    def _delete_in_scope(self, scope: str | None, these: Sequence[One]) -> str | None:
        if self._drop_late_claim(these):
            return None
        if self._run.lease is not None:
            self._run.lease.check()
        kept = dict(self._target.look(scope, these))
        if unseen := [one for one in these if one not in kept]:
            kept |= self._source.look(unseen)
        intended = Intended[One](self._run.audit, self._source.record, scope=_within_share(self._source, scope))
        with self._giving_back(intended):
            lot = self._mark(intended, these, kept)
        self._going += len(lot.going)
        self._run.step("marked")
        if not lot.going:
            self._settle(lot, {})
            return None
        with engine(), self._giving_back(intended):
            found = self._target.delete(scope, lot.going, self._make_fence(lot))
        if not found.began:
            self._run.brakes.give_back()
        if found.error is None:
            self._run.step("deleted")
        self._settle(lot, found.states)
        if found.error is not None:
            return self._target.interrupted(scope, found.error)
        if not found.states and self._run.deadline.left() > 0:
            self._source.unanswered(scope)
        return None

    def _giving_back(self, intended: Intended[One]) -> AbstractContextManager[None]:
        """Give back the limits of items that were not announced, if the block fails."""
        # Without an audit nobody knows which items were announced.
        return self._run.brakes.giving_back(lambda: len(intended.open())) if self._run.audit.on else nullcontext()

    def _make_fence(self, lot: _Lot[One]) -> Fence[One]:
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
                self._source.record_look(items)
        except (pw.PeeweeException, ValueError) as error:
            if not of_a_record(error):
                raise
            log.warning("look not recorded", record=self._source.record, error=describe(error))

    def _find_lost(self, items: Sequence[One]) -> Collection[One]:
        if self._run.lease is not None:
            self._run.lease.check()
        return items if self._is_expired() else self._source.find_lost(items)

    def _is_expired(self) -> bool:
        return self._source.visibility is not None and time.monotonic() > self._ours_until

    def _drop_late_claim(self, these: Sequence[One]) -> bool:
        """Put the items back if their claim has expired or the run has to end; return whether that is so."""
        if self._source.visibility is None:
            return False
        if expired := self._is_expired():
            log.warning("claim dropped, too old to be acted on", items=len(these))
        if late := expired or self._run.deadline.halted():
            self._put_back(these)
        return late

    def _put_back(self, these: Sequence[One]) -> None:
        if these:
            with writing():
                self._source.put_back(these)

    def _mark(self, intended: Intended[One], these: Sequence[One], kept: dict[One, State]) -> _Lot[One]:
        """Reserve limits, and record the intent for the items that are ours; give back the limits of the others."""
        free = [one for one in these if one not in kept]
        surplus = free[self._run.brakes.reserve(len(free)).records :] if free else []
        self._put_back(surplus)
        if surplus and self._bad:
            self._after = min(map(self._keyed.key, surplus)) - 1
        given = set(surplus)
        ours = [one for one in these if one not in given]
        lot = _Lot[One]([], {}, intended)
        for start in range(0, len(ours), self._source.locked):
            some = ours[start : start + self._source.locked]
            with writing():
                marked = self._source.mark(some, kept)
                intended.begin({one: said for one, said in marked.items() if isinstance(said, Item)})
            for one, said in marked.items():
                if said is None or isinstance(said, Item):
                    lot.going.append(one)
                else:
                    lot.kept[one] = said
        self._run.brakes.give_back(len(free) - len(surplus) - len(lot.going))
        return lot

    def _settle(self, lot: _Lot[One], states: Mapping[One, State]) -> None:
        """Close the items whose states are known; put the others back."""
        bad, known = self._bad, {**lot.kept, **states}
        failed = bad.failed if bad else 0
        settled = [one for one, became in known.items() if became.state not in WAITING_STATES]
        sure = [one for one in settled if known[one].state in CERTAIN_STATES]
        others = [one for one in settled if known[one].state not in CERTAIN_STATES]
        self._run.brakes.give_back(len(known) - len(settled))
        self._close(lot, known, sure)
        self._run.step("settled")
        self._close(lot, known, others)
        # The audit records a deletion even if the item's bad record is left as it was.
        if left := {one: known[one].state for one in lot.intended.open() if one in known}:
            with lot.intended.ending(left):
                pass
        self._put_back([one for one in lot.going if one not in known])
        if bad and bad.error is not None and self._keyed.fails_with_chunk and bad.failed - failed == len(settled):
            raise bad.error

    def _close(self, lot: _Lot[One], known: Mapping[One, State], these: Sequence[One]) -> None:
        def close(some: Sequence[One]) -> None:
            self._close_some(lot.intended, {one: known[one] for one in some}, set(lot.going))

        if these and self._bad:
            by_key = {self._keyed.key(one): one for one in these}
            self._bad.each(lambda keys: close([by_key[key] for key in keys]), list(by_key))
        elif these:
            close(these)

    def _close_some(self, intended: Intended[One], states: dict[One, State], going: set[One]) -> None:
        brakes = self._run.brakes
        ours = {one: became.state for one, became in states.items() if one in going}
        went = Amount(sum(state in DELETED_STATES for state in ours.values()))
        of = sum(state in CERTAIN_STATES for state in ours.values())
        with intended.ending(ours):
            counts = self._source.settle(states)
            if of:
                brakes.settle(went, of=of)
        if of:
            brakes.went(went, of=of)
        with engine():
            counts = Counter(counts) + Counter(self._source.forget(states))
        for field, count in counts.items():
            self._run.add(field, count)
            self._settled += count
