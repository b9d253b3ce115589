"""What the threads of a worker process work on: the one registry, which the row of the process is written from."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any

from metrics.redaction import clean

if TYPE_CHECKING:
    from forgekeeper.runs.attempt import Attempt

LONGEST_NAME = 200
"""Characters of a message's id: other programs make up their own."""


@dataclass
class Work:
    """A message that a thread works on; *sent_as* is Dramatiq's id of it, *began* is of the monotonic clock.

    Its *attempt* is None until that has begun.
    """

    actor: str
    message_id: str
    run: int | None
    sent_as: str
    attempt: Attempt | None = None
    began: float = field(default_factory=time.monotonic)

    def facts(self) -> dict[str, Any]:
        """Say what it is and how long it has taken, as the row of the process has it."""
        # PostgreSQL's JSON keeps no NUL and no half of a character.
        name = clean(self.message_id)[:LONGEST_NAME].replace("\0", "\\x00").encode(errors="backslashreplace").decode()
        seconds = round(time.monotonic() - self.began, 3)
        return {"what": self.actor, "message_id": name, "run": self.run, "seconds": seconds}


class InFlight:
    """The messages in flight, by thread: from before their work until their acknowledgement begins."""

    def __init__(self) -> None:
        self._by_thread: dict[int, Work] = {}

    def begin(self, actor: str, message_id: str, *, run: int | None, sent_as: str) -> None:
        """Note that this thread works on a message from now on."""
        self._by_thread[get_ident()] = Work(actor, message_id, run, sent_as)

    def attempt(self, attempt: Attempt) -> None:
        """Note the attempt that this thread has begun at its message."""
        self._by_thread[get_ident()].attempt = attempt

    def begun(self) -> Attempt | None:
        """Return the attempt that this thread has begun at its message, None while there is none."""
        work = self._by_thread.get(get_ident())
        return work.attempt if work else None

    def end(self) -> None:
        """Note that this thread is idle."""
        self._by_thread.pop(get_ident(), None)

    def works(self) -> list[Work]:
        """List them, the longest first."""
        return sorted(self._by_thread.values(), key=lambda work: work.began)

    def facts(self) -> list[dict[str, Any]]:
        """List what the row of the process says of them."""
        return [work.facts() for work in self.works()]

    def overdue(self, limits: Mapping[str, float]) -> list[str]:
        """Name the messages that have taken longer than their actors' *limits*, in seconds, allow."""
        now = time.monotonic()
        return [work.message_id for work in self.works() if now - work.began > limits.get(work.actor, now)]
