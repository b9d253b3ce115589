"""Shared reads for pages: a question that is already in flight is not sent again.

An answer is valid for `FRESH` seconds for everybody, so a thousand open pages cost the servers no more than one. The
last answers are kept, and shown with their age while a server is away. Questions have a bounded number of threads and
connections; if one hangs, no page waits for it longer than its patience.
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
PATIENCE = 1.5  # seconds: a page has to report within two seconds that nothing answers
# Share of its patience that a page waits if it has a last answer. An open page asks half a second after an answer, may
# get a `FRESH` answer, asks again, and waits: all this takes less than two seconds.
RENEWING = 0.5
KEPT = 200  # answers, the most recently requested
THREADS = 4  # concurrent questions, each with its own connection
MAX_QUESTIONS = 24
"""Maximum questions in flight or waiting for a thread, even if nobody waits for them."""
SILENT = "the servers have not answered yet; PostgreSQL or Redis may be away"
AWAY = (pw.PeeweeException, redis.RedisError, MaxConnectionsExceeded, OSError)
"""Errors of a server that does not answer, or refuses."""


def trouble(error: Exception) -> str:
    """Describe a server's error and its remedy."""
    return clean(sentence(error) or describe(error))


@dataclass(frozen=True)
class Known:
    """Last *value* of a question, its time *at*, and the *trouble* of the attempt at *asked*.

    *problem* is set if the requested thing does not exist; *began* is the start of the latest attempt.
    """

    value: dict[str, Any] | None = None
    at: float = 0.0
    began: float = 0.0
    asked: float = 0.0
    trouble: str | None = None
    problem: Problem | None = None

    @property
    def age(self) -> float | None:
        """Age of the value in seconds; None without a value."""
        return None if self.value is None else time.monotonic() - self.at


log = structlog.get_logger(__name__)


class Busy(Exception):
    """Too many questions are in flight."""


class Reader:
    """Questions of pages to the servers, with the last answers."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "reader")
        self._lock = threading.Lock()
        self._known: OrderedDict[Hashable, Known] = OrderedDict()
        self._asking: dict[Hashable, tuple[Future[Known], float]] = {}
        self._acted = 0.0

    def acted(self) -> None:
        """Discard earlier answers, so that a person who has acted sees the result."""
        self._acted = time.monotonic()

    def ask(self, key: Hashable, look: Callable[[], dict[str, Any]], *, patience: float = PATIENCE) -> Known:
        """Return the answer of *look*, or a fresh answer to another caller with the same *key*.

        Waits at most *patience* seconds. If the time is up or a server refuses, the answer has the last value and the
        trouble. Raises `Busy` if too many other questions are in flight.
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
            # Otherwise somebody acted meanwhile and the question was sent again.
            if self._asking.get(key, (None, 0.0))[1] == began:
                del self._asking[key]
                self._known[key] = known
                self._known.move_to_end(key)
                if len(self._known) > KEPT:
                    self._known.popitem(last=False)
        return known


def _asked(look: Callable[[], dict[str, Any]], before: Known) -> Known:
    """Call *look* on a connection of this thread; after an error the value of *before* stays."""
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
