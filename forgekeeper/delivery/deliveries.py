"""Deliveries: messages in the hands of workers, from the fetch to the one step that ends each.

The keys are Dramatiq's own, and a bare Dramatiq worker or exporter understands them; the
scripts are ours.  Whatever becomes of a message is one step on the server, in which it
leaves the worker's hands and arrives somewhere else: a crash before or after loses nothing
and doubles nothing.  A worker from whom a message was taken changes nothing any more.

Times are Redis's.  Beside Dramatiq's keys there are, for each worker and queue, the set of
messages that it has started on, and for each queue a hash with the starts that have not
ended: a message that keeps ending its workers becomes a dead letter, its neighbours do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import redis
from dramatiq.common import dq_name

from forgekeeper.delivery.keys import QueueKeys, WorkerKeys
from forgekeeper.delivery.line import Line
from forgekeeper.delivery.sizes import LARGEST_FETCHED, TOO_LARGE
from forgekeeper.redis_values import raw, text
from forgekeeper.scripts import call

CHUNK = 1000
"""Messages in one script: a few milliseconds of everybody's time."""
MAX_DEATHS = 3
"""A message that has taken this many workers down with it is poison."""

Id = str | bytes


class Fetched(NamedTuple):
    """A message as it was found.  The body tells it from a later one of the same id."""

    id: bytes
    body: bytes


class Refused(NamedTuple):
    """A message that was too large to be fetched, and is a dead letter now; of its id the beginning."""

    id: bytes
    size: int


class Reclaimed(NamedTuple):
    """What was taken from an expired worker in one queue: back in it, or dead-lettered as poison, with these bodies."""

    worker: str
    queue: str
    taken: int
    poison: list[str]
    bodies: list[bytes]


Step = tuple[Any, ...]
"""What the script is to be given for a step of one message."""


class Wanted:
    """Steps of one thread, and what came of each."""

    __slots__ = ("done", "error", "steps")

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self.steps = steps
        self.done: list[bool] | None = None
        self.error: Exception | None = None


class Together:
    """Lets threads that want steps of different messages take them in one script.

    Whoever comes while another waits for Redis waits for its turn; the first whose turn it is asks for all who wait.
    Nobody waits to be in company.  An error is everybody's who was asked for.
    """

    def __init__(self, ask: Callable[..., bytes]) -> None:
        self._ask = ask
        self._turn = Lock()
        self._waiting: deque[Wanted] = deque()

    def __call__(self, *steps: Step) -> list[bool]:
        """Take the steps, in their order; return of each whether it was taken."""
        own = Wanted(steps)
        self._waiting.append(own)
        with self._turn:
            if own.done is None and own.error is None:
                self._take(own)
        if own.error is not None:
            raise own.error
        assert own.done is not None
        return own.done

    def _take(self, own: Wanted) -> None:
        # Its own in any case: whoever took it out of the queue may have been interrupted.
        wanted = [own]
        while self._waiting:
            one = self._waiting.popleft()
            if one is not own:
                wanted.append(one)
        try:
            digits = self._ask(*(part for one in wanted for step in one.steps for part in step))
        except Exception as error:  # noqa: BLE001, each raises it
            for one in wanted:
                one.error = error
            return
        answers = iter(digits)
        for one in wanted:
            one.done = [next(answers) == ord("1") for _ in one.steps]


