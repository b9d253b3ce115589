"""What a worker process has in hand: fetched messages, from the fetch to the step that ends each."""

from __future__ import annotations

import weakref
from threading import Event
from typing import Any

from dramatiq import Message, MessageProxy

from forgekeeper.delivery.deliveries import Fetched
from metrics.redaction import describe


class Due(Message[Any]):
    """A delayed message: when its time has come its acknowledgement moves it, in one step."""


class Delivery(MessageProxy):
    """A message in this process's hands, and how its acknowledgement is to end it."""

    def __init__(self, fetched: Fetched, message: Message[Any]) -> None:
        super().__init__(message)
        # Asked for twenty times on a message's way; looked up in the message each costs half a microsecond.
        self.actor_name = message.actor_name
        self.message_id = message.message_id
        self.queue_name = message.queue_name
        self.options = message.options
        self.fetched = fetched
        self.later: bytes | None = None  # what takes its place in the delayed queue
        self.unstarted = False  # it goes back to its queue
        self.asked = False  # its start was to be noted with the end of another, and may have been
        self.noted: bool | None = None  # so it was, or it was no longer ours
        self.begun = False  # a run or a child has been entered for it
        self.reason = "failed"
        self.failing_since: float | None = None  # of the monotonic clock: its end fails though Redis is there

    def stuff_exception(self, exception: BaseException) -> None:
        """Remember what went wrong, for the dead letters."""
        super().stuff_exception(exception)
        self.reason = describe(exception)


class Hands:
    """What this process has in hand of one queue.

    A message is in hand for as long as there is its `Delivery`: whichever thread works on it, whichever queue it
    waits in, refers to that, and an error that makes Dramatiq lose the one loses the other.  So what is being worked
    on or ended is never taken for lost, and what is lost never for being in hand.  The one thing that refers to
    messages that it is done with is an idle thread: who has ended a message lets go of it.

    Only the queue's consumer takes, so that `in` and `take` need no lock; any thread may let go.
    """

    def __init__(self) -> None:
        self._deliveries: dict[Fetched, weakref.ref[Delivery]] = {}
        self._few = -1  # how many are so few that somebody waits for it
        self._are_few = Event()

    def __contains__(self, fetched: Fetched) -> bool:
        known = self._deliveries.get(fetched)
        return known is not None and known() is not None

    def take(self, delivery: Delivery) -> Delivery:
        """Have it in hand from now on."""
        self._deliveries[delivery.fetched] = weakref.ref(delivery)
        return delivery

    def let_go(self, delivery: Delivery) -> None:
        """Have it in hand no longer."""
        known = self._deliveries.get(delivery.fetched)
        # Nobody takes the same while this one is there; and it is there, as our caller has it.
        if known is not None and known() is delivery:
            self._deliveries.pop(delivery.fetched, None)
        if len(self._deliveries) <= self._few:
            self._few = -1
            self._are_few.set()

    def wait_for_few(self, count: int, *, within: float) -> None:
        """Wait until no more than *count* are in hand, for so many seconds at most; only the queue's consumer waits."""
        self._are_few.clear()
        self._few = count
        if len(self._deliveries) > count:
            self._are_few.wait(within)
        self._few = -1

    def clear(self) -> None:
        """Have nothing in hand."""
        self._deliveries.clear()

    def all(self) -> list[Fetched]:
        """List what is in hand; forget what nobody has any more."""
        found = []
        for fetched, delivery in self._deliveries.copy().items():
            if delivery() is not None:
                found.append(fetched)
            else:
                self._deliveries.pop(fetched, None)
        return found
