"""A command's connection to the servers, and what it says when they are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta

import peewee as pw
import redis

from forgekeeper import migrations
from forgekeeper.audit import acts
from forgekeeper.batches import BATCHES, BatchSpec
from forgekeeper.boot import load
from forgekeeper.cli import interrupts
from forgekeeper.cli.console import Problem, wrong_use
from forgekeeper.cli.failures import sentence
from forgekeeper.connections import Limits, connect
from forgekeeper.database import database, release
from forgekeeper.installation.agreement import Disagreement, agree
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
    interrupted_within: timedelta | None = interrupts.AT_ONCE,
) -> Iterator[Settings]:
    """Connect this command to PostgreSQL; say in a sentence what is missing.

    Unless *migrated* is False the schema must be up to date, and unless *redis_needed* is False
    the settings must name a Redis.  *limits* says how patient the command is.  Ctrl-C ends it
    even where a server hangs, unless *interrupted_within* is None: then that is the caller's affair.
    What is done within is recorded as this process's, unless the audit is off.
    """
    settings = configured()
    connect(settings, limits(settings), name=name, connections=3, redis_needed=redis_needed)
    patient = interrupts.heard(interrupted_within) if interrupted_within else nullcontext()
    with explained(), patient, recorded(settings):
        database.connect()
        try:
            if migrated and (pending := migrations.pending(database.obj)):
                raise Problem(f"the database lacks {len(pending)} migration(s): run `forgekeeper migrate`")
            yield settings
        finally:
            release()


def recorded(settings: Settings) -> AbstractContextManager[None]:
    """Let what is done within be recorded as the settings say."""
    return acts.begin(actor=settings.actor, on=settings.audit != "off")


@contextmanager
def explained() -> Iterator[None]:
    """Turn what servers and the machine refuse into sentences."""
    try:
        yield
    except migrations.TableExists as error:
        raise Problem(f"{error}: it was not made by forgekeeper; rename it or use another schema") from error
    except (pw.PeeweeException, redis.RedisError, OSError) as error:
        said = sentence(error)
        if said is None:
            raise
        raise Problem(said) from error


def require_redis() -> None:
    """Make sure, before anything is changed, that Redis answers and is of the database's installation."""
    try:
        agree()
    except Disagreement as disagreement:
        raise Problem(str(disagreement)) from None


def require_installation() -> None:
    """Refuse a Redis of another installation; one that is away is the affair of what needs it."""
    with suppress(redis.RedisError):
        require_redis()


def batch_named(name: str) -> BatchSpec:
    """Return the batch; refuse a name that is none."""
    if name not in BATCHES:
        wrong_use(f"there is no batch {name!r}; there are: {', '.join(sorted(BATCHES))}")
    return BATCHES[name]
