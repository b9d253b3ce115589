"""Our side of Dramatiq's worker: how messages come out of Redis, and how each of them ends.

Dramatiq's threads ask the broker for a consumer, the consumer for messages, and give each
back with `ack` or `nack`.  Here a message is in this process's hands until one step in
Redis has ended it, and that step is tried until it works: an error, of whatever kind, is to
Dramatiq a closed connection.  What its threads and queues lose all the same goes back to Redis.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import dramatiq
import redis
import structlog
from dramatiq import Actor, Message, MessageProxy
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import compute_backoff, current_millis, dq_name, q_name
from dramatiq.errors import ConnectionClosed, DecodeError

from forgekeeper import shutdown, worker_metrics
from forgekeeper.delivery.deliveries import Deliveries, Fetched, Refused
from forgekeeper.delivery.enqueue_unique import depth
from forgekeeper.delivery.queues import actor_of
from forgekeeper.delivery.sizes import TOO_LARGE, fitting
from forgekeeper.redis_values import is_text
from forgekeeper.runs.attempt import describe, identity
from metrics.redaction import clean

RECLAIM_EVERY = timedelta(seconds=30)
"""How often a consumer looks for messages that are ours by Redis's account alone; they may lie for a minute at most."""
END_WITHIN = timedelta(minutes=1)
"""For so long a message's end is tried that fails though Redis is there: then the process ends, and others have it."""
UNKNOWN_FOR = timedelta(minutes=1)
"""How long a message waits whose actor this process does not know; a newer worker may come by."""
LONGEST_WAIT = 86_400_000
"""Milliseconds after which a delayed message is due, whatever it says."""

log = structlog.get_logger(__name__)


class CannotEnd(BaseException):
    """A message that is done cannot be ended here.  It ends its thread: Dramatiq swallows what is an `Exception`."""


class Due(Message[Any]):
    """A delayed message: when its time has come its acknowledgement moves it, in one step."""


class Delivery(MessageProxy):
    """A message in this process's hands, and how its acknowledgement is to end it."""

    def __init__(self, fetched: Fetched, message: Message[Any]) -> None:
        super().__init__(message)
        self.fetched = fetched
        self.later: bytes | None = None  # what takes its place in the delayed queue
        self.unstarted = False  # it goes back to its queue
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