@dataclass(frozen=True)
class Deliveries:
    """What *worker* does with the messages of its queues, `<queue>.DQ` among them.

    Methods that end a message return False when it was no longer in this worker's hands.
    Each is idempotent: it may be called again after a lost reply.
    """

    client: redis.Redis
    namespace: str
    worker: str
    _steps: dict[str, Together] = field(default_factory=dict, init=False, repr=False, compare=False)

    def enqueue(self, queue: str, message_id: str, body: bytes) -> bool:
        """Enqueue a message; return False when its id is on its way already, in the queue or in its delayed one."""
        return bool(self._call("enqueue_unique", self._queue(queue).for_enqueue, message_id, body))

    def fetch(self, queue: str, *, limit: int) -> list[Fetched | Refused]:
        """Take up to *limit* messages, not more than a chunk; what is too large is dead-lettered instead."""
        keys = self._queue(queue)
        names = [keys.ready, keys.bodies, self._keys.in_hand(queue), self._keys.heartbeats, *keys.for_dead_letters]
        flat = self._call("message_fetch", names, self.worker, min(limit, CHUNK), LARGEST_FETCHED, TOO_LARGE)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return [Refused(*pair) if isinstance(pair[1], int) else Fetched(*pair) for pair in pairs]

    def start(self, queue: str, message_id: Id, *, counted: bool) -> bool:
        """Note the start of a message; return False when it may not be worked on, having been taken from us.

        A start that is *counted* and never ends brings the message nearer to being poison.
        """
        (noted,) = self._together(queue)((b"start", _raw(message_id), int(counted)))
        return noted

    def ack(self, queue: str, message_id: Id, body: bytes = b"") -> bool:
        """End a message that is done."""
        (ended,) = self._together(queue)((b"ack", _raw(message_id), body))
        return ended

    def ack_and_start(self, queue: str, done: Fetched, upcoming: Id, *, counted: bool) -> tuple[bool, bool]:
        """End a message that is done, and note the start of another, as `ack` and `start` do; both in one step."""
        ended, noted = self._together(queue)((b"ack", *done), (b"start", _raw(upcoming), int(counted)))
        return ended, noted

    def nack(self, queue: str, message_id: Id, body: bytes = b"", *, reason: str) -> bool:
        """Make a message a dead letter."""
        keys = [*self._ends(queue), *self._queue(queue).for_dead_letters]
        return bool(self._call("message_nack", keys, message_id, body, reason))

    def requeue(self, queue: str, message_ids: Sequence[Id]) -> int:
        """Put messages back to the head of the queue, in their order; return how many were ours."""
        return int(self._call("message_requeue", [*self._ends(queue), self._queue(queue).ready], *message_ids))

    def retry(self, queue: str, fetched: Fetched, later: bytes) -> bool:
        """Let a message wait in the delayed queue, with the body *later*."""
        delayed = self._queue(queue).delayed
        return bool(self._call("message_retry", [*self._ends(queue), delayed.bodies, delayed.ready], *fetched, later))

    def due(self, queue: str, fetched: Fetched, now: bytes) -> bool:
        """Put a message that waited for its time into *queue*, with the body *now*."""
        keys = self._queue(queue)
        names = [self._keys.in_hand(keys.delayed.queue), keys.delayed.bodies, keys.bodies, keys.ready]
        return bool(self._call("message_due", names, *fetched, now))

    def requeue_lost(self, queue: str, held: Iterable[Id]) -> int:
        """Requeue what is ours in Redis but not among *held*, such as what a lost reply brought; return how many."""
        held = [raw(one) if isinstance(one, str) else one for one in held]
        with suppress(redis.ResponseError):  # the script says which key is of the wrong type
            # Most often nothing is lost, and this is one command instead of six.
            if set(self.client.smembers(raw(self._keys.in_hand(queue)))) <= set(held):
                return 0
        return int(self._call("message_requeue_lost", self._lot(queue), *held))

    def requeue_unstarted(self, queue: str) -> int:
        """Requeue everything that we have not started on; return how many."""
        return int(self._call("message_requeue_unstarted", self._lot(queue)))

    def heartbeat(self) -> None:
        """Say that this worker lives."""
        self._call("worker_heartbeat", [self._keys.heartbeats], self.worker)

    def reclaim(
        self,
        queues: Iterable[str],
        *,
        dead_after: timedelta,
        failed: Callable[[str, redis.ResponseError], None] | None = None,
    ) -> list[Reclaimed]:
        """Take the messages of all expired workers, without a heartbeat for *dead_after*, and forget those workers.

        It is a heartbeat of this worker, too: whoever asks is alive, however long it was stopped since its last one.
        *queues* are all there are, not only the caller's: a dead worker's name does not say which were its own.  What
        Redis refuses, as a key of the wrong type, is told to *failed* with the worker's name, and keeps nobody else's
        messages from being taken; without it, it is raised.
        """
        milliseconds = round(dead_after.total_seconds() * 1000)
        lines = [line for queue in queues for line in (queue, dq_name(queue))]
        expired = self._call("worker_expired", [self._keys.heartbeats], self.worker, milliseconds)
        found = []
        for worker in map(text, expired):
            dead = Deliveries(self.client, self.namespace, worker)
            for line in lines:
                try:
                    found.append(dead._reclaim(line, milliseconds))
                except redis.ResponseError as error:
                    if failed is None:
                        raise
                    failed(worker, error)
            keys = [self._keys.heartbeats, *(dead._keys.in_hand(line) for line in lines)]
            self._call("worker_forget", keys, worker, milliseconds)
        return [reclaimed for reclaimed in found if reclaimed.taken]

    def _reclaim(self, queue: str, milliseconds: int) -> Reclaimed:
        of_queue = self._queue(queue)
        keys = [self._keys.heartbeats, *self._ends(queue), of_queue.ready, *of_queue.for_dead_letters]
        poison: list[str] = []
        bodies: list[bytes] = []
        count, taken = 0, CHUNK
        while taken == CHUNK:
            taken, *dead = self._call(
                "worker_reclaim", keys, self.worker, milliseconds, MAX_DEATHS, CHUNK, LARGEST_FETCHED
            )
            count += taken
            poison += [message_id.decode(errors="backslashreplace") for message_id in dead[::2]]
            bodies += dead[1::2]
        return Reclaimed(self.worker, queue, count, poison, bodies)

    def _together(self, queue: str) -> Together:
        """Return what takes a step of one message with those that other threads want to take at the same time."""
        together = self._steps.get(queue)
        if together is None:
            # Atomic: all threads get the same one.
            ask = partial(self._ask, Line(self.client), [raw(key) for key in self._ends(queue)])
            together = self._steps.setdefault(queue, Together(ask))
        return together

    @staticmethod
    def _ask(line: Line, keys: list[bytes], *args: Any) -> bytes:
        answer: bytes = call(line, "message_steps", keys=keys, args=list(args))
        return answer

    def _call(self, script: str, keys: list[str], *args: Any) -> Any:
        # A worker's name may be bytes that are no text: it is in keys, too.
        given = [raw(value) if isinstance(value, str) else value for value in args]
        return call(self.client, script, keys=[raw(key) for key in keys], args=given)

    def _queue(self, queue: str) -> QueueKeys:
        return QueueKeys(self.namespace, queue)

    @property
    def _keys(self) -> WorkerKeys:
        return WorkerKeys(self.namespace, self.worker)

    def _ends(self, queue: str) -> list[str]:
        """List the keys that a message leaves when it ends."""
        keys = self._queue(queue)
        return [self._keys.in_hand(queue), self._keys.started(queue), keys.starts, keys.bodies]

    def _lot(self, queue: str) -> list[str]:
        keys = self._queue(queue)
        return [self._keys.in_hand(queue), self._keys.started(queue), keys.bodies, keys.ready]


def _raw(message_id: Id) -> bytes:
    return raw(message_id) if isinstance(message_id, str) else message_id
