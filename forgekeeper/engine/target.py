"""Targets: places of items, how items are looked at and deleted, and found after a crash."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from forgekeeper.audit.deletions import AuditItem

ItemT = TypeVar("ItemT", bound=Hashable)


class ItemState(Protocol):
    """The state of an item after a run has worked on it."""

    @property
    def state(self) -> str:
        """One word, which the audit stores."""

    @property
    def reason(self) -> str | None:
        """The reason why the item was not deleted."""


class KeptItem(NamedTuple):
    """The state of an item that is not deleted, with the reason."""

    reason: str | None
    state: str = "kept"


@dataclass(frozen=True)
class DeletionResult(Generic[ItemT]):
    """The result of a deletion: the *states* of the items, as far as they are known.

    *error* ended it early.  If *has_begun* is false, nothing was deleted.
    """

    states: Mapping[ItemT, ItemState]
    error: Exception | None = field(default=None, kw_only=True)
    has_begun: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class Fence(Generic[ItemT]):
    """Protection against a suspended worker that has lost its items to another worker.

    The claim or the budget ends at *until*, an instant of the monotonic clock.  *announce* commits the audit's intent
    for items that `mark_for_deletion` returned without an entry.  *find_lost* is called as late as the target allows,
    right before some items are deleted.  It returns the items that another worker has claimed or settled, and raises
    `LeaseLost` if the lease is not ours any more.  *prepare_next* may be called while a request is on its way, to use
    that time; it may take seconds, and does not raise an `Exception`.
    """

    until: float
    announce: Callable[[Mapping[ItemT, AuditItem]], None]
    find_lost: Callable[[Sequence[ItemT]], Collection[ItemT]]
    prepare_next: Callable[[], None]


class ItemTarget(ABC, Generic[ItemT]):
    """The places that items are deleted from, for one run.

    A scope is a store or a repository, and None a place without a name.  The audit finds an item by the detail
    *audit_key*.
    """

    audit_key: str

    @abstractmethod
    def list_scopes(self) -> Sequence[str | None]:
        """Return the scopes that may have open intents of a dead attempt."""

    @abstractmethod
    def find_states_after_crash(
        self, scope: str | None, until: float, rows: Sequence[Mapping[str, Any]]
    ) -> Sequence[str | None]:
        """Return the state of each item of a dead attempt, by its details in the audit; None if it is unknown."""

    def find_undeletable(self, scope: str | None, items: Sequence[ItemT]) -> Mapping[ItemT, ItemState]:
        """Return the items that cannot be deleted in the scope now, and why.  Changes nothing."""
        return {}

    @abstractmethod
    def delete(self, scope: str | None, items: Sequence[ItemT], fence: Fence[ItemT]) -> DeletionResult[ItemT]:
        """Delete the items, except those that the *fence* finds lost."""

    @abstractmethod
    def handle_error(self, scope: str | None, error: Exception) -> str | None:
        """Handle the error of one scope; return why the run ends, None if it continues, or raise the error."""
