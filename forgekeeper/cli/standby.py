"""Warnings about a missing synchronous standby, which makes each commit wait.

A commit that waits is already written on the primary, but invisible to others, and its locks are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import peewee as pw
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper.cli.terminal import err
from forgekeeper.platform.database import database, release_connection
from metrics.threads import DaemonThread

WARN_AFTER_SECONDS = 3.0
"""Seconds that a command may wait before it prints the reason."""
# By name: through a pooler, each transaction may have another session.
FIND_WAIT = """
    select true from pg_stat_activity
    where application_name = current_setting('application_name') and wait_event = 'SyncRep'
"""
SHOW_STANDBY_NAMES = "select current_setting('synchronous_standby_names')"
FIND_NO_STANDBY = f"""
    select ({SHOW_STANDBY_NAMES}) <> ''
        and not exists (select from pg_stat_replication where sync_state in ('sync', 'quorum'))
"""
WAITING_SENTENCE = (
    "PostgreSQL waits for a synchronous standby, and none answers (synchronous_standby_names = {}): the command"
    " continues when a standby answers, or when you set synchronous_standby_names to '' and reload the server"
)
NOT_REPLICATED_SENTENCE = (
    "the hold is in force, but no synchronous standby has received it: check it after a failover, which may lose it"
)


@contextmanager
def warn_while_waiting() -> Iterator[None]:
    """Print a warning once if a session of this command waits for a standby inside the block."""
    done = threading.Event()
    DaemonThread(lambda: _watch_sessions(done), "standby").start()
    try:
        yield
    finally:
        done.set()


def _watch_sessions(done: threading.Event) -> None:
    while not done.wait(WARN_AFTER_SECONDS):
        with suppress(pw.PeeweeException, MaxConnectionsExceeded):
            try:
                database.connect()
                if database.execute_sql(FIND_WAIT).fetchone():
                    (names,) = database.execute_sql(SHOW_STANDBY_NAMES).fetchone()
                    err.print(WAITING_SENTENCE.format(names))
                    return
            finally:
                release_connection()


def commit_without_standby() -> None:
    """Commit this transaction without waiting for a standby.

    A pause or stop must work at once, and can be repeated.
    """
    database.execute_sql("set local synchronous_commit = local")


def describe_missing_standby() -> str | None:
    """Return a warning if no synchronous standby has received the commit."""
    (missing,) = database.execute_sql(FIND_NO_STANDBY).fetchone()
    return NOT_REPLICATED_SENTENCE if missing else None
