"""The sentinel: a small file that confirms disk, bucket and prefix and names their owner.

If it cannot be read, nothing counts as missing: an unmounted disk looks exactly like an emptied disk.  If it names
another installation, or none, nothing is deleted: the data may belong to someone else.
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
"""A name without an object: credentials that may delete anything may delete this name."""
TEXT = b"forgekeeper believes that something is gone from here only while it can read this file.\n"
LONGEST = 4_096
"""Maximum bytes of a sentinel that are read."""
TIMEOUT = timedelta(seconds=5)
LOST_AND_FOUND = "lost+found"
"""A folder that every new disk has: a disk with nothing else is empty."""

_OWNER = re.compile(rb"^installation:[ \t]*([!-~]+)[ \t]*\r?$", re.MULTILINE)


class Unreadable(Exception):
    """The place cannot be read; the message says why."""


def text(installation: str) -> bytes:
    """Return the content of the sentinel of *installation*."""
    return TEXT + b"installation: " + installation.encode() + b"\n"


def parse(content: bytes) -> str:
    """Return the installation that owns the place; "" if nobody has adopted it."""
    found = _OWNER.search(content[:LONGEST])
    return found[1].decode() if found else ""


def objection(place: object, found: str, installation: str) -> str | None:
    """Return why nothing may be deleted from a place of *found*; None if *installation*'s."""
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
    """A folder on a disk that may not be mounted.

    Every method raises `Unreadable` if the folder does not answer.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def sentinel(self) -> str | None:
        """Return the owner of the place, as `parse` does; None without a sentinel."""
        with _readable(str(self)):
            if not self._root.is_dir():
                raise NotADirectoryError("is not a folder")
            try:
                # A failing disk may know the name and nothing else, so read the file.
                with (self._root / NAME).open("rb") as file:
                    return parse(file.read(LONGEST))
            except FileNotFoundError:
                return None

    def is_empty(self) -> bool:
        """Return whether the place has nothing but the sentinel."""
        with _readable(str(self)):
            return all(child.name in (NAME, LOST_AND_FOUND) for child in self._root.iterdir())

    def has(self, path: str) -> bool:
        """Return whether *path* exists."""
        # A path that leads outside names nothing here.
        parts = path.split("/")
        if "\0" in path or path.startswith("/") or ".." in parts or not any(parts):
            return False
        with _readable(str(self)):
            return os.path.lexists(self._root / path)

    def create_sentinel(self, installation: str) -> None:
        """Write the sentinel, over a sentinel without an owner."""
        with _readable(str(self)):
            (self._root / NAME).write_bytes(text(installation))


class Store:
    """An object store behind a URL; methods raise `Unreadable` if it does not answer."""

    def __init__(self, location: str, url: str) -> None:
        self._location = location
        with _readable(location):
            # A store that does not answer is reported in seconds.
            self._store = open_store(url, request_timeout=TIMEOUT, retries=1, retry_timeout=TIMEOUT)

    def __str__(self) -> str:
        return self._location

    def sentinel(self) -> str | None:
        """Return the owner of the place, as `parse` does; None without a sentinel."""
        with _readable(self._location), suppress(FileNotFoundError):
            return self._asked(owner)
        return None

    def is_empty(self) -> bool:
        """Return whether the place has nothing but the sentinel."""
        with _readable(self._location):
            # Two objects per page: one of them may be the sentinel.
            found = (one["path"] for page in obstore.list(self._store, chunk_size=2) for one in page)
            return next((path for path in found if path != NAME), None) is None

    def has(self, path: str) -> bool:
        """Return whether *path* exists."""
        with _readable(self._location), suppress(FileNotFoundError):
            self._asked(obstore.head_async, path)
            return True
        return False

    def create_sentinel(self, installation: str) -> None:
        """Write the sentinel, over a sentinel without an owner."""
        with _readable(self._location):
            self._asked(obstore.put_async, NAME, text(installation))

    def _asked(self, ask: Callable[..., Awaitable[Answer]], *arguments: object) -> Answer:
        return asyncio.run(answer(ask, self._store, *arguments, within=2 * TIMEOUT.total_seconds()))


async def owner(store: ObjectStore) -> str:
    """Return the owner of *store*, as `parse` does; raise one of `FAILURES`."""
    return parse(bytes(await (await obstore.get_async(store, NAME)).bytes_async()))


Place = Folder | Store


@contextmanager
def _readable(place: str) -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        raise Unreadable(f"{place}: {reason(error)}") from None
