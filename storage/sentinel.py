"""The sentinel: a small file that says that the right disk, bucket and prefix are there.

Where it cannot be read nothing is believed to be gone: an unmounted disk looks exactly
like one from which everything has been deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import obstore

from storage.opening import FAILURES, open_store, reason

NAME = ".forgekeeper-root"
TEXT = b"forgekeeper believes that something is gone from here only while it can read this file.\n"
PATIENCE = timedelta(seconds=5)


class Unreadable(Exception):
    """The place cannot be looked at; the message says why."""


class Place(Protocol):
    """A folder or an object store; every method raises `Unreadable` when it does not answer."""

    def has_sentinel(self) -> bool:
        """Say whether the sentinel is there."""

    def is_empty(self) -> bool:
        """Say whether there is nothing at all."""

    def create_sentinel(self) -> None:
        """Write the sentinel."""


class Folder:
    """A folder on a disk that may not be mounted."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def has_sentinel(self) -> bool:
        """Say whether the sentinel is there."""
        with _readable(str(self)):
            if not self._root.is_dir():
                raise NotADirectoryError("is not a folder")
            try:
                # A disk in trouble may know the name, and no more.
                (self._root / NAME).read_bytes()
            except FileNotFoundError:
                return False
            return True

    def is_empty(self) -> bool:
        """Say whether there is nothing at all."""
        with _readable(str(self)):
            return next(self._root.iterdir(), None) is None

    def create_sentinel(self) -> None:
        """Write the sentinel."""
        with _readable(str(self)):
            (self._root / NAME).write_bytes(TEXT)


class Store:
    """An object store behind a URL."""

    def __init__(self, location: str, url: str) -> None:
        self._location = location
        with _readable(location):
            # A store that is away is reported in seconds.
            self._store = open_store(url, request_timeout=PATIENCE, retries=1, retry_timeout=PATIENCE)

    def __str__(self) -> str:
        return self._location

    def has_sentinel(self) -> bool:
        """Say whether the sentinel is there."""
        with _readable(self._location):
            try:
                obstore.head(self._store, NAME)
            except FileNotFoundError:
                return False
            return True

    def is_empty(self) -> bool:
        """Say whether there is nothing at all."""
        with _readable(self._location):
            return not next(iter(obstore.list(self._store, chunk_size=1)), [])

    def create_sentinel(self) -> None:
        """Write the sentinel."""
        with _readable(self._location):
            obstore.put(self._store, NAME, TEXT)


@contextmanager
def _readable(place: str) -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        raise Unreadable(f"{place}: {reason(error)}") from None
