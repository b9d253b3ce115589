"""What pages show is asked here, once for all who look: a question that is being asked is not asked again.

An answer serves everybody for `FRESH` seconds, so a thousand open pages cost the servers no more than one.  The last
answers are kept, and shown with their age while a server is away.  Questions have a bounded number of threads and
connections; one that hangs holds up nobody longer than the patience of its page.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import peewee as pw
import redis
import structlog
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper.cli.connection import sentence
from forgekeeper.cli.terminal import Problem
from forgekeeper.platform.database import database, release
from forgekeeper.platform.database.looking import looking
from metrics.logs import clean, describe

FRESH = 0.5  # seconds
PATIENCE = 1.5  # seconds: a page has to say within two that nothing answers
# The share of its patience that a page has where there is a last answer to show.  One that is open asks half a second
# after an answer, may get one that is `FRESH`, asks again, and waits: all in less than two seconds, too.
RENEWING = 0.5
KEPT = 200  # answers, those that were asked for last
THREADS = 4  # questions at once, each on a connection of its own
MAX_QUESTIONS = 24
"""Limit of questions that are asked or wait for a thread, those included that nobody waits for any more."""
SILENT = "the servers have not answered yet; PostgreSQL or Redis may be away"
AWAY = (pw.PeeweeException, redis.RedisError, MaxConnectionsExceeded, OSError)
"""Errors of a server that is away, or that refuses."""


def trouble(error: Exception) -> str:
    """Say what a server refuses, and what to do."""
    return clean(sentence(error) or describe(error))


@dataclass(frozen=True)
class Known:
    """What is known of a question: the last *value*, *at* what time, and what is the *trouble* since it was *asked*.

    *problem* is the answer that there is no such thing; *began* is when this asking began.
    """

    value: dict[str, Any] | None = None
    at: float = 0.0
    began: float = 0.0
    asked: float = 0.0
    trouble: str | None = None
    problem: Problem | None = None

    @property
    def age(self) -> float | None:
        """How many seconds old the value is; None if there is none."""
        return None if self.value is None else time.monotonic() - self.at


log = structlog.get_logger(__name__)


class Busy(Exception):
    """Too many questions are asked: no other one is now."""


class Reader:
    """Asks the servers for pages."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "reader")
        self._lock = threading.Lock()
        self._known: OrderedDict[Hashable, Known] = OrderedDict()
        self._asking: dict[Hashable, tuple[Future[Known], float]] = {}
        self._acted = 0.0

    def acted(self) -> None:
        """Show nobody what was asked for before now: a person who has acted sees what came of it."""
        self._acted = time.monotonic()

    def ask(self, key: Hashable, look: Callable[[], dict[str, Any]], *, patience: float = PATIENCE) -> Known:
        """Return what *look* says, or has said to another who asked for *key* a moment ago.

        Waits no longer than *patience* seconds; then, or where a server refuses, the answer says what the trouble is.
        Raises `Busy` if too many other questions are asked.
        """
        with self._lock:
            known = self._known.get(key, Known())
            if known.began > self._acted and time.monotonic() - known.asked < FRESH:
                return known
            asking, since = self._asking.get(key, (None, 0.0))
            if asking is None or since <= self._acted:
                if len(self._asking) >= MAX_QUESTIONS:
                    raise Busy
                since = time.monotonic()
                asking = self._pool.submit(self._look, key, look, since)
                self._asking[key] = asking, since
        patience *= RENEWING if known.value is not None else 1
        try:
            return asking.result(max(0.0, since + patience - time.monotonic()))
        except TimeoutError:
            return replace(known, trouble=SILENT)

    def _look(self, key: Hashable, look: Callable[[], dict[str, Any]], began: float) -> Known:
        known = replace(_asked(look, self._known.get(key, Known())), began=began)
        with self._lock:
            # Else it is asked again, as somebody has acted.
            if self._asking.get(key, (None, 0.0))[1] == began:
                del self._asking[key]
                self._known[key] = known
                self._known.move_to_end(key)
                if len(self._known) > KEPT:
                    self._known.popitem(last=False)
        return known


def _asked(look: Callable[[], dict[str, Any]], before: Known) -> Known:
    """Ask on a connection of this thread; what fails leaves the value as it was *before*."""
    try:
        database.connect(reuse_if_open=True)
        with looking():
            found = look()
        known = Known(found, at=time.monotonic())
    except Problem as problem:
        known = Known(problem=problem)
    except AWAY as error:
        known = replace(before, trouble=trouble(error))
    except Exception:
        log.exception("page failed")
        known = replace(before, trouble="this page has a fault, which the log of the console has")
    finally:
        release()
    return replace(known, asked=time.monotonic())
