"""A doorbell: whoever puts a message into a queue rings, and consumers that idle meanwhile ask Redis nothing.

Each script that puts an id into a queue's list publishes on the channel of the list's name.  One thread of a worker
process is subscribed for all its consumers.  A ring is a hint: one that is lost costs the seconds until the next look,
which this thread takes for all of them at once, by the clock, however often it is rung.  While it hears nothing, of a
Redis that is away or that refuses the subscription, consumers look for themselves, every second, as Dramatiq's own do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import closing
from datetime import timedelta

import redis
import structlog
from redis.client import PubSub

from forgekeeper.delivery.keys import QueueKeys
from metrics.redaction import describe
from metrics.threads import Thread

LOOK_EVERY = timedelta(seconds=3)
"""A message whose ring was lost waits for this long at most: all lists are looked at with one command.

With each look the line is pinged; one on which nothing has come since the look before is given up.
"""
LOG_EVERY = timedelta(minutes=1)

log = structlog.get_logger(__name__)


class Bell:
    """What one consumer waits for."""

    def __init__(self, doorbell: Doorbell) -> None:
        self._doorbell = doorbell
        self._rung = threading.Event()
        # What came before us rang for nobody.
        self._rung.set()

    @property
    def is_heard(self) -> bool:
        """Whether somebody listens for it; where nobody does, the consumer has to look by itself."""
        return self._doorbell.listens

    def ring(self) -> None:
        """Let the consumer look, now or when it is done."""
        self._rung.set()

    def answer(self) -> bool:
        """Say whether to look; a ring is answered once, and where none would be heard the answer is always yes."""
        heard, rung = self.is_heard, self._rung.is_set()
        # Before the look, not after it: who rings meanwhile rings for another one.
        self._rung.clear()
        return rung or not heard

    def wait(self, seconds: float) -> None:
        """Wait until it rings, or for so long."""
        self._rung.wait(seconds)


class Doorbell:
    """Rings the bells of a process's consumers; until `listen` is called it hears nothing."""

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._bells: dict[str, Bell] = {}
        self._stopped = threading.Event()
        self._logs_from = 0.0
        self.listens = False

    def bell(self, queue: str) -> Bell:
        """Return the bell of the queue's consumer, which takes the place of an earlier one's."""
        bell = Bell(self)
        self._bells[self._channel(queue)] = bell
        return bell

    def ring(self) -> None:
        """Ring all bells, which ends every wait."""
        for bell in list(self._bells.values()):
            bell.ring()

    def listen(self, queues: Iterable[str]) -> threading.Thread:
        """Hear what comes into *queues*, which are all that have a consumer, until `stop`; return the thread."""
        channels = [self._channel(queue) for queue in queues]
        thread = Thread(lambda: self._work(channels), "doorbell")
        thread.start()
        return thread

    def stop(self) -> None:
        """End the thread at its next look, and every wait now."""
        self._stopped.set()
        self.listens = False
        self.ring()

    def _work(self, channels: list[str]) -> None:
        while not self._stopped.is_set():
            try:
                with closing(self._client.pubsub()) as subscription:  # type: ignore[no-untyped-call]
                    self._hear(subscription, channels)
            except Exception as error:  # noqa: BLE001, consumers look for themselves meanwhile
                self._tell(error)
            finally:
                self.listens = False
                self.ring()
            self._stopped.wait(LOOK_EVERY.total_seconds())

    def _hear(self, subscription: PubSub, channels: list[str]) -> None:
        subscription.subscribe(*channels)
        heard, missing, look_at = False, set(channels), time.monotonic() + LOOK_EVERY.total_seconds()
        while not self._stopped.is_set():
            said = subscription.get_message(timeout=max(0.0, look_at - time.monotonic()))
            if said is not None:
                heard = True
                if said["type"] == "subscribe":
                    missing.discard(said["channel"].decode())
                    self._begin(missing)
                elif said["type"] == "message":
                    self._ring_for(said["channel"].decode())
            if time.monotonic() < look_at:
                continue
            if not heard:
                raise redis.TimeoutError("no answer on the line of the doorbell")
            if self._client.exists(*channels):
                self.ring()
            subscription.ping()
            heard, look_at = False, time.monotonic() + LOOK_EVERY.total_seconds()

    def _begin(self, missing: set[str]) -> None:
        if not missing:
            self.listens = True
            # Who rang before we listened was not heard.
            self.ring()

    def _ring_for(self, channel: str) -> None:
        if (bell := self._bells.get(channel)) is not None:
            bell.ring()

    def _tell(self, error: Exception) -> None:
        """Say once a minute that nothing is heard, for as long as that is so."""
        if time.monotonic() >= self._logs_from:
            self._logs_from = time.monotonic() + LOG_EVERY.total_seconds()
            log.warning("doorbell not heard", error=describe(error))

    def _channel(self, queue: str) -> str:
        return QueueKeys(self._namespace, queue).ready
