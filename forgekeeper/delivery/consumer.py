"""Our side of Dramatiq's worker: how messages come out of Redis, and how each of them ends.

Dramatiq's threads ask the broker for a consumer, the consumer for messages, and give each
back with `ack` or `nack`.  Here a message is in this process's hands until one step in
Redis has ended it, and that step is tried until it works: an error, of whatever kind, is to
Dramatiq a closed connection.  What its threads and queues lose all the same goes back to Redis.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import dramatiq
import redis
import structlog
from dramatiq import Message, MessageProxy
from dramatiq.common import compute_backoff, current_millis, dq_name, q_name
from dramatiq.errors import ConnectionClosed, DecodeError

from forgekeeper import shutdown
from forgekeeper.delivery import work_queue as waiting
from forgekeeper.delivery.deliveries import Deliveries, Fetched, Refused
from forgekeeper.delivery.doorbell import Bell
from forgekeeper.delivery.hands import Delivery, Due, Hands
from forgekeeper.delivery.queues import actor_of
from forgekeeper.delivery.sizes import TOO_LARGE
from forgekeeper.delivery.work_queue import WorkQueue
from forgekeeper.redis_values import is_text
from metrics.counting import dead_lettered
from metrics.redaction import describe

LOOK_FOR_LOST_EVERY = timedelta(seconds=30)
"""How often a consumer looks for messages that are ours by Redis's account alone; they may lie for a minute at most."""
END_WITHIN = timedelta(minutes=1)
"""For so long a message's end is tried that fails though Redis is there: then the process ends, and others have it."""
FULL_FOR = 0.2
"""Seconds that a consumer waits for room at a time; then it looks whether the process is to end."""
UNKNOWN_FOR = timedelta(minutes=1)
"""How long a message waits whose actor this process does not know; a newer worker may come by."""
LONGEST_WAIT = 86_400_000
"""Milliseconds after which a delayed message is due, whatever it says."""

log = structlog.get_logger(__name__)


class CannotEnd(BaseException):
    """A message that is done cannot be ended here.  It ends its thread: Dramatiq swallows what is an `Exception`."""


