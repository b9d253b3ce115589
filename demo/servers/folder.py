"""The folder that the servers live in: one pair of servers at a time uses it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from demo.servers.machine import EmbeddedError

LOCK_TIMEOUT = 5.0
"""Seconds that the servers of a killed process may take to end."""
LONGEST_SOCKET_PATH = 107
LONGEST_SOCKET_NAME = ".s.PGSQL.5432"


@dataclass(frozen=True)
class Site:
    """Where a pair of servers lives; they inherit *lock*, so the folder is in use until the last of them has ended."""

    folder: Path
    sockets: Path
    temporary: bool
    lock: BinaryIO


@contextmanager
def opened(given: Path | None) -> Iterator[Site]:
    """Make and lock the folder, a temporary one where none is given; remove in the end what is temporary."""
    with ExitStack() as stack:
        folder = given.absolute() if given else _temporary(stack)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = stack.enter_context(_locked(folder))
        sockets = folder / "sockets"
        if _fits(sockets):
            shutil.rmtree(sockets, ignore_errors=True)
            sockets.mkdir(mode=0o700)
        else:
            sockets = _temporary(stack, "/tmp")  # noqa: S108, as short as can be
        yield Site(folder, sockets, given is None, lock)


def _temporary(stack: ExitStack, parent: str | None = None) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="forgekeeper-", dir=parent))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _fits(sockets: Path) -> bool:
    # To libpq a comma separates two hosts, and nothing quotes it.
    longest = os.fsencode(sockets / LONGEST_SOCKET_NAME)
    return len(longest) <= LONGEST_SOCKET_PATH and b"," not in longest


@contextmanager
def _locked(folder: Path) -> Iterator[BinaryIO]:
    ends = time.monotonic() + LOCK_TIMEOUT
    with (folder / "lock").open("ab") as lock:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > ends:
                raise EmbeddedError(f"{folder} is in use by other embedded servers; stop those, or use another folder.")
            time.sleep(0.01)
        yield lock
