"""Pipes that are full: whoever writes to one waits until somebody reads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """Make a pipe that takes no more; yield where it is read and where it is written."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for size in (4096, 1):
        with suppress(BlockingIOError):
            while os.write(writing, b"." * size):
                pass
    os.set_blocking(writing, True)
    yield reading, writing
    os.close(writing)
    os.close(reading)


def drain(reading: int) -> str:
    """Read what is in the pipe by now."""
    os.set_blocking(reading, False)
    parts = []
    with suppress(BlockingIOError):
        while part := os.read(reading, 65536):
            parts.append(part)
    return b"".join(parts).decode()
