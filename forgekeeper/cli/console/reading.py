"""Shared reads for pages: a question that is already in flight is not sent again.

An answer is valid for `ANSWER_VALID_SECONDS` for everybody, so a thousand open pages cost the servers no more
than one. The last answers are kept, and shown with their age while a server is away. Questions have a bounded number of
threads and connections; if one hangs, no page waits for it longer than its patience.
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

from forgekeeper.cli.connection import describe_with_remedy
from forgekeeper.cli.console.texts import TranslatableText
from forgekeeper.cli.terminal import Problem
from forgekeeper.platform.database import database, release_connection
from forgekeeper.platform.database.read_only import read_only_snapshot
from metrics.logs import clean_text, describe_error

ANSWER_VALID_SECONDS = 0.5  # seconds
ANSWER_TIMEOUT_SECONDS = 1.5  # seconds: a page has to report within two seconds that nothing answers
# Share of its patience that a page waits if it has a last answer. An open page asks half a second after an answer, may
# get a fresh answer, asks again, and waits: all this takes less than two seconds.
RENEWAL_TIMEOUT_SHARE = 0.5
MAX_KEPT_ANSWERS = 200  # answers, the most recently requested
READER_THREADS = 4  # concurrent questions, each with its own connection
MAX_QUESTIONS = 24
"""Maximum questions in flight or waiting for a thread, even if nobody waits for them."""
NO_ANSWER_SENTENCE = TranslatableText("the servers have not answered yet; PostgreSQL or Redis may be away")
BUSY_SENTENCE = TranslatableText("the console is busy: too many requests wait for the servers; try again in a moment")
SERVER_ERRORS = (pw.PeeweeException, redis.RedisError, MaxConnectionsExceeded, OSError)
"""Errors of a server that does not answer, or refuses."""


def describe_trouble(error: Exception) -> str:
    """Describe a server's error and its remedy."""
    return clean_text(describe_with_remedy(error) or describe_error(error))


@dataclass(frozen=True)
class CachedAnswer:
    """Last *value* of a question, its time *at*, and the *trouble* of the attempt at *asked*.

    *problem* is set if the requested thing does not exist; *began* is the start of the latest attempt. Unless it
    *serves_later*, it is dropped once it has expired.
    """

    value: dict[str, Any] | None = None
    at: float = 0.0
    began: float = 0.0
    asked: float = 0.0
    trouble: str | None = None
    problem: Problem | None = None
    serves_later: bool = True

    @property
    def is_fresh(self) -> bool:
        """Whether the answer may serve everybody."""
        return time.monotonic() - self.asked < ANSWER_VALID_SECONDS

    @property
    def age(self) -> float | None:
        """Age of the value in seconds; None without a value."""
        return None if self.value is None else time.monotonic() - self.at


log = structlog.get_logger(__name__)


class ReaderBusy(Exception):
    """Too many questions are in flight."""


class PageReader:
    """Questions of pages to the servers, with the last answers."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(READER_THREADS, "reader")
        self._lock = threading.Lock()
        self._answers: OrderedDict[Hashable, CachedAnswer] = OrderedDict()
        self._in_flight: dict[Hashable, tuple[Future[CachedAnswer], float]] = {}
        self._discarded_at = 0.0

    def discard_answers(self) -> None:
        """Discard earlier answers, so that a person who has acted sees the result."""
        self._discarded_at = time.monotonic()

    def ask(
        self,
        key: Hashable,
        read_facts: Callable[[], dict[str, Any]],
        *,
        timeout_seconds: float = ANSWER_TIMEOUT_SECONDS,
        serves_later: bool = True,
    ) -> CachedAnswer:
        """Return the answer of *read_facts*, or a fresh answer to another caller with the same *key*.

        Waits at most *timeout_seconds* seconds. If the time is up or a server refuses, the answer has the last value
        and the trouble; unless the answer *serves_later*, it has no last value. Raises `ReaderBusy` if too many other
        questions are in flight.
        """
        with self._lock:
            known = self._answers.get(key, CachedAnswer())
            if known.began > self._discarded_at and known.is_fresh:
                return known
            known = known if serves_later else CachedAnswer(serves_later=False)
            asking, since = self._in_flight.get(key, (None, 0.0))
            if asking is None or since <= self._discarded_at:
                if len(self._in_flight) >= MAX_QUESTIONS:
                    raise ReaderBusy
                since = time.monotonic()
                asking = self._pool.submit(self._read_and_keep, key, read_facts, since, known)
                self._in_flight[key] = asking, since
        timeout_seconds *= RENEWAL_TIMEOUT_SHARE if known.value is not None else 1
        try:
            return asking.result(max(0.0, since + timeout_seconds - time.monotonic()))
        except TimeoutError:
            return replace(known, trouble=NO_ANSWER_SENTENCE)

    def _read_and_keep(
        self, key: Hashable, read_facts: Callable[[], dict[str, Any]], began: float, before: CachedAnswer
    ) -> CachedAnswer:
        found = _read_connected(read_facts, before)
        known = replace(found, began=began, serves_later=before.serves_later)
        with self._lock:
            # Otherwise somebody acted meanwhile and the question was sent again.
            if self._in_flight.get(key, (None, 0.0))[1] == began:
                del self._in_flight[key]
                self._drop_expired()
                self._answers[key] = known
                self._answers.move_to_end(key)
                if len(self._answers) > MAX_KEPT_ANSWERS:
                    self._answers.popitem(last=False)
        return known

    def _drop_expired(self) -> None:
        for key in [key for key, one in self._answers.items() if not (one.serves_later or one.is_fresh)]:
            del self._answers[key]


def _read_connected(read_facts: Callable[[], dict[str, Any]], before: CachedAnswer) -> CachedAnswer:
    """Call *read_facts* on a connection of this thread; after an error the value of *before* stays."""
    try:
        database.connect(reuse_if_open=True)
        with read_only_snapshot():
            found = read_facts()
        known = CachedAnswer(found, at=time.monotonic())
    except Problem as problem:
        known = CachedAnswer(problem=problem)
    except SERVER_ERRORS as error:
        known = replace(before, trouble=describe_trouble(error))
    except Exception:
        log.exception("page failed")
        known = replace(before, trouble=TranslatableText("this page failed; see the log of the console"))
    finally:
        release_connection()
    return replace(known, asked=time.monotonic())
