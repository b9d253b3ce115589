"""The loop that deletes items of any source in any target: claims, looks, marks, deletes and settles in chunks."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Generic, NamedTuple

import peewee as pw
import structlog

from forgekeeper.audit.deletions import REPEATED_STATE, AuditItem, EarlierIntent, IntentLog, find_earlier_intents
from forgekeeper.engine.run import BadRecords, Run, is_record_error
from forgekeeper.engine.source import ItemSource, KeyedSource
from forgekeeper.engine.target import Fence, ItemState, ItemT, ItemTarget
from forgekeeper.guards.run_guard import Reservation
from forgekeeper.ledger.limits import NO_AMOUNT, Amount
from forgekeeper.platform.database import exclusions
from forgekeeper.platform.database.queries import KeyPage
from forgekeeper.platform.database.sessions import engine_step, write_transaction
from metrics.logs import describe_error

DELETED_STATES = frozenset({"deleted", "missing", "gone"})
"""States of items that count towards limits."""
KEPT_STATES = frozenset({"kept", "changed", "moved", "rejected"})
"""States of items that were not deleted.

Each other state, as ``failed``, has used the limits reserved for the item.
"""
CERTAIN_STATES = DELETED_STATES | KEPT_STATES
WAITING_STATES = frozenset({"locked"})
"""States of items that stay in their source as they were."""
MAX_DELETES_REASON = "max_deletes"
"""Reason why a run stopped after the most items that its source allows."""

log = structlog.get_logger(__name__)


def delete_items(run: Run[Any], source: ItemSource[Any], target: ItemTarget[Any]) -> str | None:
    """Delete the items of the source; return why the loop ended before all were deleted, None if none is left.

    The limits are reserved after a look at a chunk.  The audit's intent is committed in the transaction that marks the
    items, its outcome and the used limits in the transaction that settles them.  If the process dies in between, the
    items count as deleted, and the next run finds the intent and asks the target for their state.
    """
    try:
        with engine_step():
            run.set_result_fields(source.begin_run())
        until = time.monotonic() + run.deadline.seconds_left()
        for scope in target.list_scopes():
            _close_earlier_intents(run, source, target, scope, until)
        # Items without a key cannot be passed over: an error of one fails the run.
        passing = run.bad_records(source.record, source.find_due) if isinstance(source, KeyedSource) else nullcontext()
        with passing as bad:
            stopped = _DeletionPass(run, source, target, bad).delete_all()
    except Exception as error:
        run.set_result_fields(source.end_run(None, error)[0])
        raise
    fields, failure = source.end_run(stopped, None)
    run.set_result_fields(fields)
    if failure is not None:
        raise failure
    return stopped


def _name_audit_scope(source: ItemSource[Any], scope: str | None) -> str | None:
    """Return the name of a scope in the audit: a child must not close the intents of a child with another share."""
    return scope if source.share is None else f"{scope or ''}: {source.share}"


def _close_earlier_intents(
    run: Run[Any], source: ItemSource[Any], target: ItemTarget[Any], scope: str | None, until: float
) -> None:
    """Close intents that dead attempts left open; count the items that they deleted and did not count."""
    find_outcomes = partial(target.find_states_after_crash, scope, until)
    shared = _name_audit_scope(source, scope)
    search = partial(find_earlier_intents, run.audit, source.record, find_outcomes, now=run.now)
    for found in search(name=target.audit_key, scope=shared):
        ended, deleted, counted = [], 0, 0
        with write_transaction():
            for earlier in found:
                states, settled = _settle_earlier_intent(source, earlier)
                ended.append(earlier.close_as(states))
                if settled is not None:
                    deleted += settled
                    counted += run.guard.settle_earlier(earlier.intent.run, settled, of_reserved=len(states))
            run.audit.record_outcomes(source.record, ended)
        run.guard.note_earlier(counted)
        run.add_to_result(source.deleted_field, deleted)


def _settle_earlier_intent(source: ItemSource[Any], earlier: EarlierIntent) -> tuple[Sequence[str], int | None]:
    """Settle the items of an earlier intent; return their states, and how many it deleted that were not counted."""
    closed = source.settle_earlier([row for row, state in earlier.records_with_states() if state == "deleted"])
    if closed is None:
        return earlier.states, None
    # An item that is not there any more was claimed, deleted and recorded again since.
    next_closed = iter(closed)
    states = [REPEATED_STATE if state == "deleted" and not next(next_closed) else state for state in earlier.states]
    return states, sum(closed)


class _MarkedItems(NamedTuple, Generic[ItemT]):
    """Claimed items of a *scope*: *to_delete*, and *kept* with the reasons.

    The claim ends at *expires_at*, an instant of the monotonic clock.
    """

    scope: str | None
    to_delete: list[ItemT]
    kept: dict[ItemT, ItemState]
    intended: IntentLog[ItemT]
    expires_at: float
    reservation: Reservation = Reservation()


class _DeletionPass(Generic[ItemT]):
    """One pass over the items of the source.

    *bad* are records to pass over, None if items have no keys.  While the target deletes a chunk, the next chunk is
    prepared if the source allows it (`docs/adr/0059`).
    """

    def __init__(
        self, run: Run[Any], source: ItemSource[ItemT], target: ItemTarget[ItemT], bad: BadRecords | None
    ) -> None:
        self._run, self._source, self._target, self._bad = run, source, target, bad
        self._after_key = 0
        self._claim_expires_at = 0.0
        self._is_last_chunk = False
        self._settled = self._attempted = 0
        self._prepared: list[_MarkedItems[ItemT]] = []
        self._preparation_error: Exception | None = None

    def delete_all(self) -> str | None:
        """Delete chunk after chunk; return why it ended."""
        try:
            ended = self._delete_chunks()
        except Exception:
            with suppress(Exception):
                self._release_prepared()
            raise
        self._release_prepared()
        if self._preparation_error is not None:
            raise self._preparation_error
        return ended

    def _delete_chunks(self) -> str | None:
        run, source = self._run, self._source
        while source.max_items is None or self._settled < source.max_items:
            marked_scopes: Iterable[_MarkedItems[ItemT]] = self._take_prepared()
            if not marked_scopes:
                claimed, more = self._claim_allowed()
                if not more:
                    return None
                if not claimed:
                    break
                marked_scopes = self._mark_scopes(claimed, self._claim_expires_at)
            before = self._attempted
            stopped = self._delete_scopes(marked_scopes)
            # Kept items use nothing of the pace: a store that is away may have any number of them.
            if stopped is not None or run.deadline.has_passed(self._attempted - before):
                return stopped or "deadline"
            if self._is_last_chunk:
                return None
        else:
            return MAX_DELETES_REASON if self._keyed_source.find_keys(self._make_page(1)) else None
        return "deadline"

    def _prepare_next(self) -> None:
        """Claim and mark the next chunk while the target deletes this one; an error is raised when it is needed."""
        run, size = self._run, self._source.chunk_size
        if not self._source.decides_for_good or self._prepared or self._preparation_error or run.deadline.is_halted():
            return
        reservation = run.guard.detach()
        try:
            # Near a limit the next chunk waits: this one may give back a part of its reservation.
            claimed = self._claim_allowed()[0] if run.guard.may_reserve_ahead(2 * size) else []
            for marked_items in self._mark_scopes(claimed, self._claim_expires_at):
                self._prepared.append(marked_items)
        except Exception as error:  # noqa: BLE001, the answer for this chunk has to be read first
            self._preparation_error = error
        finally:
            run.guard.attach(reservation)

    def _take_prepared(self) -> list[_MarkedItems[ItemT]]:
        """Return the prepared items; none if something keeps any of them by now."""
        if self._preparation_error is not None:
            raise self._preparation_error
        if not all(map(self._may_still_delete, self._prepared)):
            self._release_prepared()
        prepared, self._prepared = self._prepared, []
        return prepared

    def _may_still_delete(self, marked_items: _MarkedItems[ItemT]) -> bool:
        items = marked_items.to_delete
        return not (
            self._is_expired(marked_items.expires_at)
            or self._target.find_undeletable(marked_items.scope, items)
            or len(self._remove_excluded(items)) < len(items)
        )

    def _release_prepared(self) -> None:
        """Put back the prepared items: no request for them was sent, so the audit records them as kept."""
        prepared, self._prepared = self._prepared, []
        for marked_items in prepared:
            self._run.guard.attach(marked_items.reservation)
            with marked_items.intended.recording_states(dict.fromkeys(marked_items.to_delete, "kept")):
                self._run.guard.settle(NO_AMOUNT)
            self._run.guard.note_settled(NO_AMOUNT)
            self._put_back([*marked_items.to_delete, *marked_items.kept])

    @property
    def _keyed_source(self) -> KeyedSource[ItemT]:
        assert isinstance(self._source, KeyedSource), "only items with keys have bad records, or a maximum"
        return self._source

    def _make_page(self, limit: int, only: Sequence[int] | None = None) -> KeyPage:
        return KeyPage(limit, self._after_key, only, self._bad.keys if self._bad else ())

    def _claim_allowed(self) -> tuple[list[ItemT], bool]:
        """Claim the next items if the run may delete any; see `_claim_items`."""
        limit = self._run.guard.count_allowed(self._source.chunk_size)
        claimed, more = self._claim_items(limit) if limit else ([], True)
        if claimed:
            self._run.reach_failpoint("claimed")
        return claimed, more

    def _claim_items(self, limit: int) -> tuple[list[ItemT], bool]:
        """Claim the next items without bad records; return them, and whether anything was due at all."""
        # The visibility time is counted from before the claim.
        visible, left = self._source.visibility, self._run.deadline.seconds_left()
        self._claim_expires_at = time.monotonic() + (left if visible is None else visible.total_seconds())
        claimed: list[ItemT] = []

        def claim_page(only: Sequence[int] | None) -> int | None:
            with write_transaction() if self._bad and self._source.visibility is not None else engine_step():
                found = self._source.claim_next(self._make_page(limit, only))
            # Rows that are inserted from now on belong to the next run, which saves a claim for each project.
            self._is_last_chunk = self._source.claims_all_due and only is None and len(found) < limit
            claimed.extend(found)
            return self._keyed_source.item_key(found[-1]) if found and self._bad else None

        if self._bad is None:
            claim_page(None)
            return claimed, bool(claimed)
        reached = self._bad.process_chunk(claim_page, lambda: self._keyed_source.find_keys(self._make_page(limit)))
        self._after_key = self._after_key if reached is None else reached
        return claimed, reached is not None

    def _mark_scopes(self, claimed: Sequence[ItemT], expires_at: float) -> Iterator[_MarkedItems[ItemT]]:
        """Mark the claimed items scope by scope, each when the caller asks for it."""
        by_scope = defaultdict[str, list[ItemT]](list)
        for one in self._remove_excluded(claimed):
            by_scope[self._source.find_scope(one) or ""].append(one)
        for scope, items in sorted(by_scope.items()):
            if not self._drop_late_claim(items, expires_at):
                yield self._mark_in_scope(scope or None, items, expires_at)

    def _delete_scopes(self, marked_scopes: Iterable[_MarkedItems[ItemT]]) -> str | None:
        """Delete the marked items, scope by scope; return why the run has to end."""
        for marked_items in marked_scopes:
            self._run.guard.attach(marked_items.reservation)
            stopped = self._delete_in_scope(marked_items)
            self._run.guard.leave_used()
            if stopped is not None:
                return stopped
        return None

    def _remove_excluded(self, claimed: Sequence[ItemT]) -> list[ItemT]:
        """Return the items that nobody excludes; the others stay as they were claimed."""
        if not self._source.may_be_excluded():
            return list(claimed)
        excluded = exclusions.find_excluded(
            self._run.declared.batch.name, partial(map, self._source.exclusion_key, claimed)
        )
        return [one for place, one in enumerate(claimed) if place not in excluded]

    def _mark_in_scope(self, scope: str | None, items: Sequence[ItemT], expires_at: float) -> _MarkedItems[ItemT]:
        kept = dict(self._target.find_undeletable(scope, items))
        if unseen := [one for one in items if one not in kept]:
            kept |= self._source.find_kept(unseen)
        intended = IntentLog[ItemT](self._run.audit, self._source.record, scope=_name_audit_scope(self._source, scope))
        marked_items = _MarkedItems[ItemT](scope, [], {}, intended, expires_at)
        with self._releasing_unused_limits(intended):
            self._mark_items(marked_items, items, kept)
        self._run.reach_failpoint("marked")
        return marked_items._replace(reservation=self._run.guard.detach())

    def _delete_in_scope(self, marked_items: _MarkedItems[ItemT]) -> str | None:
        scope = marked_items.scope
        self._attempted += len(marked_items.to_delete)
        if not marked_items.to_delete:
            self._settle_items(marked_items, {})
            return None
        with engine_step(), self._releasing_unused_limits(marked_items.intended):
            found = self._target.delete(scope, marked_items.to_delete, self._make_fence(marked_items))
        if not found.has_begun:
            self._run.guard.give_back()
        if found.error is None:
            self._run.reach_failpoint("deleted")
        self._settle_items(marked_items, found.states)
        if found.error is not None:
            return self._target.handle_error(scope, found.error)
        if not found.states and self._run.deadline.seconds_left() > 0:
            self._source.note_unanswered(scope)
        return None

    def _releasing_unused_limits(self, intended: IntentLog[ItemT]) -> AbstractContextManager[None]:
        """Give back the limits of items that were not announced, if the block fails."""
        # Without an audit nobody knows which items were announced.
        return self._run.guard.giving_back(lambda: len(intended.open_keys())) if self._run.audit.on else nullcontext()

    def _make_fence(self, marked_items: _MarkedItems[ItemT]) -> Fence[ItemT]:
        def commit_intent(items: Mapping[ItemT, AuditItem]) -> None:
            with engine_step():
                self._commit_intent(marked_items.intended, items)
            self._run.reach_failpoint("announced")

        until = min(marked_items.expires_at, time.monotonic() + self._run.deadline.seconds_left())
        return Fence(until, commit_intent, partial(self._find_lost, marked_items.expires_at), self._prepare_next)

    def _commit_intent(self, intended: IntentLog[ItemT], items: Mapping[ItemT, AuditItem]) -> None:
        """Commit the intent, with the observed values unless a record makes that fail."""
        try:
            intended.commit(items, after=self._source.record_observed_values(items))
        except (pw.PeeweeException, ValueError) as error:
            if not is_record_error(error):
                raise
            log.warning("observed values not recorded", record=self._source.record, error=describe_error(error))
            intended.commit(items)

    def _find_lost(self, expires_at: float, items: Sequence[ItemT]) -> Collection[ItemT]:
        if self._run.lease is not None:
            self._run.lease.check()
        return items if self._is_expired(expires_at) else self._source.find_lost(items)

    def _is_expired(self, expires_at: float) -> bool:
        return self._source.visibility is not None and time.monotonic() > expires_at

    def _drop_late_claim(self, items: Sequence[ItemT], expires_at: float) -> bool:
        """Put the items back if their claim has expired or the run has to end; return whether that is so."""
        if self._source.visibility is None:
            return False
        if expired := self._is_expired(expires_at):
            log.warning("claim expired, items put back", items=len(items))
        if late := expired or self._run.deadline.is_halted():
            self._put_back(items)
        return late

    def _put_back(self, items: Sequence[ItemT]) -> None:
        if items:
            with write_transaction():
                self._source.put_back(items)

    def _mark_items(
        self, marked_items: _MarkedItems[ItemT], items: Sequence[ItemT], kept: dict[ItemT, ItemState]
    ) -> None:
        """Reserve limits, and record the intent for the items that are ours; give back the limits of the others."""
        free = [one for one in items if one not in kept]
        surplus = free[self._run.guard.reserve(len(free)).records :] if free else []
        self._put_back(surplus)
        if surplus and self._bad:
            self._is_last_chunk = False
            self._after_key = min(map(self._keyed_source.item_key, surplus)) - 1
        given, intended = set(surplus), marked_items.intended
        ours = [one for one in items if one not in given]
        for start in range(0, len(ours), self._source.max_locked_items):
            some = ours[start : start + self._source.max_locked_items]
            # If a lease is the claim, no row has to be locked.
            with nullcontext() if self._source.visibility is None else write_transaction():
                marked = self._source.mark_for_deletion(some, kept)
                intended.begin({one: entry for one, entry in marked.items() if isinstance(entry, AuditItem)})
            for one, entry in marked.items():
                if entry is None or isinstance(entry, AuditItem):
                    marked_items.to_delete.append(one)
                else:
                    marked_items.kept[one] = entry
        self._run.guard.give_back(len(free) - len(surplus) - len(marked_items.to_delete))

    def _settle_items(self, marked_items: _MarkedItems[ItemT], states: Mapping[ItemT, ItemState]) -> None:
        """Close the items whose states are known; put the others back."""
        bad, all_states = self._bad, {**marked_items.kept, **states}
        failed = bad.failed if bad else 0
        settled = [one for one, state in all_states.items() if state.state not in WAITING_STATES]
        sure = [one for one in settled if all_states[one].state in CERTAIN_STATES]
        others = [one for one in settled if all_states[one].state not in CERTAIN_STATES]
        self._run.guard.give_back(len(all_states) - len(settled))
        self._close_items(marked_items, all_states, sure)
        self._run.reach_failpoint("settled")
        self._close_items(marked_items, all_states, others)
        # The audit records a deletion even if the item's bad record is left as it was.
        if left := {one: all_states[one].state for one in marked_items.intended.open_keys() if one in all_states}:
            with marked_items.intended.recording_states(left):
                pass
        self._put_back([one for one in marked_items.to_delete if one not in all_states])
        if (
            bad
            and bad.error is not None
            and self._keyed_source.fails_with_chunk
            and bad.failed - failed == len(settled)
        ):
            raise bad.error

    def _close_items(
        self, marked_items: _MarkedItems[ItemT], states: Mapping[ItemT, ItemState], items: Sequence[ItemT]
    ) -> None:
        def close_chunk(some: Sequence[ItemT]) -> None:
            self._close_chunk(marked_items.intended, {one: states[one] for one in some}, set(marked_items.to_delete))

        if items and self._bad:
            by_key = {self._keyed_source.item_key(one): one for one in items}
            self._bad.process_keys(lambda keys: close_chunk([by_key[key] for key in keys]), list(by_key))
        elif items:
            close_chunk(items)

    def _close_chunk(self, intended: IntentLog[ItemT], states: dict[ItemT, ItemState], going: set[ItemT]) -> None:
        guard = self._run.guard
        ours = {one: state.state for one, state in states.items() if one in going}
        deleted = Amount(sum(state in DELETED_STATES for state in ours.values()))
        certain = sum(state in CERTAIN_STATES for state in ours.values())
        is_small = len(states) <= self._source.max_items_per_request and guard.records_left is None
        outcomes = intended.write_outcomes(ours) if is_small else None
        if outcomes is not None:
            with engine_step():
                counts = self._source.settle_after(outcomes, states)
            intended.forget_intents(ours)
        else:
            with intended.recording_states(ours):
                counts = self._source.settle(states)
                if certain:
                    guard.settle(deleted, of_reserved=certain)
        if certain:
            guard.note_settled(deleted, of_reserved=certain)
        with engine_step():
            counts = Counter(counts) + Counter(self._source.settle_outside_database(states))
        for field, count in counts.items():
            self._run.add_to_result(field, count)
            self._settled += count
