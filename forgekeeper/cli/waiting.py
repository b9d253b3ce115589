"""What a process that serves waits for before it begins: its servers, their schema, a worker's places.

A process that ended because a server is away would be started again and again, by a supervisor
that gives up in the end.  So it waits, with growing pauses and a line after each look.  What only
a person can mend in the settings, such as a Redis of another installation, still ends it at once.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import peewee as pw
import redis
import structlog
import typer

from forgekeeper import migrations
from forgekeeper.batches import BATCHES, BatchSpec
from forgekeeper.cli.connection import require_redis
from forgekeeper.cli.failures import STATES, sentence
from forgekeeper.connections import client
from forgekeeper.database import database, release, takes_no_writes
from forgekeeper.installation import agreement
from forgekeeper.installation.in_redis import claim_by_writing
from forgekeeper.installation.place import objection
from forgekeeper.installation.row import Installation
from forgekeeper.process import ready
from forgekeeper.settings import Settings
from forgekeeper.settings.addresses import of_database, of_redis
from forgekeeper.storage.objects import StoreUnavailable
from forgekeeper.storage.sentinel import Unreadable
from metrics.threads import Thread

SHORTEST, LONGEST = 1.0, 30.0
"""Seconds between two looks: at first, and at most."""
LOOK = 5.0
"""Seconds that a look may take; a server that has not answered by then hangs."""

log = structlog.get_logger(__name__)


class Missing(NamedTuple):
    """What is not there yet, where it should be, and why not, with what to do about it."""

    what: str
    where: str
    why: str = ""

    def because(self, why: str) -> Missing:
        """Return the same with a reason: without one it is only what is being looked at."""
        return Missing(self.what, self.where, why)


@dataclass(frozen=True)
class Found:
    """What a look has come to: what is missing, None where all is there, or an error that no waiting mends."""

    missing: Missing | None = None
    error: Exception | None = None


class Wait:
    """Looks again and again, each time in a thread of its own, so that a signal is heard though a server hangs."""

    def __init__(self, asked: SimpleQueue[Any], *, said: str) -> None:
        self._asked = asked  # where signals come in, and what a look has found
        self._said = said
        self._looking: threading.Thread | None = None
        self._at = Missing("a server", "an unknown place")

    def until_there(self, looks: Callable[[], Iterator[Missing]], *, patience: float | None = None) -> bool:
        """Return True when *looks* yields nothing missing, False if it still does after *patience* seconds.

        *looks* yields what it is about to look at, and once more what is missing of it.  Raises `typer.Exit`
        with status 0 when the process is asked to end meanwhile, and what no waiting mends.
        """
        began, pause, before = time.monotonic(), SHORTEST, ""
        while (missing := self._look(looks)) is not None:
            waited = time.monotonic() - began
            if patience is not None and waited >= patience:
                log.error("not ready, beginning without", process=self._said, **_facts(missing))
                return False
            pause = SHORTEST if missing.what != before else min(pause * 2, LONGEST)
            before = missing.what
            # Many processes that wait for one server come back at different times.
            seconds = round(pause * random.uniform(0.75, 1.0), 3)  # noqa: S311, spreads load, guards nothing
            if patience is not None:
                seconds = min(seconds, patience - waited)
            facts = _facts(missing)
            log.warning("not ready, waiting", process=self._said, **facts, waited=round(waited, 1), next_try_in=seconds)
            ready.tell_supervisor(f"STATUS=waiting for {missing.what} at {missing.where}: {missing.why}")
            self._next(seconds)
        return True

    def end_if_asked(self) -> None:
        """Raise `typer.Exit` if a signal has come by now."""
        self._next(0)

    def _look(self, looks: Callable[[], Iterator[Missing]]) -> Missing | None:
        if self._looking is not None:
            self._looking.join(SHORTEST / 10)
        if self._looking is None or not self._looking.is_alive():
            self._looking = Thread(partial(self._run, looks), "looking")
            self._looking.start()
        found = self._next(LOOK)
        if found is None:
            return self._at.because(f"it does not answer within {LOOK:.0f} s")
        if found.error is not None:
            raise found.error
        return found.missing

    def _run(self, looks: Callable[[], Iterator[Missing]]) -> None:
        try:
            self._asked.put(Found(self._first(looks())))
        except Exception as error:  # noqa: BLE001, whoever waits raises it
            self._asked.put(Found(error=error))
        finally:
            release()

    def _first(self, looks: Iterator[Missing]) -> Missing | None:
        for one in looks:
            self._at = one
            if one.why:
                return one
        return None

    def _next(self, seconds: float) -> Found | None:
        """Return what a look has found within so many seconds, None if nothing came; end when asked to."""
        try:
            came = self._asked.get(timeout=seconds) if seconds > 0 else self._asked.get_nowait()
        except Empty:
            return None
        if isinstance(came, Found):
            return came
        log.info("asked to end before it was ready", process=self._said)
        raise typer.Exit(0)


def _facts(missing: Missing) -> dict[str, str]:
    return {"missing": missing.what, "where": missing.where, "reason": missing.why}


def database_there(settings: Settings) -> Iterator[Missing]:
    """Look for PostgreSQL."""
    at = Missing("PostgreSQL", of_database(settings.require_database()))
    yield at
    try:
        database.connect(reuse_if_open=True)
        read_only = takes_no_writes()
    except pw.PeeweeException as error:
        yield _refused(at, error)
        return
    if read_only:
        yield at.because(f"it takes no writes; {STATES['25006']}")


def servers_there(settings: Settings) -> Iterator[Missing]:
    """Look for PostgreSQL, its schema, and a Redis that takes writes."""
    yield from database_there(settings)
    at = Missing("the schema", of_database(settings.require_database()))
    yield at
    try:
        pending = migrations.pending(database.obj)
    except pw.PeeweeException as error:
        yield _refused(at, error)
        return
    if pending:
        yield at.because(f"the database lacks {len(pending)} migration(s): run `forgekeeper migrate`")
        return
    at = Missing("Redis", of_redis(settings.require_redis()))
    yield at
    try:
        require_redis()
        if objection() is None:
            claim_by_writing(client, Installation.ensure())
    except (redis.RedisError, pw.PeeweeException) as error:
        yield _refused(at, error)


def places_there(settings: Settings, queues: Collection[str]) -> Iterator[Missing]:
    """Look for the repositories and the stores from which the actors of *queues* delete."""
    database.connect(reuse_if_open=True)
    for batch in sorted(_batches(queues), key=lambda one: one.name):
        for place, look in agreement.places(batch.deletes_from, settings):
            at = Missing("a place", place)
            yield at
            try:
                look()
            except (Unreadable, StoreUnavailable) as error:
                yield at.because(f"{error}; {batch.name} needs it")
                return


def _batches(queues: Collection[str]) -> list[BatchSpec]:
    return [one for one in BATCHES.values() if any(each.queue in queues for each in (one, *one.children))]


def _refused(at: Missing, error: Exception) -> Missing:
    said = sentence(error)
    if said is None:
        raise error
    return at.because(said)
