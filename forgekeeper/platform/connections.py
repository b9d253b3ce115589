"""The clients of one process: which servers it talks to, for how long it waits for them, and its scripts in Redis.

A batch that is asked what goes may only read by them.  The Lua scripts that a package brings are its claims, and may
run: each is one atomic step on the server.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.commands import READ_COMMANDS
from redis.commands.core import Script
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from forgekeeper.platform.database.sessions import Timeouts, engine, insist, open_pool
from forgekeeper.platform.settings import Settings

READS = READ_COMMANDS | {"INFO", "MULTI", "OBJECT", "PING", "TIME"}
"""Commands that change nothing."""
FOLDERS: list[Traversable] = []
"""Where scripts lie; each is known by its name alone."""
asked: ContextVar[bool] = ContextVar("asked", default=True)
"""Whether this thread asks Redis anything: where it does not, each command fails at once."""


class _Guarded:
    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command; raise `WritesByItself` for what a batch may not, `ConnectionError` unless it is `asked`."""
        if not asked.get():
            raise redis.ConnectionError("it is not asked any more")
        name = str(args[0]).split()[0].upper()
        if name not in READS:
            insist(f"by Redis's {name}")
        return super().execute_command(*args, **options)  # type: ignore[misc]


class _Pipeline(_Guarded, Pipeline):
    pass


class Client(_Guarded, redis.Redis):
    """The client of a process; *settings* are those with which it was connected."""

    settings: Settings | None = None

    def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> Pipeline:  # noqa: FBT002, Redis's
        """Return several commands in one request, of which each is looked at."""
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


client = Client()
"""The process's Redis, pointing nowhere in particular until `connect`."""


@dataclass(frozen=True)
class Limits(Timeouts):
    """How long a process waits for its servers."""

    redis: timedelta

    @classmethod
    def of_worker(cls, settings: Settings) -> Limits:
        """Let a statement take long: each run has a budget of its own."""
        return cls(
            connect=settings.database_connect_timeout,
            statement=settings.database_statement_timeout,
            lock=settings.database_lock_timeout,
            idle_in_transaction=settings.database_idle_timeout,
            network=settings.database_network_timeout,
            redis=settings.redis_timeout,
        )

    @classmethod
    def of_scheduler(cls, settings: Settings) -> Limits:
        """Be brief: a server that hangs must not cost the next tick."""
        brief = settings.scheduler_timeout
        return cls(brief, brief, brief, brief, brief, brief)


def identity() -> str:
    """Name this process as the ledger, the broker and the logs do: its host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


def connect(
    settings: Settings, limits: Limits, *, name: str, connections: int | None, redis_needed: bool = True
) -> None:
    """Point models and Redis at the servers that *settings* name; nothing connects yet.

    *connections* bounds the pool of database connections; None gives each thread one of
    its own.  Called in each process, after the fork.  Raises `SettingsError` when a URL
    is missing; that of Redis may be where *redis_needed* is False, and then nothing may use it.
    Raises `OSError` where a script for Redis cannot be read: it would be missing later, in the middle of something.
    """
    url = settings.require_database()
    redis_url = settings.require_redis() if redis_needed or settings.redis_url else None
    client.settings = settings
    open_pool(url, limits, name=name, size=connections, schemas=(settings.own_schema, settings.forge_schema))
    if redis_url is None:
        return
    load_scripts()
    patience = limits.redis.total_seconds()
    client.connection_pool = redis.BlockingConnectionPool.from_url(
        redis_url,
        timeout=patience,
        socket_timeout=patience,
        socket_connect_timeout=patience,
        health_check_interval=30,
        # Older ones write numbers as text.
        protocol=3,
        # Each new connection would say CLIENT SETINFO and CLIENT MAINT_NOTIFICATIONS, which are refused to a user of
        # few rights, and Redis notes that.
        driver_info=None,
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
        # A command sent again after a lost reply may be done twice; a caller that may
        # repeat it does so.  The connection is left after each of these errors: a master
        # that has become a replica keeps its connections, and would say READONLY for ever.
        retry=Retry(NoBackoff(), 0, (redis.ConnectionError, redis.TimeoutError, redis.ResponseError)),
    )


def add_scripts(package: str) -> None:
    """Add the scripts in the folder `lua` of *package*, a document's."""
    folder = files(package) / "lua"
    if folder not in FOLDERS:
        FOLDERS.append(folder)


def load_scripts() -> None:
    """Read all scripts, which a process does when it starts: later there may be no descriptor, or another version.

    Raises `OSError` when one cannot be read.
    """
    for folder in FOLDERS:
        for file in folder.iterdir():
            if file.name.endswith(".lua"):
                _script(file.name.removesuffix(".lua"))


def call(client: redis.Redis, name: str, *, keys: Sequence[str | bytes], args: list[Any]) -> Any:
    """Run the script *name* on *client*, also on a server that has forgotten it.  Raises `redis.RedisError`."""
    with engine():
        return _script(name)(keys=keys, args=args, client=client)


@cache
def _script(name: str) -> Script:
    file = next(file for folder in FOLDERS if (file := folder / f"{name}.lua").is_file())
    return redis.Redis().register_script(file.read_text(encoding="utf-8"))
