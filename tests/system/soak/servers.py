"""PostgreSQL and Redis of a soak: frozen, restarted, and led back to older files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import redis

from demo.servers import database_url, redis_url, start_postgres
from demo.servers.machine import find_programs
from demo.servers.server import EmbeddedServer, open_folders, start_program
from tests.harness.waiting import wait_until
from tests.system.service import LIMIT

from . import rights
from .settings import SECRET


class Servers:
    """PostgreSQL and Redis as our own children, so that they can be started anew, also from older files."""

    def __init__(self, stack):
        # What has been committed must outlive PostgreSQL's sudden end, as it does wherever forgekeeper is used; and
        # a copy of its files is small.
        self._options = {
            "deadlock_timeout": "100ms",
            "synchronous_commit": "on",
            "max_wal_size": "64MB",
            "min_wal_size": "32MB",
        }
        self._programs = find_programs()
        self.site = stack.enter_context(open_folders(None))
        self._redis_folder, self._postgres_folder = self.site.folder / "redis", self.site.folder / "postgres"
        self.redis_url = redis_url(self.site)
        self._redis_binary = os.environ.get("SOAK_REDIS", self._programs.redis)
        self._redis = self._postgres = None
        stack.callback(self._stop)
        self._start_redis()
        self.database_url = database_url(self.site)
        self._start()

    def _stop(self):
        for server in (self._postgres, self._redis):
            if server is not None:
                server.stop()

    def _start_redis(self):
        """Start Redis with a log of its own, written to disk at every turn, that nobody shortens unasked."""
        self._redis_folder.mkdir(mode=0o700, exist_ok=True)
        options = {
            "port": "0",
            "unixsocket": str(self.site.sockets / "redis.sock"),
            "requirepass": SECRET,
            "dir": str(self._redis_folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "no",
            "auto-aof-rewrite-percentage": "0",
        }
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        # Not by commands: until they have come a server that is started anew would refuse everybody.
        arguments += [word for name, rules in rights.started_with(SECRET) for word in ("--user", name, *rules)]
        # Where a write would pass a limit it shall be told so, as it is on a full disk, instead of being killed.
        command = ["env", "--ignore-signal=XFSZ", self._redis_binary, *arguments]
        log = self.site.folder / "redis.log"
        process = start_program(command, self.site, log=log, death_signal=signal.SIGTERM)
        self._redis = EmbeddedServer("Redis", process, log, signal.SIGTERM)
        self._redis.wait_until_ready()

    @property
    def redis_process(self):
        return self._redis.process.pid

    @property
    def redis_log_size(self):
        """Return the size of what it writes to; newer ones have a folder of files."""
        return max(file.stat().st_size for file in self._redis_folder.rglob("*") if file.is_file())

    def shorten_redis_log(self):
        """Let Redis write its log anew, for it grows with every command."""
        with self.redis() as client:
            client.bgrewriteaof()
            wait_until(lambda: not _rewriting(client.info("persistence")), LIMIT)

    @property
    def processes(self):
        """Name both servers, without PostgreSQL's backends."""
        return [self.redis_process, self._postgres.process.pid]

    def freeze(self, server):
        """Stop Redis, or PostgreSQL with all its backends; return who was stopped."""
        pids = [self.redis_process if server == "redis" else self._postgres.process.pid]
        os.kill(pids[0], signal.SIGSTOP)
        if server == "postgres":
            # From now on there is nobody to start another.
            master = pids[0]
            pids += map(int, Path(f"/proc/{master}/task/{master}/children").read_text().split())
            for pid in pids[1:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        return pids

    def thaw(self, pids):
        """Let those go on."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _start(self):
        self._postgres = start_postgres(self.site, self._programs, self._options)
        self._postgres.wait_until_ready()

    def restart_postgres(self, number, *, between=lambda: None):
        """End PostgreSQL with that signal (SIGINT: fast, SIGQUIT: immediate) and start it again."""
        self._postgres.process.send_signal(number)
        try:
            self._postgres.process.wait(LIMIT)
        finally:
            self._postgres.stop()
            between()
            self._start()

    def keep_postgres(self):
        """Take PostgreSQL down for a copy of its files."""
        kept = self._postgres_folder.with_suffix(".kept")
        self.restart_postgres(signal.SIGINT, between=lambda: _copy(self._postgres_folder, kept))

    def return_postgres(self):
        """Let PostgreSQL, ended at once, go back to the copy."""
        self.restart_postgres(signal.SIGQUIT, between=lambda: _put_back(self._postgres_folder))

    def keep_redis(self):
        """Copy Redis's log as far as it is written, while Redis is stopped.

        Redis loads a log that ends in the middle of a command. It does not load a copy that was made while it
        truncated its log and wrote on: such a copy has wrong bytes in the middle.
        """
        pid = self.redis_process
        os.kill(pid, signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            _copy(self._redis_folder, self._redis_folder.with_suffix(".kept"))
        finally:
            os.kill(pid, signal.SIGCONT)

    def return_redis(self):
        """Let Redis, killed, go back to the copy."""
        self._redis.process.kill()
        self._redis.stop()
        _put_back(self._redis_folder)
        self._start_redis()

    def redis(self, **options):
        return redis.Redis.from_url(self.redis_url, password=SECRET, **{"socket_timeout": LIMIT, **options})


def _rewriting(info):
    return info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"]


def _copy(folder, kept):
    shutil.rmtree(kept, ignore_errors=True)
    # Copies belong to whom the files belong, which may be another user.
    subprocess.run(["cp", "-a", str(folder), str(kept)], check=True)


def _put_back(folder):
    shutil.rmtree(folder)
    folder.with_suffix(".kept").rename(folder)
