"""What a process that serves waits for before it begins: its servers and their schema.

If it ended, a supervisor would start it again and give up in the end.  What only a person can correct still ends it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import NamedTuple

import peewee as pw
import redis
import structlog
import typer

from forgekeeper import migrations
from forgekeeper.cli.connection import require_redis
from forgekeeper.cli.failures import STATES, sentence
from forgekeeper.connections import client
from forgekeeper.coordination.values import misfits
from forgekeeper.database import database, release
from forgekeeper.installation import Installation, claim_by_writing, objection
from forgekeeper.process import lifetime
from forgekeeper.settings import Settings
from forgekeeper.settings.addresses import of_database, of_redis

SHORTEST, LONGEST = 1.0, 30.0
"""Seconds between two looks: at first, and at most."""

log = structlog.get_logger(__name__)


class Missing(NamedTuple):
    """What is not there yet, where it should be, and why not, with what to do about it."""

    what: str
    where: str
    why: str


class Wait:
    """Waits until something is there, or the process is asked to end."""

    def __init__(self, asked: SimpleQueue[None], *, said: str) -> None:
        self._asked, self._said = asked, said

    def until_there(self, look: Callable[[], Missing | None]) -> None:
        """Return when *look* misses nothing.

        Raises `typer.Exit` with status 0 when the process is asked to end meanwhile, and what waiting does not cure.
        """
        pause, before = SHORTEST, ""
        while (missing := look()) is not None:
            release()
            pause = SHORTEST if missing.what != before else min(pause * 2, LONGEST)
            before = missing.what
            # Spread, as many processes may wait for one server.
            seconds = round(pause * random.uniform(0.75, 1.0), 3)  # noqa: S311, no secret
            facts = {"missing": missing.what, "where": missing.where, "reason": missing.why, "next_try_in": seconds}
            log.warning("not ready, waiting", process=self._said, **facts)
            lifetime.tell_supervisor(f"STATUS=waiting for {missing.what} at {missing.where}: {missing.why}")
            self._sleep(seconds)
        release()
        self.end_if_asked()

    def end_if_asked(self) -> None:
        """Raise `typer.Exit` if a signal has come by now."""
        self._sleep(0)

    def _sleep(self, seconds: float) -> None:
        try:
            self._asked.get(block=seconds > 0, timeout=seconds)
        except Empty:
            return
        log.info("asked to end before it was ready", process=self._said)
        raise typer.Exit(0)


def database_missing(settings: Settings) -> Missing | None:
    """Look for PostgreSQL."""
    where = of_database(settings.require_database())
    try:
        database.connect(reuse_if_open=True)
        (read_only,) = database.execute_sql("select current_setting('transaction_read_only')::bool").fetchone()
    except pw.PeeweeException as error:
        return _refused("PostgreSQL", where, error)
    return Missing("PostgreSQL", where, f"it takes no writes; {STATES['25006']}") if read_only else None


def server_missing(settings: Settings, keys: Mapping[str, str]) -> Missing | None:
    """Look for PostgreSQL, its schema, and a Redis that takes writes and whose *keys* are of the types they must be."""
    if (missing := database_missing(settings)) is not None:
        return missing
    what, where = "the schema", of_database(settings.require_database())
    try:
        if pending := migrations.pending(database.obj):
            return Missing(what, where, f"the database lacks {len(pending)} migration(s): run `forgekeeper migrate`")
        what, where = "Redis", of_redis(settings.require_redis())
        require_redis()
        if objection() is None:
            claim_by_writing(client, Installation.ensure())
        misfit = next(misfits(client, keys), None)
    except (redis.RedisError, pw.PeeweeException) as error:
        return _refused(what, where, error)
    return None if misfit is None else Missing(what, where, misfit)


def _refused(what: str, where: str, error: Exception) -> Missing:
    said = sentence(error)
    if said is None:
        raise error
    return Missing(what, where, said)
