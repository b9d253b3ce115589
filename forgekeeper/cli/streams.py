"""Standard output that reports lost output; standard error that neither fails nor blocks."""

from __future__ import annotations

import atexit
import errno
import io
import os
import sys
from contextlib import suppress
from typing import BinaryIO, NoReturn

from metrics.line_writer import LineWriter


class OutputLost(Exception):
    """Standard output accepts no more data.

    Not an `OSError`: rich and Typer would catch a broken pipe, and end the process in their own ways.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(os.strerror(error.errno) if error.errno else str(error))
        self.is_reader_closed = error.errno == errno.EPIPE
        """True if the reader closed the pipe, as `head` does when it has enough."""


class StandardOutput(io.TextIOWrapper):
    """Standard output; raises `OutputLost` if a write fails."""

    def write(self, text: str, /) -> int:
        """Write *text*, possibly into the buffer."""
        try:
            return super().write(text)
        except OSError as error:
            raise OutputLost(error) from error

    def flush(self) -> None:
        """Write the buffer."""
        try:
            super().flush()
        except OSError as error:
            raise OutputLost(error) from error


class StandardError(StandardOutput):
    """Standard error; failed writes are ignored and the work continues."""

    def __init__(self, buffer: BinaryIO, encoding: str, errors: str | None, *, line_buffering: bool) -> None:
        super().__init__(buffer, encoding, errors, line_buffering=line_buffering)
        self._writer = LineWriter(self.fileno())

    def write(self, text: str, /) -> int:
        """Write *text* if possible."""
        with suppress(OSError):
            self._writer.write(text.encode(self.encoding, self.errors or "strict"))
        return len(text)

    def flush(self) -> None:
        """Do nothing, as nothing is buffered."""


def install_streams() -> None:
    """Install both streams; a standard stream that is closed becomes /dev/null."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Otherwise the next file or connection would get this number and receive the output.
            os.open(os.devnull, os.O_RDWR)
    for name, number, kind in (("stdout", 1, StandardOutput), ("stderr", 2, StandardError)):
        stream = getattr(sys, name)
        if stream is None:  # closed when Python started
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
        elif type(stream) is io.TextIOWrapper:  # not a test's
            errors = "backslashreplace" if stream.errors == "strict" else stream.errors
            setattr(sys, name, kind(stream.buffer, stream.encoding, errors, line_buffering=stream.line_buffering))


def discard_output() -> None:
    """Redirect standard output to /dev/null, as Python would retry lost output at its exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def end_process(status: int) -> NoReturn:
    """End the process with *status*, after its exit handlers and a flush of standard output.

    Python's own exit is not used: threads of the object stores' client return to Python after their answer was read,
    and before 3.14 a thread that returns during the exit aborts the process (CPython's issue 87135). A thread that
    waits for a server would also delay that exit.
    """
    atexit._run_exitfuncs()  # noqa: SLF001, there is no public name
    with suppress(OutputLost, OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)
