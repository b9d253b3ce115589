"""Standard output and standard error that say, or bear, that nobody takes what is written to them.

Imported before everything else: it needs the standard library's lightest modules and nothing more.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


class OutputLost(Exception):
    """Standard output takes no more.

    No `OSError`: libraries take a broken pipe into their own hands, and end the process as they like.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(os.strerror(error.errno) if error.errno else str(error))
        self.unread = error.errno == errno.EPIPE
        """Whether its reader has gone, as `head` does when it has seen enough."""


class Output(io.TextIOWrapper):
    """Standard output; raises `OutputLost` when it takes no more."""

    def write(self, text: str, /) -> int:
        """Write *text*, or some of it into the buffer."""
        with _lost():
            return super().write(text)

    def flush(self) -> None:
        """Write what is in the buffer."""
        with _lost():
            super().flush()


class Errors(io.TextIOWrapper):
    """Standard error; where it takes no more there is nobody left to tell, and the work goes on."""

    def write(self, text: str, /) -> int:
        """Write *text* if that is possible."""
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is in the buffer if that is possible."""
        with suppress(OSError):
            super().flush()


def prepare() -> None:
    """Give this process these two streams, and nothing instead of one that it was started without."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The next file or connection that is opened would become it, and be written into.
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _wrapped(sys.stdout, 1, Output)
    sys.stderr = _wrapped(sys.stderr, 2, Errors)


def discard() -> None:
    """Forget what standard output has not taken: Python would try again at its end, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputLost(error) from error


def _wrapped(stream: TextIO | None, number: int, kind: type[Output | Errors]) -> TextIO:
    """Return *stream* as one of *kind*; what is no stream of the process's own, such as a test's, stays as it is."""
    if stream is None:  # it was closed when Python started
        return open(number, "w", encoding="utf-8", closefd=False)
    if type(stream) is not io.TextIOWrapper:
        return stream
    # A terminal that does not know a character is no reason to fail.
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    return kind(stream.buffer, stream.encoding, errors, line_buffering=stream.line_buffering)
