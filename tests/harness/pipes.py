"""Full pipes: a process that writes to a full pipe waits until somebody reads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """Fill a pipe; yield its ends for reading and for writing."""
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
    """Read the current content of the pipe."""
    os.set_blocking(reading, False)
    parts = []
    with suppress(BlockingIOError):
        while part := os.read(reading, 65536):
            parts.append(part)
    return b"".join(parts).decode()
