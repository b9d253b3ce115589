"""Sources: lists of due items, and how items are claimed, settled, retried and put back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic

from forgekeeper.audit.deletions import AuditItem
from forgekeeper.engine.target import ItemState, ItemT
from forgekeeper.platform.database.queries import KeyPage
from forgekeeper.platform.database.sessions import Statement


class ItemSource(ABC, Generic[ItemT]):
    """The items of an answer, for one run.  `forgekeeper.engine.deletion_loop` says when each method is called.

    *record* names an item in metrics and the audit.  *chunk_size* items are claimed at a time, and belong to the run
    for *visibility*; None if the run's lease is their claim.  `mark_for_deletion` gets at most *max_locked_items* items
    in one transaction.  A run ends after *max_items* items.  *claims_all_due*: if a claim returns fewer items than it
    may, no other item is due.  *decides_for_good*: an item that `mark_for_deletion` returned for deletion may be
    deleted later, too, as nothing keeps it any more.  *deleted_field* is the field of the result that grows by
    `settle_earlier`.  *share* names a child's part of the items: the run leaves the intents of other shares open.
    """

    record: str
    chunk_size: int
    visibility: timedelta | None = None
    max_locked_items = 1_000
    max_items: int | None = None
    claims_all_due = False
    decides_for_good = False
    deleted_field = "deleted"
    max_items_per_request = 0
    share: str | None = None

    def begin_run(self) -> Mapping[str, Any]:
        """Prepare the source for a run; return fields of its result, or raise `Blocked`."""
        return {}

    def end_run(self, stopped: str | None, error: Exception | None) -> tuple[Mapping[str, Any], Exception | None]:
        """Release claims that the run still has; return fields of its result, and an error.

        The run fails with that error now.  *stopped* says why the loop ended, *error* is an exception that has ended it
        and is raised in any case.
        """
        return {}, None

    @abstractmethod
    def find_scope(self, one: ItemT) -> str | None:
        """Return the target's scope of an item: its store or repository."""

    @abstractmethod
    def exclusion_key(self, one: ItemT) -> tuple[int | None, str | None]:
        """Return the project and name that people exclude the item by; None if it has none."""

    def may_be_excluded(self) -> bool:
        """Return whether people may exclude items; if False, `find_lost` returns the items once people exclude any."""
        return True

    @abstractmethod
    def claim_next(self, page: KeyPage) -> Sequence[ItemT]:
        """Claim the next items, the oldest first; return none at the end."""

    def find_kept(self, items: Sequence[ItemT]) -> Mapping[ItemT, ItemState]:
        """Return the items of a scope that the source or other tables keep, and why.  Changes nothing."""
        return {}

    @abstractmethod
    def mark_for_deletion(
        self, items: Sequence[ItemT], kept: Mapping[ItemT, ItemState]
    ) -> Mapping[ItemT, AuditItem | ItemState | None]:
        """Lock items that are still ours; return each with its audit entry, or with its state if it is *kept*.

        Called in the transaction of the audit's intent, unless a lease is the claim.  None: the target announces the
        item, when it knows more of it.
        Items that are not returned belong to another worker, or to a person.
        """

    def record_observed_values(self, items: Mapping[ItemT, AuditItem]) -> Iterable[Statement]:
        """Return statements that store the observed values of announced items in their rows.

        They are executed in the transaction of the intent.  If a record makes one fail, nothing is stored and the items
        are deleted all the same.
        """
        return ()

    @abstractmethod
    def find_lost(self, items: Sequence[ItemT]) -> Collection[ItemT]:
        """Return the items that another worker has claimed or settled since; locks nothing."""

    @abstractmethod
    def settle(self, states: Mapping[ItemT, ItemState]) -> Mapping[str, int]:
        """Close or retry items in the transaction of the outcome; return how fields of the result grow."""

    def settle_after(self, first: Sequence[Statement], states: Mapping[ItemT, ItemState]) -> Mapping[str, int]:
        """Execute statements *first*, then settle up to *max_items_per_request* items, in one request."""
        raise NotImplementedError

    def settle_outside_database(self, states: Mapping[ItemT, ItemState]) -> Mapping[str, int]:
        """Close or retry, after that commit, items outside the database; return how fields of the result grow."""
        return {}

    def settle_earlier(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[bool] | None:
        """Close items that a dead attempt has deleted, in the transaction that closes its intent.

        *rows* are their details in the audit.  Returns for each if it was closed now, or None if the items stay due: a
        run claims them again.
        """
        return None

    def put_back(self, items: Sequence[ItemT]) -> None:
        """Release the claims of items that the run has not worked on."""

    def note_unanswered(self, scope: str | None) -> None:
        """Note that a claim expired before the target answered for any item of it."""


class KeyedSource(ItemSource[ItemT]):
    """A source in a table: if a row cannot be read or settled, the run passes it over as a bad record.

    If *fails_with_chunk*, a run fails if no item of a chunk could be settled.
    """

    fails_with_chunk = False

    @abstractmethod
    def item_key(self, one: ItemT) -> int:
        """Return the primary key of an item."""

    @abstractmethod
    def find_keys(self, page: KeyPage) -> Sequence[int]:
        """Return the keys of the rows that `claim_next` would claim, readable or not."""

    @abstractmethod
    def find_due(self, keys: Sequence[int]) -> set[int]:
        """Return the keys of rows that are still due."""
