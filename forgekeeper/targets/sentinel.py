"""The sentinel: a small file that says that the right disk, bucket and prefix are there, and whose they are.

Where it cannot be read nothing is believed to be gone: an unmounted disk looks exactly like one from which everything
was deleted.  Where it names another installation, or none, nothing is deleted: the data may belong to someone else.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore

from forgekeeper.targets.opening import FAILURES, Answer, answer, open_store, reason

if TYPE_CHECKING:
    from obstore.store import ObjectStore

NAME = ".forgekeeper-root"
PROBE = ".forgekeeper-probe"
"""A name that no object has: credentials that may delete anything may delete this."""
TEXT = b"forgekeeper believes that something is gone from here only while it can read this file.\n"
LONGEST = 4_096
"""Bytes of a sentinel that are read."""
TIMEOUT = timedelta(seconds=5)
LOST_AND_FOUND = "lost+found"
"""A new disk's own folder: a disk with nothing else is empty."""

_OWNER = re.compile(rb"^installation:[ \t]*([!-~]+)[ \t]*\r?$", re.MULTILINE)


class Unreadable(Exception):
    """The place cannot be looked at; the message says why."""


def text(installation: str) -> bytes:
    """Write the sentinel of *installation*."""
    return TEXT + b"installation: " + installation.encode() + b"\n"


def parse(content: bytes) -> str:
    """Return whose place it is, "" where the sentinel names no installation: it is not adopted."""
    found = _OWNER.search(content[:LONGEST])
    return found[1].decode() if found else ""


def objection(place: object, found: str, installation: str) -> str | None:
    """Return why nothing may be deleted from a place that a sentinel says is *found*'s, None if *installation*'s."""
    if not found:
        return (
            f"{place}: {NAME} names no installation; `forgekeeper check --init` adopts the place if it is the right one"
        )
    if found == installation:
        return None
    return (
        f"{place} belongs to installation {found}, this one is {installation}: set the right place or "
        f"database; if that installation is no more, remove {NAME} there and run `forgekeeper check --init`"
    )


class Folder:
    """A folder on a disk that may not be mounted; every method raises `Unreadable` when it does not answer."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def sentinel(self) -> str | None:
        """Return whose the place is, as `parse` does, None when there is no sentinel."""
        with _readable(str(self)):
            if not self._root.is_dir():
                raise NotADirectoryError("is not a folder")
            try:
                # A disk in trouble may know the name, and no more.
                with (self._root / NAME).open("rb") as file:
                    return parse(file.read(LONGEST))
            except FileNotFoundError:
                return None

    def is_empty(self) -> bool:
        """Return whether there is nothing beside the sentinel."""
        with _readable(str(self)):
            return all(child.name in (NAME, LOST_AND_FOUND) for child in self._root.iterdir())

    def has(self, path: str) -> bool:
        """Return whether there is something at *path*."""
        # A path that leads elsewhere names nothing here.
        parts = path.split("/")
        if "\0" in path or path.startswith("/") or ".." in parts or not any(parts):
            return False
        with _readable(str(self)):
            return os.path.lexists(self._root / path)

    def create_sentinel(self, installation: str) -> None:
        """Write the sentinel, over one that names no installation."""
        with _readable(str(self)):
            (self._root / NAME).write_bytes(text(installation))


class Store:
    """An object store behind a URL; every method raises `Unreadable` when it does not answer."""

    def __init__(self, location: str, url: str) -> None:
        self._location = location
        with _readable(location):
            # A store that does not answer is reported in seconds.
            self._store = open_store(url, request_timeout=TIMEOUT, retries=1, retry_timeout=TIMEOUT)

    def __str__(self) -> str:
        return self._location

    def sentinel(self) -> str | None:
        """Return whose the place is, as `parse` does, None when there is no sentinel."""
        with _readable(self._location), suppress(FileNotFoundError):
            return self._asked(owner)
        return None

    def is_empty(self) -> bool:
        """Return whether there is nothing beside the sentinel."""
        with _readable(self._location):
            # Two: one of them may be the sentinel.
            found = (one["path"] for page in obstore.list(self._store, chunk_size=2) for one in page)
            return next((path for path in found if path != NAME), None) is None

    def has(self, path: str) -> bool:
        """Return whether there is something at *path*."""
        with _readable(self._location), suppress(FileNotFoundError):
            self._asked(obstore.head_async, path)
            return True
        return False

    def create_sentinel(self, installation: str) -> None:
        """Write the sentinel, over one that names no installation."""
        with _readable(self._location):
            self._asked(obstore.put_async, NAME, text(installation))

    def _asked(self, ask: Callable[..., Awaitable[Answer]], *arguments: object) -> Answer:
        return asyncio.run(answer(ask, self._store, *arguments, within=2 * TIMEOUT.total_seconds()))


async def owner(store: ObjectStore) -> str:
    """Return whose *store* is, as `parse` does; raise one of `FAILURES` where its sentinel cannot be read."""
    return parse(bytes(await (await obstore.get_async(store, NAME)).bytes_async()))


Place = Folder | Store


@contextmanager
def _readable(place: str) -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        raise Unreadable(f"{place}: {reason(error)}") from None
