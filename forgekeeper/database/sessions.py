"""Sessions of PostgreSQL: how they are opened, how long they wait for what, and how they are pooled."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from json import loads
from typing import Any

import peewee as pw
from playhouse.pool import PooledPostgresqlDatabase
from psycopg2.extensions import PYDATETIMETZ, connection, cursor, new_type, parse_dsn, register_type
from psycopg2.extras import register_default_jsonb

TIMESTAMPTZ = 1184
OF_ALL = "-c timezone=UTC -c datestyle=ISO"
"""Of every session: psycopg2 would ask for this date style with a statement of its own."""
FIRST_INSTANT, LAST_INSTANT = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Timeouts:
    """How long a session waits, for what."""

    connect: timedelta
    statement: timedelta
    lock: timedelta
    idle_in_transaction: timedelta
    network: timedelta


class Connection(connection):
    """A connection that knows what is prepared on it, and whether its session may only read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prepared: set[str] | None = set()
        """Names of prepared statements; None where nothing is to be prepared any more."""
        self.reads_only = False


class Database(pw.PostgresqlDatabase):
    """A database whose instants and documents Python can always hold.

    Each thread has a connection of its own, so peewee's lock around connecting guards nothing: with it, a server that
    does not answer would stop all threads for the sum of their time-outs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = nullcontext()

    def _connect(self) -> Any:
        made = super()._connect()  # type: ignore[misc]
        register_type(INSTANT, made)
        register_default_jsonb(made, loads=_document)
        return made

    def manual_close(self) -> None:
        """Throw the connection away."""
        self.close()


class Pool(PooledPostgresqlDatabase, Database):  # type: ignore[misc]  # playhouse has no types
    """A pool of such a database's connections."""


def opened(url: str, timeouts: Timeouts, *, name: str, size: int | None) -> Any:
    """Make a pool of at most *size* connections, or where that is None, of one for each thread."""
    made: Any = Database(None, autoconnect=False)
    if size is not None:
        made = Pool(None, max_connections=size, timeout=timeouts.connect.total_seconds(), autoconnect=False)
    parameters = parse_dsn(url)
    limits = {
        "statement_timeout": timeouts.statement,
        "lock_timeout": timeouts.lock,
        "idle_in_transaction_session_timeout": timeouts.idle_in_transaction,
    }
    quarter = max(1, round(timeouts.network.total_seconds() / 4))
    options = [parameters.pop("options", ""), *(f"-c {key}={_milliseconds(of)}" for key, of in limits.items()), OF_ALL]
    made.init(
        parameters.pop("dbname", None) or parameters.get("user") or "postgres",
        # In UTF-8 it is PostgreSQL that refuses what is no text, within the statement: nothing is done by then.
        **{"application_name": f"forgekeeper {name}", **parameters, "client_encoding": "UTF8"},
        connect_timeout=max(2, round(timeouts.connect.total_seconds())),  # libpq takes 1 for 2
        tcp_user_timeout=_milliseconds(timeouts.network),
        keepalives_idle=quarter,
        keepalives_interval=quarter,
        keepalives_count=3,
        connection_factory=Connection,
        options=" ".join(options).strip(),
    )
    return made


def _milliseconds(duration: timedelta) -> int:
    return max(1, round(duration.total_seconds() * 1000))


def _instant(value: str | bytes | None, of: cursor) -> datetime | None:
    """Read an instant; one that Python does not reach is the first or the last that it does."""
    try:
        instant: datetime | None = PYDATETIMETZ(value, of)
    except (ValueError, OverflowError):
        assert isinstance(value, str)
        return LAST_INSTANT if "BC" not in value else FIRST_INSTANT
    return instant


def _document(text: str) -> Any:
    """Read a JSON document; None for one that is nested deeper than Python can follow, or has longer numbers."""
    try:
        return loads(text)
    except (ValueError, RecursionError):
        return None


INSTANT = new_type((TIMESTAMPTZ,), "INSTANT", _instant)
