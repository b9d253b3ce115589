"""Writes to standard error that never block for long, even if nobody reads.

A terminal may also be stopped.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

WRITE_TIMEOUT_SECONDS = 0.1
"""Seconds that a write waits for a slow reader.

After a write that had to wait, later writes do not wait, until a write succeeds at once.
"""


class LineWriter:
    """Writes to a pipe, socket, terminal or file; drops data that cannot be written in time.

    Any number of threads may write.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._send: Callable[[bytes], int] = partial(os.write, fd)
        self._close: Callable[[], None] = lambda: None
        self._may_wait = True
        self._unwritten = b""
        # A signal may interrupt a write, and its handler may write, too.
        self._lock = threading.RLock()
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            connection = socket.socket(fileno=os.dup(fd))
            self._send = lambda data: connection.send(data, socket.MSG_DONTWAIT)
            self._close = connection.close
        elif stat.S_ISFIFO(mode) or os.isatty(fd):
            self._send = self._send_if_there_is_room
            # Other programs share this pipe and expect it to block, so O_NONBLOCK is set on a description of our own.
            with suppress(OSError):
                own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                self._send, self._close = partial(os.write, own), partial(os.close, own)

    def write(self, data: bytes) -> bool:
        """Write *data* whole and return True, or write nothing of it and return False.

        If the reader accepts only a part, the remainder precedes the next data, so that no line is torn.

        Raises `OSError` if nobody has the other end open, or the disk is full.
        """
        with self._lock:
            if self._unwritten:
                self._unwritten = self._unwritten[self._write_bytes(self._unwritten) :]
            if self._unwritten:
                return False
            written = self._write_bytes(data)
            self._unwritten = data[written:] if written else b""
            return written > 0

    def close(self) -> None:
        """Close our own description; the file itself stays open."""
        self._send = partial(os.write, -1)
        self._close()
        self._close = lambda: None

    def _write_bytes(self, data: bytes) -> int:
        """Write *data* until the reader blocks; return the number of written bytes."""
        total, waited = 0, False
        while total < len(data):
            try:
                total += self._send(data[total:])
            except BlockingIOError:
                waited = True
                if not self._may_wait or not self._is_writable(WRITE_TIMEOUT_SECONDS):
                    break
        self._may_wait = not waited
        return total

    def _is_writable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(seconds * 1000))

    def _send_if_there_is_room(self, data: bytes) -> int:
        if not self._is_writable(0):
            raise BlockingIOError
        return os.write(self._fd, data[: select.PIPE_BUF])