class Consumer(dramatiq.Consumer):
    """Fetches the messages of one queue, or of its delayed ones, and ends them.

    *hands* are what this process has in hand of the queue.  They outlive the consumer, which
    Dramatiq replaces after an error: work goes on meanwhile.
    """

    def __init__(
        self,
        broker: dramatiq.Broker,
        deliveries: Deliveries,
        queue: str,
        hands: Hands,
        bell: Bell,
        *,
        work_queue: WorkQueue,
        prefetch: int,
        timeout: int,
    ) -> None:
        self._broker = broker
        self._deliveries = deliveries
        self._queue = queue
        self._delayed = queue != q_name(queue)
        self._hands = hands
        self._bell = bell
        self._work_queue = work_queue
        self._prefetch = prefetch
        self._timeout = timeout
        self._fetched: deque[Fetched] = deque()
        self._misses = 0
        self._full = False
        self._look_for_lost_at = time.monotonic()
        self._requeued = False
        self._unknown = UnknownActors()
        if self._delayed:
            # Dramatiq has dropped those that waited in its memory.
            hands.clear()

    def __next__(self) -> Delivery | None:
        """Return a message to work on; None after idling for a moment."""
        with _closing_at_errors():
            if shutdown.requested.is_set():
                self._drain()
                # Not an idle consumer's whole second: the process is to end.
                time.sleep(min(self._timeout / 1000, 0.2))
                return None
            if not self._fetched:
                self._fetch()
            while self._fetched:
                delivery = self._open(self._fetched.popleft())
                if delivery is not None:
                    return delivery
            self._misses, milliseconds = compute_backoff(self._misses, max_backoff=self._timeout)
        if self._full or not self._bell.is_heard:
            # Nobody rings when there is room again.
            shutdown.requested.wait(milliseconds / 1000)
        else:
            # What waits here becomes due, which is for Dramatiq's thread to see; all else rings, a drain, too.
            waits = self._delayed and self._hands.all()
            self._bell.wait(self._timeout / 1000 if waits else max(self._timeout / 1000, waiting.IDLE))
        return None

    def ack(self, message: MessageProxy) -> None:
        """End the message: it is done, waits for its retry, has become due, or goes back unstarted."""
        assert isinstance(message, Delivery)
        ours = self._step(message, lambda: self._end(message))
        if not ours and not message.unstarted:
            log.warning("message ended elsewhere", queue=self._queue, message_id=message.message_id)

    def nack(self, message: MessageProxy) -> None:
        """Make the message a dead letter."""
        assert isinstance(message, Delivery)
        dead = partial(self._deliveries.nack, self._queue, *message.fetched, reason=message.reason)
        dead_lettered = self._step(message, dead)
        if dead_lettered:
            facts = {"queue": self._queue, "message_id": message.message_id, "reason": message.reason}
            log.error("message dead-lettered", actor=message.actor_name, **facts)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Requeue messages that were not worked on."""
        deliveries = [message for message in messages if isinstance(message, Delivery)]
        if not deliveries:
            return
        # Whether that works or not, Dramatiq has them no longer.
        for delivery in deliveries:
            self._hands.let_go(delivery)
        try:
            self._deliveries.requeue(self._queue, [delivery.fetched.id for delivery in deliveries])
        except Exception as error:
            raise ConnectionClosed(describe(error)) from error

    def _step(self, delivery: Delivery, take: Callable[[], bool]) -> bool:
        """Take the step that ends the message, or let Dramatiq try again; whatever else leaves here it swallows.

        So the message is let go of on all other ways out: where the step was not taken, it is lost, and requeued.
        """
        again = False
        try:
            return take()
        except redis.RedisError as error:
            delivery.failing_since = None
            closed = ConnectionClosed(describe(error))
            again = True
            raise closed from error
        except Exception as error:
            closed = self._failed(delivery, error)
            again = True
            raise closed from error
        finally:
            if not again:
                self._hands.let_go(delivery)

    def _failed(self, delivery: Delivery, error: Exception) -> ConnectionClosed:
        now = time.monotonic()
        if delivery.failing_since is None:
            delivery.failing_since = now
        if now - delivery.failing_since >= END_WITHIN.total_seconds():
            facts = {"queue": self._queue, "message_id": delivery.message_id}
            log.critical("message cannot be ended", actor=delivery.actor_name, **facts, exc_info=error)
            raise CannotEnd(delivery.message_id) from error
        return ConnectionClosed(describe(error))

    def _end(self, delivery: Delivery) -> bool:
        if self._delayed:
            message = delivery.copy(queue_name=q_name(self._queue))
            del message.options["eta"]
            return self._deliveries.due(message.queue_name, delivery.fetched, message.encode())
        if delivery.later is not None:
            return self._deliveries.retry(self._queue, delivery.fetched, delivery.later)
        if delivery.unstarted:
            return bool(self._deliveries.requeue(self._queue, [delivery.fetched.id]))
        upcoming = self._work_queue.take(self._queue) if not shutdown.requested.is_set() else None
        if upcoming is None:
            return self._deliveries.ack(self._queue, *delivery.fetched)
        return self._end_and_start(delivery, upcoming)

    def _end_and_start(self, delivery: Delivery, upcoming: Delivery) -> bool:
        """End the message, and note the start of the one that this thread works on next, in one step."""
        counted = is_counted(self._broker, upcoming)
        upcoming.asked = True
        try:
            ended, upcoming.noted = self._deliveries.ack_and_start(
                self._queue, delivery.fetched, upcoming.fetched.id, counted=counted
            )
        except BaseException:
            self._work_queue.put_back()
            raise
        return ended

    def _fetch(self) -> None:
        now = time.monotonic()
        if now >= self._look_for_lost_at:
            # What was fetched and not handed out is none: we fetch when there is nothing left of that.
            count = self._deliveries.requeue_lost(self._queue, [fetched.id for fetched in self._hands.all()])
            if count:
                log.warning("lost messages requeued", queue=self._queue, count=count)
            self._look_for_lost_at = now + LOOK_FOR_LOST_EVERY.total_seconds()
        room = self._prefetch - len(self._hands.all())
        if room < self._prefetch / 4:
            # Not by looking again after a pause, in which the threads would run out of messages; and some at a time.
            self._hands.wait_for_few(self._prefetch * 3 // 4, within=min(self._timeout / 1000, FULL_FOR))
            self._misses = 0
            room = self._prefetch - len(self._hands.all())
        self._full = room <= 0
        if not self._full and self._bell.answer():
            found = self._deliveries.fetch(self._queue, limit=room)
            if found:
                # There may be more.
                self._bell.ring()
            self._fetched.extend(self._fitting(found))
        if shutdown.requested.is_set():
            self._drain()

    def _fitting(self, fetched: Iterable[Fetched | Refused]) -> Iterator[Fetched]:
        """Say of each message that was too large that it was dead-lettered; yield the others."""
        for one in fetched:
            if isinstance(one, Fetched):
                yield one
                continue
            facts = {"queue": self._queue, "message_id": _text(one), "reason": TOO_LARGE, "bytes": one.size}
            log.error("message dead-lettered", **facts)
            # Whose it was is in what nobody has read.
            dead_lettered("")

    def _drain(self) -> None:
        """Requeue what has not been started, once; the heartbeat did so too, perhaps before our last fetch."""
        if not self._requeued:
            self._fetched.clear()
            self._deliveries.requeue_unstarted(self._queue)
            self._requeued = True

    def _open(self, fetched: Fetched) -> Delivery | None:
        """Make a delivery of what was fetched; None when nobody here can work on it."""
        self._misses = 0
        if fetched in self._hands:
            # It was taken from us while we were at it, and is ours again: once is enough.
            return None
        message = self._decode(fetched)
        if message is None:
            log.error("message dead-lettered", queue=self._queue, message_id=_text(fetched), reason="malformed")
            if self._deliveries.nack(self._queue, *fetched, reason="malformed"):
                dead_lettered(actor_of(fetched.body))
            return None
        if not self._delayed and message.actor_name not in self._broker.actors:
            self._postpone(fetched, message)
            return None
        return self._hands.take(Delivery(fetched, message))

    def _decode(self, fetched: Fetched) -> Message[Any] | None:
        try:
            message = Message.decode(fetched.body)
        except DecodeError:
            return None
        options = message.options
        parts = {str: (message.actor_name, message.message_id), dict: (message.kwargs, options)}
        if not all(isinstance(part, kind) for kind, values in parts.items() for part in values):
            return None
        if message.queue_name != self._queue or not is_text(message.actor_name + message.message_id):
            return None
        if not self._delayed:
            options.pop("eta", None)
            return message
        eta = options.get("eta")
        # Nobody here lets a message wait for longer: what says so would keep its place in our hands for ever.
        options["eta"] = min(eta, current_millis() + LONGEST_WAIT) if isinstance(eta, int | float) and eta > 0 else 0
        return Due(**message.asdict())

    def _postpone(self, fetched: Fetched, message: Message[Any]) -> None:
        """Delay the message of an unknown actor, to be looked at again later."""
        self._unknown.seen(message.actor_name, self._queue)
        eta = current_millis() + round(UNKNOWN_FOR.total_seconds() * 1000)
        later = message.copy(queue_name=dq_name(self._queue), options={"eta": eta})
        self._deliveries.retry(self._queue, fetched, later.encode())


def is_counted(broker: dramatiq.Broker, message: Delivery) -> bool:
    """Say whether a start of the message that never ends is a death that it is made to answer for.

    Those of runs are not counted here: their rows count their losses, and a dead letter would close such a row
    while its own count says that it may be tried again.  Nor is one counted that may have been with the end of another
    message: its reply may be all that was lost, and once more would be two deaths.
    """
    return "document" not in broker.get_actor(message.actor_name).options and not message.asked


class UnknownActors:
    """Counts messages of unknown actors, and says so once a minute for each actor."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._quiet_until: dict[str, float] = {}

    def seen(self, actor: str, queue: str) -> None:
        """Count one; tell of those since the last line when that is long enough ago."""
        self._counts[actor] += 1
        now = time.monotonic()
        if now >= self._quiet_until.get(actor, now):
            self._quiet_until[actor] = now + UNKNOWN_FOR.total_seconds()
            log.warning("unknown actor", actor=actor, queue=queue, messages=self._counts.pop(actor))


@contextmanager
def _closing_at_errors() -> Iterator[None]:
    """Let Dramatiq try again what it drops after any other error than that of a connection."""
    try:
        yield
    except redis.RedisError as error:
        raise ConnectionClosed(describe(error)) from error


def _text(fetched: Fetched | Refused) -> str:
    return fetched.id.decode(errors="replace")
