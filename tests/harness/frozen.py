"""A PostgreSQL of a test's own, whose processes can be stopped: its kernel answers, and it does not."""

import os
import signal
from contextlib import contextmanager, suppress
from pathlib import Path

from demo.servers import postgres
from demo.servers.machine import Programs

GONE = (FileNotFoundError, ProcessLookupError)


class Server:
    """A running PostgreSQL in a site."""

    def __init__(self, site, **options):
        self._server = postgres.start(site, Programs.found(), options)
        self._server.wait_until_ready()
        self.url = postgres.url(site)

    def stop(self):
        _signal(self.processes(), signal.SIGCONT)
        self._server.stop()

    def processes(self):
        return [self._server.process.pid, *_descendants(self._server.process.pid)]

    def postmaster(self):
        """Name the one that accepts connections; a program that has made it somebody else may be its parent."""
        return next(pid for pid in self.processes() if _name(pid) == "postgres")

    @contextmanager
    def frozen(self, *pids):
        """Stop the server's processes, or only *pids*, while the block lasts."""
        pids = pids or self.processes()
        try:
            _signal(pids, signal.SIGSTOP)
            yield
        finally:
            _signal(pids, signal.SIGCONT)


def _signal(pids, number):
    """Signal those that are still there: the process of a connection that was just closed is about to end."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(pid):
    with suppress(*GONE):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            yield child
            yield from _descendants(child)


def _name(pid):
    with suppress(*GONE):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return None
