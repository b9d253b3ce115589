"""Ask Redis as long as it answers, and go on without it where it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import redis

from forgekeeper.cli.failures import sentence
from forgekeeper.connections import Limits, client
from forgekeeper.database.installation import Installation
from forgekeeper.installation.agreement import claim_by_writing, conflict, owner
from forgekeeper.settings import Settings

TIMEOUT = timedelta(seconds=0.7)
"""How long one question waits for Redis: a command has to answer within two seconds."""

Answer = TypeVar("Answer")


def limits(settings: Settings) -> Limits:
    """Wait for PostgreSQL as a worker does, and for Redis no longer than `TIMEOUT`."""
    usual = Limits.of_worker(settings)
    return replace(usual, redis=min(usual.redis, TIMEOUT))


class Refusing(redis.ConnectionPool):
    """A pool without connections: what asks Redis fails at once."""

    def get_connection(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raise `redis.ConnectionError`."""
        raise redis.ConnectionError("it is not asked any more")


class Looks:
    """Looks into Redis; *trouble* says what is wrong with it, None as long as nothing is.

    Once Redis does not answer, or is another installation's, this process asks it nothing more.
    """

    def __init__(self) -> None:
        """Ask whether Redis answers, is this installation's, and takes writes."""
        self.trouble: str | None = None
        ours = Installation.known()
        try:
            theirs = owner(client)
            if theirs not in (None, ours):
                self.trouble = conflict(str(ours), str(theirs))
                client.connection_pool = Refusing()
            elif theirs is not None:
                claim_by_writing(client, theirs)
        except redis.RedisError as error:
            self._fail(error)

    def ask(self, look: Callable[[], Answer]) -> Answer | None:
        """Return what *look* finds; None where that needs Redis, and Redis fails."""
        try:
            return look()
        except redis.RedisError as error:
            self._fail(error)
            return None

    def _fail(self, error: redis.RedisError) -> None:
        self.trouble = self.trouble or sentence(error)
        if isinstance(error, redis.ConnectionError | redis.TimeoutError):
            client.connection_pool = Refusing()
