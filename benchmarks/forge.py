"""A migrated database for a benchmark, with the example forge's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from psycopg2.extensions import make_dsn
from pydantic import SecretStr

from demo.servers import Servers
from demo.tables import make_tables
from forgekeeper.delivery.boot import settings_class
from forgekeeper.delivery.broker import load_batches
from forgekeeper.platform import migrations
from forgekeeper.platform.connections import ServerTimeouts, client, configure_clients
from forgekeeper.platform.database import database
from forgekeeper.platform.settings import Settings
from metrics import logs

MADE = "select exists (select from pg_database where datname = %s)"


@contextmanager
def database_of(
    servers: Servers, name: str, *, make: Callable[[Any], None] = make_tables, **options: Any
) -> Iterator[Settings]:
    """Connect this process to the database *name* and yield its settings.

    A missing database is created, with the tables of the forge.
    """
    load_batches()
    _connect(servers.database_url, servers.redis_url)
    with database.connection_context():
        made = database.execute_sql(MADE, (name,)).fetchone()[0]
        if not made:
            database.execute_sql(f"create database {name}")
    database.close_all()
    settings = _connect(make_dsn(servers.database_url, dbname=name), servers.redis_url, **options)
    logs.configure(settings.log_format, "ERROR")
    try:
        with database.connection_context():
            if not made:
                migrations.apply_pending(database.obj)
                make(database.obj)
            yield settings
    finally:
        database.close_all()
        client.connection_pool.disconnect()


def _connect(url: str, redis_url: str, **options: Any) -> Settings:
    # Autovacuum may still work on the previous round's rows, and blocks TRUNCATE for over a second.
    patient = {"database_lock_timeout": timedelta(minutes=1)} | options
    settings = settings_class()(database_url=SecretStr(url), redis_url=SecretStr(redis_url), **patient)
    configure_clients(settings, ServerTimeouts.for_worker(settings), name="benchmark", connections=8)
    return settings
