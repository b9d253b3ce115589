"""Settings of PostgreSQL that our statements and their time limits depend on, also through a pooler.

A pooler such as PgBouncer refuses or drops the options of a connection, and in transaction mode each transaction may
get another session.  Therefore a connection is opened without options.  Then it applies the settings: to its session,
or if a pooler answers to each of its transactions, in the request that begins the transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from psycopg2 import extensions

FIXED_SETTINGS = {
    "timezone": "UTC",
    "datestyle": "ISO, MDY",
    "intervalstyle": "postgres",
    "bytea_output": "hex",
    "standard_conforming_strings": "on",
    "extra_float_digits": "1",
    "quote_all_identifiers": "off",
    "transform_null_equals": "off",
    "array_nulls": "on",
    "xmloption": "content",
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    # A crash undoes a commit that is not on disk: the row would exist again, but its object or ref would be deleted.
    "synchronous_commit": "on",
    # With sequential scans disabled, PostgreSQL 17 and older overestimates the cost and compiles each chunk's
    # statement with JIT, for up to a second.
    "jit": "off",
}
"""Settings of every session, overriding the server's, the database's and the role's.  Our statements and the parsing
of their results depend on them."""
SEARCH_PATH = "search_path"
DEFAULT_PREFIX = "default_transaction_"
"""Beginning of the names of settings for later transactions, not for the present one."""
TIMEOUT_SETTINGS = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
APPLY_TO_SESSION = """
    with pooler as (select pg_backend_pid() <> %(told)s as answers)
    select pooler.answers, set_config(name, value, pooler.answers)
    from pooler, unnest(%(names)s, %(values)s) as setting (name, value)
"""
"""Apply settings to the session unless a pooler answers; then they end with this transaction."""
SELECT_SETTINGS = "select lower(name), setting from pg_settings where lower(name) = any(%(names)s)"


@dataclass(frozen=True)
class Timeouts:
    """Time limits of a session: connection, statement, lock, idle transaction, network."""

    connect: timedelta
    statement: timedelta
    lock: timedelta
    idle_in_transaction: timedelta
    network: timedelta


def list_settings(timeouts: Timeouts, search_path: str) -> dict[str, str]:
    """Return the settings of every session by name; times are in milliseconds."""
    times = (timeouts.statement, timeouts.lock, timeouts.idle_in_transaction)
    values = (str(to_milliseconds(time)) for time in times)
    return FIXED_SETTINGS | dict(zip(TIMEOUT_SETTINGS, values, strict=True)) | {SEARCH_PATH: search_path}


def to_milliseconds(duration: timedelta) -> int:
    """Return the duration in milliseconds, at least one: PostgreSQL takes 0 for no limit."""
    return max(1, round(duration.total_seconds() * 1000))


class Cursor(extensions.cursor):
    """A cursor of a `Connection`."""

    connection: Connection

    def execute(self, query: Any, vars: Any = None) -> None:  # noqa: A002, psycopg2's
        """Execute SQL.  Through a pooler, a request that begins a transaction also applies the settings."""
        connection = self.connection
        if connection.is_pooled and connection.is_idle():
            query = connection.transaction_prefix() + query
        super().execute(query, vars)


class Connection(extensions.connection):
    """A connection that knows its prepared statements, its settings, and whether its session is read-only."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cursor_factory = Cursor
        self.prepared: set[str] | None = set()
        """Names of prepared statements; None if nothing may be prepared (any more)."""
        self.is_read_only = False
        self.is_pooled = False
        """Whether a pooler answers: a later transaction may get another session, with other settings."""
        self._settings: dict[str, str] = {}
        self._prefix = ""

    def is_idle(self) -> bool:
        """Return whether the connection is usable and in no transaction."""
        return self.get_transaction_status() == extensions.TRANSACTION_STATUS_IDLE

    def apply_settings(self, settings: dict[str, str]) -> None:
        """Apply the settings to this connection, in one request.

        The process numbers that a pooler tells its clients differ from the numbers of its sessions.
        """
        self._settings = settings
        names, values = list(settings), list(settings.values())
        with self.cursor() as cursor:
            cursor.execute(APPLY_TO_SESSION, {"told": self.info.backend_pid, "names": names, "values": values})
            (self.is_pooled, *_) = cursor.fetchone() or (False,)
        if self.is_pooled:
            # A prepared statement stays in the session that prepared it.
            self.prepared = None
            self._prefix = "".join(_write_local_setting(*setting) for setting in settings.items())

    def find_lost_settings(self) -> dict[str, tuple[str, str]]:
        """Return the wanted and the present value of each setting that is not in force; times are in milliseconds."""
        wanted = {name: value for name, value in self._settings.items() if not name.startswith(DEFAULT_PREFIX)}
        with self.cursor() as cursor:
            cursor.execute(SELECT_SETTINGS, {"names": list(wanted)})
            found = dict(cursor.fetchall())
        return {
            name: (value, found[name])
            for name, value in wanted.items()
            if found[name].replace(" ", "") != value.replace(" ", "")
        }

    def transaction_prefix(self) -> str:
        """Return the SQL that applies the settings to the transaction that follows in the same request."""
        # A select would take a snapshot, and the mode of the transaction could not be changed any more.
        return self._prefix + ("set local transaction_read_only = on; " if self.is_read_only else "")


def _write_local_setting(name: str, value: str) -> str:
    """Return the SQL that applies a setting to the present transaction."""
    if name == SEARCH_PATH:  # a list of names, not one text
        return f"set local {name} = {value}; "
    name = name.removeprefix("default_") if name.startswith(DEFAULT_PREFIX) else name
    return f"set local {name} = '{value}'; "
