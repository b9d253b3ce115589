"""A primary of PostgreSQL and its synchronous standby, with a failover."""

import signal
import subprocess
from contextlib import closing, suppress

import psycopg2

from demo.servers import database_url, start_postgres
from demo.servers.machine import find_programs
from demo.servers.server import open_folders
from tests.harness.waiting import wait_until

LIMIT = 60.0
PRIMARY = {"wal_level": "replica", "max_wal_senders": "4", "synchronous_commit": "on"}
"""Options of the primary; without fsync, as nothing here loses power."""


class ReplicatedServers:
    """A primary and a standby; *url* names both."""

    def __init__(self, stack):
        self._programs = find_programs()
        first, second = (stack.enter_context(open_folders(None)) for _ in range(2))
        self._primary = start_postgres(first, self._programs, PRIMARY)
        stack.callback(self._primary.stop)
        self._primary.wait_until_ready()
        self._primary_url, self._standby_url = database_url(first), database_url(second)
        # The standby first: a client must not take the first host that accepts a connection.
        self.url = self._primary_url.replace(str(first.sockets), f"{second.sockets},{first.sockets}")
        self._copy_primary(second)
        self._standby = start_postgres(second, self._programs, PRIMARY)
        stack.callback(self._standby.stop)

    def _copy_primary(self, site):
        folder = site.folder / "postgres"
        copy = ["pg_basebackup", "-D", folder, "-d", self._primary_url, "-R", "--checkpoint=fast", "--no-sync"]
        command = [*self._programs.prefix, f"{self._programs.postgres}/{copy[0]}", *map(str, copy[1:])]
        subprocess.run(command, check=True, capture_output=True)

    def replicate_synchronously(self):
        """Let each commit on the primary wait until the standby has it."""
        self._ask(self._primary_url, "alter system set synchronous_standby_names = '*'")
        self._ask(self._primary_url, "select pg_reload_conf()")
        assert wait_until(self._is_synchronous, LIMIT)

    def _is_synchronous(self):
        return self._ask(self._primary_url, "select sync_state from pg_stat_replication") == ("sync",)

    def kill_primary(self):
        """Kill the primary with all its sessions."""
        self._primary.process.send_signal(signal.SIGQUIT)
        self._primary.process.wait(LIMIT)

    def promote_standby(self):
        """Make the standby the primary; return when it accepts writes."""
        self._ask(self._standby_url, "select pg_promote()")

    def ask(self, sql, values=None):
        """Execute SQL on the present primary, as a client that names both hosts; return the first row, if any."""
        return self._ask(f"{self.url}&target_session_attrs=read-write", sql, values)

    def _ask(self, url, sql, values=None):
        with closing(psycopg2.connect(url)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(sql, values)
                with suppress(psycopg2.ProgrammingError):
                    return cursor.fetchone()
