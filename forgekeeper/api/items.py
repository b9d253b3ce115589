"""What lies outside the database: objects, refs, uploads.  It is claimed, looked at, deleted and settled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from forgekeeper.api.answers import Answer, Mistake

One = TypeVar("One", bound=Hashable)
Counts = Mapping[str, int]


class Item(NamedTuple):
    """An item that is about to be deleted: the audit is searched by its *id* and *name*, and keeps its *detail*."""

    id: int | None
    name: str
    detail: Mapping[str, Any]


class State(Protocol):
    """What became of an item."""

    @property
    def state(self) -> str:
        """One word, which the audit keeps."""

    @property
    def reason(self) -> str | None:
        """Why it was not deleted."""


class Kept(NamedTuple):
    """An item that stays, and why."""

    reason: str | None
    state: str = "kept"


class Page(NamedTuple):
    """How many items to claim: beyond the key *after*, of *only* some keys, *without* those of bad records."""

    limit: int
    after: int = 0
    only: Sequence[int] | None = None
    without: Collection[int] = ()


@dataclass(frozen=True)
class Deleted(Generic[One]):
    """What a deletion came to: the *states* of those items of which it is known.

    *error* is why it ended early; where it had not *begun*, nothing can have gone.
    """

    states: Mapping[One, State]
    error: Exception | None = field(default=None, kw_only=True)
    began: bool = field(default=True, kw_only=True)


class Ended(NamedTuple):
    """How a run's work on items ended: why it stopped, whether its time was up, or with which error."""

    stopped: str | None = None
    timed_out: bool = False
    error: Exception | None = None


@dataclass(frozen=True)
class Fence(Generic[One]):
    """Keeps a worker that was suspended, and has lost its work to another meanwhile, from deleting.

    *until* is an instant of the monotonic clock: the claim or the budget ends.  *announce* commits the audit's intent
    for items of which `Items.mark` could not say it.  *find_lost* is called as late as the target allows, right before
    some items are deleted, and returns those that must stay because another worker has claimed or settled them; it
    raises `LeaseLost` if the lease is not ours any more.
    """

    until: float
    announce: Callable[[Mapping[One, Item]], None]
    find_lost: Callable[[Sequence[One]], Collection[One]]


