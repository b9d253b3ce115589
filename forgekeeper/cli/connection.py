"""A command's connection to the servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import redis

from forgekeeper import migrations
from forgekeeper.audit import acts
from forgekeeper.batches import BATCHES, BatchSpec
from forgekeeper.boot import load
from forgekeeper.cli.console import Problem, wrong_use
from forgekeeper.connections import Limits, connect
from forgekeeper.database import database, release
from forgekeeper.installation import Disagreement, agree
from forgekeeper.settings import Settings
from metrics import logs


def configured() -> Settings:
    """Load the settings and set the logs up as they say."""
    settings = load()
    logs.configure(settings.log_format, settings.log_level)
    return settings


@contextmanager
def connected(
    name: str,
    *,
    migrated: bool = True,
    redis_needed: bool = True,
    limits: Callable[[Settings], Limits] = Limits.of_worker,
) -> Iterator[Settings]:
    """Connect this command to PostgreSQL.

    Unless *migrated* is False the schema must be up to date, and unless *redis_needed* is False the settings must
    name a Redis.  *limits* says how long the command waits.  What is done within is recorded, unless the audit is off.
    """
    settings = configured()
    connect(settings, limits(settings), name=name, connections=3, redis_needed=redis_needed)
    with recorded(settings):
        database.connect()
        try:
            if migrated and (pending := migrations.pending(database.obj)):
                raise Problem(f"the database lacks {len(pending)} migration(s): run `forgekeeper migrate`")
            yield settings
        finally:
            release()


def recorded(settings: Settings) -> AbstractContextManager[None]:
    """Record what is done within, as the settings say."""
    return acts.begin(actor=settings.actor, on=settings.audit != "off")


def require_redis() -> None:
    """Make sure, before anything is changed, that Redis answers and belongs to the database's installation."""
    try:
        agree()
    except Disagreement as disagreement:
        raise Problem(str(disagreement)) from None


def require_installation() -> None:
    """Refuse a Redis of another installation; whether Redis answers does not matter here."""
    with suppress(redis.RedisError):
        require_redis()


def batch_named(name: str) -> BatchSpec:
    """Return the batch; refuse an unknown name."""
    if name not in BATCHES:
        wrong_use(f"there is no batch {name!r}; there are: {', '.join(sorted(BATCHES))}")
    return BATCHES[name]
