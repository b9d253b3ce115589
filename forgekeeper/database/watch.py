"""Who waits for the database, and for how long: a server that hangs is given up by its clients.

The kernel of a frozen server goes on to acknowledge what it is sent, and a frozen server ends no statement by its own
timeout: neither keepalives nor ``statement_timeout`` notice.  So a thread of each process looks after all statements
that wait.  It closes the connection of one that will not be answered, from below: it shuts the socket down, which wakes
the thread that waits in libpq, and which is safe from another thread.
"""

from __future__ import annotations

import select
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from math import inf
from time import monotonic
from typing import Any

from psycopg2 import Error, OperationalError
from psycopg2.extensions import cursor

from forgekeeper.database.prepared import Preparable, Prepared
from metrics.threads import Thread

LOOK = 0.25
"""Seconds between two looks at those who wait."""
LATE = 2.0
"""A look that comes so many seconds after the last one says that we were stopped, and nothing of the server."""
MARGIN = 1.0
"""Seconds that an answer may need beyond the time after which a living server gives the statement up."""
ASKS = 3
"""How often a silent server is asked for a sign of life before it is given up."""
IDLE = 10.0
"""Seconds without a statement after which the thread ends, until there is one."""

START = 1.0
"""Seconds within which a thread says that it runs, or is not waited for."""

_most: ContextVar[timedelta | None] = ContextVar("most", default=None)


class Wait:
    """A statement that waits for its answer, for *most* seconds at most; *given_up* after so many."""

    __slots__ = ("given_up", "most", "since")

    def __init__(self, since: float, most: float) -> None:
        self.since = since
        self.most = most
        self.given_up: float | None = None


class Watch:
    """Gives up the statements of one process on one database.

    A statement fails when nobody in this process has had an answer for *network*, although the server is asked for a
    sign of life meanwhile.  One that is slow on a server that lives may take *statement*, after which the server itself
    ends it, and a margin.  *ask* opens a connection, has a statement answered and closes it; it runs in a thread.
    """

    def __init__(self, *, statement: timedelta, network: timedelta, ask: Callable[[], None]) -> None:
        self._statement = statement.total_seconds() + MARGIN
        self.network = network
        self._silence = network.total_seconds()
        self._ask = ask
        # Changed by single operations on a dict, by many threads: an interrupt may come between any two lines here,
        # and would leave a lock held for ever.
        self._waiting: dict[Connection, Wait] = {}
        self._heard = self._asked = -inf
        self._thread: threading.Thread | None = None

    def begin(self, waiting: Connection) -> Wait:
        """Note that a statement of this connection waits from now on."""
        most = _most.get()
        wait = Wait(monotonic(), self._statement if most is None else most.total_seconds())
        self._waiting[waiting] = wait
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._start()
        return wait

    def end(self, waiting: Connection, *, answered: bool) -> None:
        """Note that it does not wait any more; an answer, also an error, is a sign of life."""
        self._waiting.pop(waiting, None)
        if answered:
            self.hear()

    def hear(self) -> None:
        """Note a sign of life."""
        self._heard = monotonic()

    def _start(self) -> None:
        self._thread = Thread(self._run, "database watch", timeout=START)
        # A process without room for a thread goes on, and the next statement tries again.
        with suppress(RuntimeError, MemoryError):
            self._thread.start()

    def _run(self) -> None:
        last = busy = monotonic()
        pause = threading.Event()
        while True:
            pause.wait(LOOK)
            last, since = monotonic(), last
            if last - since > LATE:
                self._count_anew(last)
            self._look(last)
            busy = last if self._waiting else busy
            if last - busy > IDLE:
                self._thread = None
                # Whoever begins a statement does so first and looks for the thread then.
                if not self._waiting:
                    return
                self._thread = threading.current_thread()

    def _count_anew(self, now: float) -> None:
        for wait in list(self._waiting.values()):
            wait.since = now

    def _look(self, now: float) -> None:
        for waiting, wait in list(self._waiting.items()):
            waited, silent = now - wait.since, now - max(wait.since, self._heard)
            if waited > wait.most or silent > self._silence:
                if not waiting.has_answer():
                    wait.given_up = waited
                    waiting.shut_down()
            elif silent > self._silence / ASKS and now - self._asked > self._silence / ASKS:
                self._asked = now
                with suppress(RuntimeError, MemoryError):
                    Thread(self._listen, "database asked", timeout=START).start()

    def _listen(self) -> None:
        with suppress(Error):
            self._ask()


class Connection(Preparable):
    """A connection whose statements are watched once `guard` was called.

    While its session *reads_only*, nobody else may have it.
    """

    watch: Watch | None = None
    reads_only = False

    def guard(self, watch: Watch) -> None:
        """Let *watch* look after the statements from now on."""
        # A descriptor of our own: libpq's may be closed, and its number given to another, when it is looked for.
        try:
            self._line = socket.fromfd(self.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            self.close()
            raise OperationalError(f"no descriptor is left for a connection: {error}") from error
        self._let_go = weakref.finalize(self, self._line.close)
        self.watch = watch

    def close(self) -> None:
        """Close the connection; nothing is waited for."""
        super().close()
        if self.watch is not None:
            self._let_go()

    def has_answer(self) -> bool:
        """Say whether something has come that the waiting thread has not read yet."""
        said = select.poll()
        try:
            said.register(self._line, select.POLLIN)
            return bool(said.poll(0))
        except (OSError, ValueError):
            return False  # closed meanwhile

    def shut_down(self) -> None:
        """End the connection under whoever waits for it."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)


class Cursor(cursor):
    """A cursor whose statements end, with an answer or without."""

    def execute(self, query: Any, vars: Any = None) -> None:  # noqa: A002, psycopg2's name
        """Execute a statement; raise `psycopg2.OperationalError` when the database does not answer."""
        if isinstance(query, Prepared) and isinstance(self.connection, Preparable):
            return query.execute(self.connection, self._execute, vars)
        return self._execute(query, vars)

    def _execute(self, query: Any, vars: Any) -> None:  # noqa: A002
        waiting = self.connection
        assert isinstance(waiting, Connection)
        watch = waiting.watch
        if watch is None:
            return super().execute(query, vars)
        wait, answered = watch.begin(waiting), False
        try:
            super().execute(query, vars)
            answered = True
        except Error as error:
            answered = error.pgcode is not None
            if wait.given_up is not None and not answered:
                raise OperationalError(f"the database has not answered for {wait.given_up:.0f} s") from error
            raise
        finally:
            watch.end(waiting, answered=answered)


@contextmanager
def answered_within(most: timedelta) -> Iterator[None]:
    """Let this thread's statements wait for *most* each, however long the server would work on them."""
    token = _most.set(most)
    try:
        yield
    finally:
        _most.reset(token)
