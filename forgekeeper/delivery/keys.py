"""The names of the delivery's keys in Redis, and the type of each; no other module spells one.

Dramatiq's own lie under the broker's namespace, where a bare Dramatiq worker or exporter understands them, with ours
beside them.  The delayed queue `<queue>.DQ` is a queue with keys of its own; its dead letters are the queue's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NAMESPACE = "forgekeeper"
INSTALLATION = "forgekeeper:installation"
"""String, the id of the one installation that keeps its messages here."""


def q_name(queue: str) -> str:
    """Name the queue itself, as Dramatiq does, whose modules take long to import for two such functions."""
    return queue[:-3] if queue.endswith((".DQ", ".XQ")) else queue


def dq_name(queue: str) -> str:
    """Name the queue of its delayed messages, as Dramatiq does."""
    return f"{q_name(queue)}.DQ"


@dataclass(frozen=True)
class QueueKeys:
    """The keys of one queue."""

    namespace: str
    queue: str

    @property
    def ready(self) -> str:
        """List of ids, what workers fetch from; also the channel on which is rung when something comes into it."""
        return f"{self.namespace}:{self.queue}"

    @property
    def bodies(self) -> str:
        """Hash, id -> body until the message is acknowledged."""
        return f"{self.namespace}:{self.queue}.msgs"

    @property
    def starts(self) -> str:
        """Hash, id -> starts without an orderly end."""
        return f"{self.namespace}:{self.queue}.starts"

    @property
    def delayed(self) -> QueueKeys:
        """The keys of the messages that wait for their time, which are a queue of their own."""
        return QueueKeys(self.namespace, dq_name(self.queue))

    @property
    def due(self) -> QueueKeys:
        """The keys of the queue in which delayed messages arrive when their time has come."""
        return QueueKeys(self.namespace, q_name(self.queue))

    @property
    def dead(self) -> str:
        """Sorted set, id by the millisecond of its death."""
        return f"{self.namespace}:{q_name(self.queue)}.XQ"

    @property
    def dead_bodies(self) -> str:
        """Hash, id -> body of a dead letter."""
        return f"{self.dead}.msgs"

    @property
    def dead_reasons(self) -> str:
        """Hash, id -> why the message became a dead letter."""
        return f"{self.dead}.reasons"

    @property
    def for_enqueue(self) -> list[str]:
        """List what an enqueue touches: whether the id waits elsewhere, the bodies, and the queue itself."""
        elsewhere = self.delayed if self.queue == q_name(self.queue) else self.due
        return [elsewhere.bodies, self.bodies, self.ready]

    @property
    def for_dead_letters(self) -> list[str]:
        """List what a dead letter is kept in."""
        return [self.dead, self.dead_bodies, self.dead_reasons]


@dataclass(frozen=True)
class WorkerKeys:
    """The keys of one worker."""

    namespace: str
    worker: str

    @property
    def heartbeats(self) -> str:
        """Sorted set, each worker by the millisecond of its last heartbeat."""
        return heartbeats(self.namespace)

    def in_hand(self, queue: str) -> str:
        """Set of ids that the worker has in hand."""
        return f"{self.namespace}:__acks__.{self.worker}.{queue}"

    def started(self, queue: str) -> str:
        """Set of ids that it has started on."""
        return f"{self.namespace}:__started__.{self.worker}.{queue}"


def heartbeats(namespace: str) -> str:
    """Name the sorted set of all workers, each by the millisecond of its last heartbeat."""
    return f"{namespace}:__heartbeats__"


def names(namespace: str, queues: Iterable[str]) -> list[str]:
    """List the keys, but for those of each worker."""
    found = [INSTALLATION, heartbeats(namespace)]
    for queue in queues:
        keys = QueueKeys(namespace, queue)
        for line in (keys, keys.delayed):
            found += [line.ready, line.bodies, line.starts]
        found += keys.for_dead_letters
    return found


def type_of(name: str) -> str:
    """Return the type that Redis has to have for the key."""
    if name == INSTALLATION:
        return "string"
    rest = name.partition(":")[2]
    if rest.startswith(("__acks__.", "__started__.")):
        return "set"
    if rest == "__heartbeats__" or rest.endswith(".XQ"):
        return "zset"
    return "hash" if rest.endswith((".msgs", ".starts", ".reasons")) else "list"