class Broker(RedisBroker):
    """A broker in which a message is known in Redis by its own id, through all its retries.

    That id is what makes it one of a kind: while it waits, is queued or is worked on, the
    same cannot be put in again.
    """

    def __init__(self, *, client: redis.Redis, namespace: str, middleware: list[dramatiq.Middleware]) -> None:
        super().__init__(client=client, namespace=namespace, middleware=middleware)  # type: ignore[no-untyped-call]
        self._hands: dict[str, Hands] = defaultdict(Hands)
        self.enrol()

    def declare_actor(self, actor: Actor[..., Any]) -> None:
        """Declare a batch (``document=``) or a child (``child=True``); raise `TypeError` for any other actor.

        Whatever else it raised, nobody would hear of it: only a run has a row, and only a child is sent again.
        """
        if (actor.options.get("child") is True) == ("document" in actor.options):
            raise TypeError(
                f"actor {actor.actor_name} is neither a batch nor a child, or both: declare it by `forgekeeper.declaring`"
                " (`batch` or `child_of`), or with one of the options document=NUMBER and child=True"
            )
        super().declare_actor(actor)

    def enrol(self) -> None:
        """Make this process a worker of its own; Dramatiq would share one name among all forks of a master."""
        self.broker_id = f"{identity()}:{uuid4().hex[:12]}"
        self.deliveries = Deliveries(self.client, self.namespace, self.broker_id)

    def in_hand(self) -> dict[str, list[bytes]]:
        """Return the ids of all messages that this process has fetched and not ended, by queue."""
        found = {queue: [fetched.id for fetched in hands.all()] for queue, hands in list(self._hands.items())}
        return {queue: ids for queue, ids in found.items() if ids}

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5000) -> Consumer:
        """Return a consumer of the queue; *timeout* is for how many milliseconds it may idle."""
        return Consumer(self, queue_name, self._hands[queue_name], prefetch=prefetch, timeout=timeout)

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Put *message* into its queue, or let it wait *delay* milliseconds first.

        One whose id is on its way already is not put in.  One that a worker has in hand
        waits from its acknowledgement on.  Raises `MessageTooLarge`, having put nothing in.
        """
        if isinstance(message, Due):
            return message
        delivery = message if isinstance(message, Delivery) else None
        message = message.copy(options={"redis_message_id": message.message_id})
        if delay is not None:
            waiting_line, eta = dq_name(message.queue_name), current_millis() + delay
            message = message.copy(queue_name=waiting_line, options={"eta": eta})
        self.emit_before("enqueue", message, delay)
        if delivery is not None:
            # Here it is heard of if that cannot be written; where the message is ended it would be in the way for ever.
            delivery.later = _with_short_trace(message).encode()
        elif not self.do_enqueue(message.queue_name, message.message_id, _body(message)):
            return message
        self.emit_after("enqueue", message, delay)
        return message

    # What Dramatiq itself calls its commands

    def do_enqueue(self, queue: str, message_id: str, body: bytes) -> bool:
        """Put a message in, unless its id is on its way already."""
        return self.deliveries.put(queue, message_id, body)

    def do_fetch(self, queue: str, limit: int) -> list[bytes]:
        """Take messages; return their bodies."""
        return [fetched.body for fetched in self.deliveries.fetch(queue, limit=limit) if isinstance(fetched, Fetched)]

    def do_ack(self, queue: str, message_id: str) -> bool:
        """End a message that is done."""
        return self.deliveries.ack(queue, message_id)

    def do_nack(self, queue: str, message_id: str) -> bool:
        """Make a message a dead letter."""
        return self.deliveries.nack(queue, message_id, reason="failed")

    def do_requeue(self, queue: str, *message_ids: str) -> int:
        """Hand messages back."""
        return self.deliveries.requeue(queue, message_ids)

    def do_qsize(self, queue: str) -> int:
        """Count the messages that are not done."""
        counts = depth(self.client, self.namespace, queue)
        return counts["ready"] + counts["in_flight"] + counts["delayed"]


class Consumer(dramatiq.Consumer):
    """Fetches the messages of one queue, or of its delayed ones, and ends them.

    *hands* are what this process has in hand of the queue.  They outlive the consumer, which
    Dramatiq replaces after an error: work goes on meanwhile.
    """

    def __init__(self, broker: Broker, queue: str, hands: Hands, *, prefetch: int, timeout: int) -> None:
        self._broker = broker
        self._deliveries = broker.deliveries
        self._queue = queue
        self._delayed = queue != q_name(queue)
        self._hands = hands
        self._prefetch = prefetch
        self._timeout = timeout
        self._fetched: deque[Fetched] = deque()
        self._misses = 0
        self._reclaim_at = time.monotonic()
        self._handed_back = False
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
        shutdown.requested.wait(milliseconds / 1000)
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
        given_up = self._step(message, dead)
        if given_up:
            facts = {"queue": self._queue, "message_id": message.message_id, "reason": message.reason}
            log.error("message given up", actor=message.actor_name, **facts)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Hand messages back that were not worked on."""
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

        So the message is let go of on all other ways out: where the step was not taken, it is reclaimed.
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
        return self._deliveries.ack(self._queue, *delivery.fetched)

    def _fetch(self) -> None:
        now = time.monotonic()
        if now >= self._reclaim_at:
            # What was fetched and not handed out is none: we fetch when there is nothing left of that.
            count = self._deliveries.reclaim(self._queue, [fetched.id for fetched in self._hands.all()])
            if count:
                log.warning("messages reclaimed", queue=self._queue, count=count)
            self._reclaim_at = now + RECLAIM_EVERY.total_seconds()
        room = self._prefetch - len(self._hands.all())
        if room > 0:
            self._fetched.extend(self._fitting(self._deliveries.fetch(self._queue, limit=room)))
        if shutdown.requested.is_set():
            self._drain()

    def _fitting(self, fetched: Iterable[Fetched | Refused]) -> Iterator[Fetched]:
        """Say of each message that was too large that it was given up; yield the others."""
        for one in fetched:
            if isinstance(one, Fetched):
                yield one
                continue
            facts = {"queue": self._queue, "message_id": _text(one), "reason": TOO_LARGE, "bytes": one.size}
            log.error("message given up", **facts)
            # Whose it was is in what nobody has read.
            worker_metrics.given_up("")

    def _drain(self) -> None:
        """Hand back what has not been started, once; the pulse did so too, perhaps before our last fetch."""
        if not self._handed_back:
            self._fetched.clear()
            self._deliveries.hand_back(self._queue)
            self._handed_back = True

    def _open(self, fetched: Fetched) -> Delivery | None:
        """Make a delivery of what was fetched; None when nobody here can work on it."""
        self._misses = 0
        if fetched in self._hands:
            # It was taken from us while we were at it, and is ours again: once is enough.
            return None
        message = self._decode(fetched)
        if message is None:
            log.error("message given up", queue=self._queue, message_id=_text(fetched), reason="malformed")
            if self._deliveries.nack(self._queue, *fetched, reason="malformed"):
                worker_metrics.given_up(actor_of(fetched.body))
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
        """Hand the message of an unknown actor back, to be looked at again later."""
        self._unknown.seen(message.actor_name, self._queue)
        eta = current_millis() + round(UNKNOWN_FOR.total_seconds() * 1000)
        later = message.copy(queue_name=dq_name(self._queue), options={"eta": eta})
        self._deliveries.retry(self._queue, fetched, later.encode())


class UnknownActors:
    """Counts messages of unknown actors, and says so once a minute for each actor."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._silent_until: dict[str, float] = {}

    def seen(self, actor: str, queue: str) -> None:
        """Count one; tell of those since the last line when that is long enough ago."""
        self._counts[actor] += 1
        now = time.monotonic()
        if now >= self._silent_until.get(actor, now):
            self._silent_until[actor] = now + UNKNOWN_FOR.total_seconds()
            log.warning("unknown actor", actor=actor, queue=queue, messages=self._counts.pop(actor))


@contextmanager
def _closing_at_errors() -> Iterator[None]:
    """Let Dramatiq try again what it gives up after any other error than that of a connection."""
    try:
        yield
    except redis.RedisError as error:
        raise ConnectionClosed(describe(error)) from error


def _text(fetched: Fetched | Refused) -> str:
    return fetched.id.decode(errors="replace")


def _body(message: Message[Any]) -> bytes:
    return fitting(message.encode(), actor=message.actor_name, message_id=message.message_id)


def _with_short_trace(message: Message[Any]) -> Message[Any]:
    """Return the message with the trace of its last error as a line has it, however much the error had to say."""
    trace = message.options.get("traceback")
    return message.copy(options={"traceback": clean(trace)}) if isinstance(trace, str) else message
