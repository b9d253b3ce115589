"""A command's connection to the servers, and what it says when they are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import peewee as pw
import redis

import migrations
from cli.console import Problem, wrong_use
from metrics import logs
from metrics.redaction import clean
from models import database, release, sqlstate
from settings import Settings
from settings.reading import load
from workers import BATCHES, Batch
from workers.clients import Limits, client, connect

UNDEFINED_TABLE = "42P01"


def configured() -> Settings:
    """Load the settings and set the logs up as they say."""
    settings = load()
    logs.configure(settings.log_format, settings.log_level)
    return settings


@contextmanager
def connected(
    name: str, *, migrated: bool = True, limits: Callable[[Settings], Limits] = Limits.of_worker
) -> Iterator[Settings]:
    """Connect this command to PostgreSQL; say in a sentence what is missing.

    Unless *migrated* is False the schema must be up to date.  *limits* says how patient the command is.
    """
    settings = configured()
    connect(settings, limits(settings), name=name, connections=3)
    with explained():
        database.connect()
        try:
            if migrated and (pending := migrations.pending(database.obj)):
                raise Problem(f"the database lacks {len(pending)} migration(s): run `forgekeeper migrate`")
            yield settings
        finally:
            release()


@contextmanager
def explained() -> Iterator[None]:
    """Turn the errors of servers into sentences."""
    try:
        yield
    except (pw.OperationalError, pw.InterfaceError) as error:
        raise Problem(f"cannot use PostgreSQL: {_first_line(error)}; check FORGEKEEPER_DATABASE_URL") from error
    except pw.ProgrammingError as error:
        if sqlstate(error) != UNDEFINED_TABLE:
            raise
        raise Problem(f"the database lacks a table: {_first_line(error)}; run `forgekeeper check`") from error
    except redis.RedisError as error:
        raise Problem(f"cannot use Redis: {_first_line(error)}; check FORGEKEEPER_REDIS_URL") from error


def require_redis() -> None:
    """Make sure that Redis answers before anything is changed."""
    client.ping()


def batch_named(name: str) -> Batch:
    """Return the batch; refuse a name that is none."""
    if name not in BATCHES:
        wrong_use(f"there is no batch {name!r}; there are: {', '.join(sorted(BATCHES))}")
    return BATCHES[name]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return clean(lines[0].rstrip("."))