class Items(Answer, ABC, Generic[One]):
    """Items outside the database, which the engine deletes chunk by chunk; a document says how each step is done.

    For each chunk the engine calls `claim`, `look`, `mark`, `delete` and `settle`, in this order: limits are reserved
    after `look`, the audit's intent is committed with `mark`, its outcome and what was used of limits with `settle`.
    Whatever ends the process in between, the next run finds the intent and asks `became`.

    *record* is what an item is called in metrics, audit and previews, *name* the detail by which the audit looks for
    it.  *chunk* are claimed at a time, for *visibility* if that is given; *marked* of them are marked at a time.  A run
    ends after *most*, which its result calls *at_most*.

    People exclude items by the attributes *project*, its id, and *called*, which is *name* unless it says otherwise;
    None where they have no such thing.  What is excluded when it was claimed is left so, and nobody looks at it.

    *gone* are the states that limits count, *stays* those in which nothing went, *waits* those that leave an item as
    it was.  Any other, as ``failed`` is, has used what was reserved for it.  Items that are not *keyed* are in no
    table: none is passed over as a bad record.  *objective* is how long a due item may wait.  `settle` returns the
    fields *processed*, by which limits go, and *failed*; *deleted_field* grows by what `settle_earlier` closes.
    Backlog and preview are the document's own.  Where *all_bad* and none of a chunk can be settled, the run fails: it
    is not the records then.
    """

    record: str
    name = "path"
    project: str | None = None
    called: str | None = ""
    chunk = 1_000
    marked = 1_000
    visibility: timedelta | None = None
    most: int | None = None
    at_most = "at_most"
    gone = frozenset({"deleted", "missing"})
    stays = frozenset({"kept", "changed"})
    waits = frozenset({"locked"})
    objective = timedelta(hours=1)
    processed: tuple[str, ...] = ("deleted", "missing")
    deleted_field = "deleted"
    failed: tuple[str, ...] = ("failed",)
    keyed = True
    all_bad = False

    def excludable(self, one: One) -> tuple[int | None, str | None]:
        """Return the project and the name by which people may exclude an item; raise `Mistake` where it lacks them."""
        try:
            project = None if self.project is None else getattr(one, self.project)
            return project, None if self.called_by is None else getattr(one, self.called_by)
        except AttributeError as error:
            said = f"{error}: let `project` and `called` name what items have, or be None"
            raise Mistake(f"{type(self).__name__} has items that nobody can exclude: {said}") from None

    @property
    def called_by(self) -> str | None:
        """The attribute by which patterns exclude an item."""
        return self.name if self.called == "" else self.called

    def begin(self) -> Mapping[str, Any]:
        """Do what a run begins with; return fields of its result, or raise `Blocked`."""
        return {}

    def end(self, ended: Ended) -> Mapping[str, Any]:
        """Do what a run ends with, however it ended; return fields of its result."""
        return {}

    def failure(self) -> Exception | None:
        """Return why the run fails, though all was done that could be."""
        return None

    def due_of(self, keys: Sequence[int]) -> set[int]:
        """Return those of the keys of bad records that are still due."""
        raise NotImplementedError

    def key(self, one: One) -> int:
        """Return the key by which a bad record is passed over."""
        raise NotImplementedError

    def next(self, page: Page) -> Sequence[int]:
        """Return the keys of what `claim` would claim, whether it can be read or not."""
        raise NotImplementedError

    def scope(self, one: One) -> str | None:
        """Return what no other attempt works on while ours does, such as a store."""
        return None

    def scopes(self) -> Sequence[str | None]:
        """Return the scopes in which attempts before ours may have left intents open."""
        return [None]

    @abstractmethod
    def became(self, scope: str | None, until: float, rows: Sequence[Mapping[str, Any]]) -> Sequence[str | None]:
        """Say of items whose attempt died what became of each, by the details that the audit has; None: unknown yet."""

    def settle_earlier(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[bool] | None:
        """Close items that an attempt before ours has deleted, so that they are not claimed and counted once more.

        *rows* are the details that the audit has; it is called in the transaction that closes their intent.  Return of
        each whether it was closed now: others were closed meanwhile.  None: the items are claimed again.
        """
        return None

    @abstractmethod
    def claim(self, page: Page) -> Sequence[One]:
        """Claim the next items, the oldest first: rows in a transaction of the engine's.  Return none at the end."""

    def look(self, items: Sequence[One]) -> Mapping[One, State]:
        """Say which of the items of a scope stay, and why.  Run and preview ask the same; it must change nothing."""
        return {}

    @abstractmethod
    def mark(self, items: Sequence[One], kept: Mapping[One, State]) -> Mapping[One, Item | State | None]:
        """Return what the audit keeps of each item that goes, and the state of each that stays.

        It is called in the transaction of the intent, and may lock what must not be used from then on.  An item that
        is not returned is not ours any more; *kept* are those that stay, as `look` has said; `delete` has to announce
        an item with None.
        """

    def record_look(self, items: Mapping[One, Item]) -> None:
        """Record in the rows of announced items how they look, in the transaction of the intent.

        If that fails because of a record, nothing is recorded and the items are deleted all the same.
        """

    def find_lost(self, items: Sequence[One]) -> Collection[One]:
        """Return the items whose claims or rows are not ours any more; nothing is locked."""
        return ()

    @abstractmethod
    def delete(self, items: Sequence[One], fence: Fence[One]) -> Deleted[One]:
        """Delete the items that the *fence* does not find lost."""

    @abstractmethod
    def settle(self, states: Mapping[One, State]) -> Counts:
        """Close what the states are of, in the transaction of the outcome; return what fields of the result grow by."""

    def forget(self, states: Mapping[One, State]) -> Counts:
        """Close, after the commit, claims that are not in the database; return what fields of the result grow by."""
        return {}

    def put_back(self, items: Sequence[One]) -> None:
        """Give up the claim of items to which nothing was done."""

    def unanswered(self, scope: str | None) -> None:
        """Note that a claim has run out before anything of it was known."""

    def interrupted(self, scope: str | None, error: Exception) -> str | None:
        """Go on after a deletion that ended early, or return why the run ends, or raise the error."""
        raise error
