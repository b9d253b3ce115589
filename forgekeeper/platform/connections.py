"""The clients of one process: its servers, its timeouts, and its Lua scripts in Redis.

A batch that is asked for its answer may only read with them.  Lua scripts of packages may run: they are claims, each an
atomic step on the server.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from hashlib import sha1
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.commands import READ_COMMANDS
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from forgekeeper.platform.database.session_settings import Timeouts
from forgekeeper.platform.database.sessions import engine_step, open_pool, require_engine
from forgekeeper.platform.redis_connections import open_connections
from forgekeeper.platform.settings import Settings

READ_ONLY_COMMANDS = READ_COMMANDS | {"INFO", "MULTI", "OBJECT", "PING", "TIME"}
"""Commands that only read."""
script_folders: list[Traversable] = []
"""Folders of Lua scripts.  Names of scripts are unique across the folders."""
may_send_to_redis: ContextVar[bool] = ContextVar("may_send_to_redis", default=True)
"""Whether this thread may send commands to Redis; if not, each command fails at once."""


class _Pipeline(Pipeline):
    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Collect a command."""
        _require_permission(args[0])
        return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


class _PostponedCommands(threading.local):
    """The commands that a thread's next request sends first."""

    def __init__(self) -> None:
        self._commands: list[tuple[Any, ...]] = []

    def add(self, command: tuple[Any, ...]) -> None:
        self._commands.append(command)

    def take(self) -> list[tuple[Any, ...]]:
        found, self._commands = self._commands, []
        return found


class RedisClient(redis.Redis):
    """The client of a process; *settings* are the settings of its connection.

    A command takes a third of redis-py's processor time: redis-py prepares to repeat each command and measures it.
    """

    settings: Settings | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._postponed = _PostponedCommands()

    def postpone(self, *command: Any) -> None:
        """Send the command before this thread's next command, in one request.

        If that request fails, the postponed command may be lost.
        """
        self._postponed.add(command)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command, once, and return its reply.

        Raises `WritesByItself` if a batch may not send it, and `ConnectionError` if `may_send_to_redis` is False.
        """
        _require_permission(args[0])
        pool, commands = self.connection_pool, [*self._postponed.take(), args]
        connection: Any = pool.get_connection()
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            for _ in commands[1:]:
                connection.read_response()
            return self.parse_response(connection, args[0], **options)  # type: ignore[no-untyped-call]
        except BaseException:
            # An interrupt leaves a reply unread.  A master that became a replica would answer READONLY for ever.
            connection.disconnect()
            raise
        finally:
            pool.release(connection)

    def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> Pipeline:  # noqa: FBT002, Redis's
        """Return a pipeline, which checks each of its commands."""
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


def _require_permission(command: object) -> None:
    """Raise if this thread may not send the *command* now; see `RedisClient.execute_command`."""
    if not may_send_to_redis.get():
        raise redis.ConnectionError("it is not asked again after an error")
    name = str(command).split()[0].upper()
    if name not in READ_ONLY_COMMANDS:
        require_engine(f"with Redis's {name}")


client = RedisClient()
"""The process's client of Redis; `connect` sets its server."""


@dataclass(frozen=True)
class ServerTimeouts(Timeouts):
    """Time limits of a process for PostgreSQL and Redis."""

    redis: timedelta

    @classmethod
    def for_worker(cls, settings: Settings) -> ServerTimeouts:
        """Return the limits of a worker; a statement may be slow, as each run has its own budget."""
        return cls(
            connect=settings.database_connect_timeout,
            statement=settings.database_statement_timeout,
            lock=settings.database_lock_timeout,
            idle_in_transaction=settings.database_idle_timeout,
            network=settings.database_network_timeout,
            redis=settings.redis_timeout,
        )

    @classmethod
    def for_scheduler(cls, settings: Settings) -> ServerTimeouts:
        """Return the short limits of a scheduler: a hanging server must not delay the next tick."""
        brief = settings.scheduler_timeout
        return cls(brief, brief, brief, brief, brief, brief)


def process_identity() -> str:
    """Return the name of this process in the ledger, the broker and the logs: ``host:pid``."""
    return f"{socket.gethostname()}:{os.getpid()}"


def configure_clients(
    settings: Settings, timeouts: ServerTimeouts, *, name: str, connections: int | None, redis_needed: bool = True
) -> None:
    """Point models and Redis at the servers in *settings*; nothing connects yet.

    *connections* limits the pool of database connections; None gives each thread its own connection.  Each process
    calls this after the fork.  Raises `SettingsError` if a URL is missing; the URL of Redis may be missing if
    *redis_needed* is False, and then nothing may use Redis.  Raises `OSError` if a Lua script cannot be read: it would
    fail later, during work.
    """
    url = settings.require_database()
    redis_url = settings.require_redis() if redis_needed or settings.redis_url else None
    client.settings = settings
    open_pool(url, timeouts, name=name, size=connections, schemas=(settings.own_schema, settings.forge_schema))
    if redis_url is None:
        return
    load_scripts()
    patience = timeouts.redis.total_seconds()
    client.connection_pool = open_connections(
        redis_url,
        socket_timeout=patience,
        socket_connect_timeout=patience,
        health_check_interval=30,
        # Older protocols return numbers as text.
        protocol=3,
        # Each new connection would send CLIENT SETINFO and CLIENT MAINT_NOTIFICATIONS.  Redis refuses them to a user
        # with few rights, and logs that.
        driver_info=None,
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
        # No retries: a command that is sent again after a lost reply may be executed twice.  Callers retry commands
        # that are safe to repeat.  In a pipeline, these errors close the connection.
        retry=Retry(NoBackoff(), 0, (redis.ConnectionError, redis.TimeoutError, redis.ResponseError)),
    )


def add_scripts(package: str) -> None:
    """Add the scripts in the folder `lua` of *package*."""
    folder = files(package) / "lua"
    if folder not in script_folders:
        script_folders.append(folder)


def load_scripts() -> None:
    """Read all scripts at start: later a file may have changed, or no descriptor may be free.

    Raises `OSError` if a script cannot be read.
    """
    for folder in script_folders:
        for file in folder.iterdir():
            if file.name.endswith(".lua"):
                _read_script(file.name.removesuffix(".lua"))


def run_script(client: redis.Redis, name: str, *, keys: Sequence[str | bytes], args: list[Any]) -> Any:
    """Run the script *name* on *client*; if the server does not know the script, load it.

    Raises `redis.RedisError`.
    """
    # redis-py's own object for scripts takes a third longer for each call.
    text, digest = _read_script(name)
    command = "EVALSHA", digest, len(keys), *keys, *args
    with engine_step():
        try:
            return client.execute_command(*command)  # type: ignore[no-untyped-call]
        except redis.exceptions.NoScriptError:
            client.script_load(text)
            return client.execute_command(*command)  # type: ignore[no-untyped-call]


@cache
def _read_script(name: str) -> tuple[str, str]:
    """Return a script and its SHA-1, by which Redis knows it."""
    file = next(file for folder in script_folders if (file := folder / f"{name}.lua").is_file())
    text = file.read_text(encoding="utf-8")
    return text, sha1(text.encode(), usedforsecurity=False).hexdigest()
