"""The clients of one process: which servers it talks to, and for how long it waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import redis
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from forgekeeper.coordination.client import Client, load_scripts
from forgekeeper.database.sessions import Timeouts, open_pool
from forgekeeper.settings import Settings

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
    open_pool(url, limits, name=name, size=connections)
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
        # Each new connection would say CLIENT SETINFO and CLIENT MAINT_NOTIFICATIONS, which are refused to a user of
        # few rights, and Redis notes that.
        driver_info=None,
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
        # A command sent again after a lost reply may be done twice; a caller that may
        # repeat it does so.  The connection is left after each of these errors: a master
        # that has become a replica keeps its connections, and would say READONLY for ever.
        retry=Retry(NoBackoff(), 0, (redis.ConnectionError, redis.TimeoutError, redis.ResponseError)),
    )
