"""Dead letters: messages that nobody tries any more, until somebody replays, removes or forgets them.

The keys are Dramatiq's own, and beside them a hash with the reasons.  Each change is one
step on the server: of two who act on the same letter one does, and the other is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, NamedTuple

from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis
from dramatiq.errors import DecodeError

from forgekeeper.delivery.keys import QueueKeys
from forgekeeper.delivery.sizes import LARGEST_FETCHED, groups
from forgekeeper.redis_values import is_text, moment
from forgekeeper.redis_values import raw as _raw
from forgekeeper.redis_values import text as _text
from forgekeeper.scripts import call
from metrics.redaction import clean

PAGE = 1_000
OF_ITS_PAST = ("retries", "traceback", "eta", "requeue_timestamp", "forgekeeper_due_ms")
"""Options that a message has gathered on its way; without them it has all its retries again."""
PARTS: dict[str, type] = {"queue_name": str, "actor_name": str, "kwargs": dict, "options": dict, "message_id": str}

Replayed = Literal["replayed", "on its way", "gone"]


class Malformed(Exception):
    """The body is no message: it can be shown and removed, but nobody can work on it."""


class Address(NamedTuple):
    """Where a dead letter lies, and since when."""

    queue: str
    id: str
    since: datetime


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter as it lies there; its body may be anything, *noted* is why it became one, if anyone said.

    Of one that is too large to be read *unread* is the size.
    """

    queue: str
    id: str
    since: datetime
    body: bytes | None
    noted: str | None = None
    unread: int = 0

    @cached_property
    def message(self) -> Message[Any]:
        """The message; raises `Malformed` when the body is none."""
        if self.unread:
            raise Malformed(f"it is too large to be read ({self.unread:,} bytes)")
        if self.body is None:
            raise Malformed("its body is gone")
        try:
            message: Message[Any] = Message.decode(self.body)
        except DecodeError:
            raise Malformed("its body is no message") from None
        parts: dict[str, object] = {name: getattr(message, name) for name in PARTS}
        if wrong := [name for name, part in parts.items() if not isinstance(part, PARTS[name]) or not _fits(part)]:
            raise Malformed(f"its body is no message: {', '.join(wrong)} cannot be")
        return message

    @property
    def fault(self) -> str | None:
        """What is wrong with the body, None when it is a message."""
        try:
            _ = self.message
        except Malformed as malformed:
            return str(malformed)
        return None

    @property
    def options(self) -> dict[str, Any]:
        """The message's options, none when there is no message."""
        return {} if self.fault else self.message.options

    @property
    def reason(self) -> str:
        """Why it became one: what was noted, else the last line of its last error."""
        lines = str(self.options.get("traceback") or "").strip().splitlines()
        return self.noted or (clean(lines[-1]) if lines else "")

    def as_first_sent(self) -> Message[Any]:
        """Return the message as it was before its first try."""
        options = {name: value for name, value in self.message.options.items() if name not in OF_ITS_PAST}
        options["redis_message_id"] = self.message.message_id
        fields = self.message.asdict() | {"queue_name": self.queue, "options": options}
        # Its wait begins now, to whoever watches how old the messages of a queue are.
        fields["message_timestamp"] = current_millis()
        return Message(**fields)


def count(broker: RedisBroker, queues: Sequence[str]) -> int:
    """Count the dead letters of *queues*."""
    return sum(broker.client.zcard(_keys(broker, queue).dead) for queue in queues)


def addresses(
    broker: RedisBroker, queues: Sequence[str], *, limit: int | None = None, oldest_first: bool = True
) -> list[Address]:
    """List where the dead letters of *queues* lie, up to *limit* of them."""
    last = -1 if limit is None else limit - 1
    found = []
    for queue in queues:
        scores: Any = broker.client.zrange(_keys(broker, queue).dead, 0, last, desc=not oldest_first, withscores=True)
        found += [Address(queue, _text(key), _moment(score)) for key, score in scores]
    found.sort(key=lambda address: address.since, reverse=not oldest_first)
    return found[:limit]


def find(broker: RedisBroker, queues: Sequence[str], letter_id: str) -> DeadLetter | None:
    """Return the dead letter with this id, from the first of the *queues* that has it."""
    scores = [(queue, broker.client.zscore(_keys(broker, queue).dead, _raw(letter_id))) for queue in queues]
    found = [Address(queue, letter_id, _moment(score)) for queue, score in scores if score is not None]
    return next(read(broker, found), None)


def read(broker: RedisBroker, found: Sequence[Address]) -> Iterator[DeadLetter]:
    """Read the dead letters that lie there, in that order; those that are gone, or have died again, are left out."""
    for start in range(0, len(found), PAGE):
        page = found[start : start + PAGE]
        with broker.client.pipeline(transaction=False) as pipe:
            for address in page:
                pipe.hstrlen(_keys(broker, address.queue).dead_bodies, _raw(address.id))
            sizes = pipe.execute()
        for group in groups(sizes):
            yield from _read(broker, [(page[number], sizes[number]) for number in group])


def _read(broker: RedisBroker, found: Sequence[tuple[Address, int]]) -> Iterator[DeadLetter]:
    with broker.client.pipeline(transaction=False) as pipe:
        for address, size in found:
            keys = _keys(broker, address.queue)
            if size <= LARGEST_FETCHED:
                pipe.hget(keys.dead_bodies, _raw(address.id))
            pipe.hget(keys.dead_reasons, _raw(address.id))
            # Last: whatever has become of the letter since it was found is known then.
            pipe.zscore(keys.dead, _raw(address.id))
        answers = iter(pipe.execute())
    for address, size in found:
        unread = size if size > LARGEST_FETCHED else 0
        body = None if unread else next(answers)
        noted, score = next(answers), next(answers)
        if score is not None and _moment(score) == address.since:
            yield DeadLetter(*address, body, noted and clean(noted.decode(errors="replace")), unread)


def is_on_its_way(broker: RedisBroker, letter: DeadLetter) -> bool:
    """Say whether a message with the letter's id waits, is queued or is being worked on."""
    keys = _keys(broker, letter.queue)
    return any(broker.client.hexists(name, letter.message.message_id) for name in (keys.delayed.bodies, keys.bodies))


def replay(broker: RedisBroker, letter: DeadLetter) -> Replayed:
    """Put the letter back into its queue, as it was before its first try; say what became of it.

    While a message with its id is on its way the letter stays where it is.
    """
    message = letter.as_first_sent()
    keys = _keys(broker, letter.queue)
    broker.emit_before("enqueue", message, None)
    answer: bytes = call(
        broker.client,
        "replay_dead",
        keys=[*keys.for_dead_letters, *keys.for_enqueue],
        args=[_raw(letter.id), letter.body, message.message_id, message.encode()],
    )
    if answer == b"replayed":
        broker.emit_after("enqueue", message, None)
        return "replayed"
    return "gone" if answer == b"gone" else "on its way"


def remove(broker: RedisBroker, letter: DeadLetter) -> bool:
    """Remove the letter; return False when it was gone already, or another of its id has taken its place."""
    seen = [_raw(letter.id), letter.body or b"", letter.unread]
    return bool(call(broker.client, "remove_dead", keys=_keys(broker, letter.queue).for_dead_letters, args=seen))


def _fits(part: object) -> bool:
    return not isinstance(part, str) or is_text(part)


def _keys(broker: RedisBroker, queue: str) -> QueueKeys:
    return QueueKeys(broker.namespace, queue)


def _moment(milliseconds: float) -> datetime:
    return moment(milliseconds / 1000)
