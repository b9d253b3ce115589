"""Standard output that reports when it takes no more, and standard error that neither fails nor waits then."""

from __future__ import annotations

import atexit
import errno
import io
import os
import sys
from contextlib import suppress
from typing import BinaryIO, NoReturn

from metrics.unread import LineWriter


class OutputLost(Exception):
    """Standard output takes no more.

    Not an `OSError`: rich and Typer would catch a broken pipe, and end the process in their own ways.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(os.strerror(error.errno) if error.errno else str(error))
        self.unread = error.errno == errno.EPIPE
        """Whether its reader has gone, as `head` does when it has seen enough."""


class Output(io.TextIOWrapper):
    """Standard output; raises `OutputLost` when it takes no more."""

    def write(self, text: str, /) -> int:
        """Write *text*, or some of it into the buffer."""
        try:
            return super().write(text)
        except OSError as error:
            raise OutputLost(error) from error

    def flush(self) -> None:
        """Write what is in the buffer."""
        try:
            super().flush()
        except OSError as error:
            raise OutputLost(error) from error


class Errors(Output):
    """Standard error; when it takes no more, the work goes on."""

    def __init__(self, buffer: BinaryIO, encoding: str, errors: str | None, *, line_buffering: bool) -> None:
        super().__init__(buffer, encoding, errors, line_buffering=line_buffering)
        self._writer = LineWriter(self.fileno())

    def write(self, text: str, /) -> int:
        """Write *text* if that is possible."""
        with suppress(OSError):
            self._writer.write(text.encode(self.encoding, self.errors or "strict"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: what is written is in no buffer."""


def prepare() -> None:
    """Give this process these two streams; one that it was started without becomes /dev/null."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Otherwise the next file or connection gets this number, and what is printed goes into it.
            os.open(os.devnull, os.O_RDWR)
    for name, number, kind in (("stdout", 1, Output), ("stderr", 2, Errors)):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when Python started
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
        elif type(stream) is io.TextIOWrapper:  # not a test's
            errors = "backslashreplace" if stream.errors == "strict" else stream.errors
            setattr(sys, name, kind(stream.buffer, stream.encoding, errors, line_buffering=stream.line_buffering))


def discard() -> None:
    """Forget what standard output has not taken: Python would try again when it ends, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def end(status: int) -> NoReturn:
    """End the process with *status*, after its exit handlers and with all that standard output takes.

    Not as Python ends it: the client for object stores has threads that come back to Python after their answer was
    read, and before 3.14 one that comes while Python ends aborts the process (CPython's issue 87135).  Nor does a
    thread that waits for a server hold up the end.
    """
    atexit._run_exitfuncs()  # noqa: SLF001, there is no public name
    with suppress(OutputLost, OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)
