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

from forgekeeper.targets.store_urls import STORE_ERRORS, StoreAnswer, describe_error, open_store, send_request

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SENTINEL_NAME = ".forgekeeper-root"
PROBE_NAME = ".forgekeeper-probe"
"""A name without an object: credentials that may delete anything may delete this name."""
SENTINEL_TEXT = b"forgekeeper believes that something is gone from here only while it can read this file.\n"
MAX_SENTINEL_BYTES = 4_096
"""Maximum bytes of a sentinel that are read."""
PLACE_TIMEOUT = timedelta(seconds=5)
LOST_AND_FOUND = "lost+found"
"""A folder that every new disk has: a disk with nothing else is empty."""

_OWNER_LINE = re.compile(rb"^installation:[ \t]*([!-~]+)[ \t]*\r?$", re.MULTILINE)


class PlaceUnreadable(Exception):
    """The place cannot be read; the message says why."""


def build_content(installation: str) -> bytes:
    """Return the content of the sentinel of *installation*."""
    return SENTINEL_TEXT + b"installation: " + installation.encode() + b"\n"


def parse_owner(content: bytes) -> str:
    """Return the installation that owns the place; "" if nobody has adopted it."""
    found = _OWNER_LINE.search(content[:MAX_SENTINEL_BYTES])
    return found[1].decode() if found else ""


def why_not_ours(place: object, owner_found: str, installation: str) -> str | None:
    """Return why nothing may be deleted from a place of *owner_found*; None if *installation*'s."""
    if not owner_found:
        return (
            f"{place}: {SENTINEL_NAME} names no installation: if this is the right place, run `forgekeeper check"
            " --init` to adopt it"
        )
    if owner_found == installation:
        return None
    return (
        f"{place} belongs to installation {owner_found}, but this is installation {installation}: correct the place or"
        f" the database; if that installation no longer exists, delete {SENTINEL_NAME} there and run `forgekeeper check"
        " --init`"
    )


class Folder:
    """A folder on a disk that may not be mounted.

    Every method raises `PlaceUnreadable` if the folder does not answer.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def read_owner(self) -> str | None:
        """Return the owner of the place, as `parse_owner` does; None without a sentinel."""
        with _raising_unreadable(str(self)):
            if not self._root.is_dir():
                raise NotADirectoryError("not a folder")
            try:
                # A failing disk may know the name and nothing else, so read the file.
                with (self._root / SENTINEL_NAME).open("rb") as file:
                    return parse_owner(file.read(MAX_SENTINEL_BYTES))
            except FileNotFoundError:
                return None

    def is_empty(self) -> bool:
        """Return whether the place has nothing but the sentinel."""
        with _raising_unreadable(str(self)):
            return all(child.name in (SENTINEL_NAME, LOST_AND_FOUND) for child in self._root.iterdir())

    def has_path(self, path: str) -> bool:
        """Return whether *path* exists."""
        # A path that leads outside names nothing here.
        parts = path.split("/")
        if "\0" in path or path.startswith("/") or ".." in parts or not any(parts):
            return False
        with _raising_unreadable(str(self)):
            return os.path.lexists(self._root / path)

    def create_sentinel(self, installation: str) -> None:
        """Write the sentinel, over a sentinel without an owner."""
        with _raising_unreadable(str(self)):
            (self._root / SENTINEL_NAME).write_bytes(build_content(installation))


class Store:
    """An object store behind a URL; methods raise `PlaceUnreadable` if it does not answer."""

    def __init__(self, location: str, url: str) -> None:
        self._location = location
        with _raising_unreadable(location):
            # A store that does not answer is reported in seconds.
            self._store = open_store(url, request_timeout=PLACE_TIMEOUT, retries=1, retry_timeout=PLACE_TIMEOUT)

    def __str__(self) -> str:
        return self._location

    def read_owner(self) -> str | None:
        """Return the owner of the place, as `parse_owner` does; None without a sentinel."""
        with _raising_unreadable(self._location), suppress(FileNotFoundError):
            return self._send_request(read_store_owner)
        return None

    def is_empty(self) -> bool:
        """Return whether the place has nothing but the sentinel."""
        with _raising_unreadable(self._location):
            # Two objects per page: one of them may be the sentinel.
            found = (one["path"] for page in obstore.list(self._store, chunk_size=2) for one in page)
            return next((path for path in found if path != SENTINEL_NAME), None) is None

    def has_path(self, path: str) -> bool:
        """Return whether *path* exists."""
        with _raising_unreadable(self._location), suppress(FileNotFoundError):
            self._send_request(obstore.head_async, path)
            return True
        return False

    def create_sentinel(self, installation: str) -> None:
        """Write the sentinel, over a sentinel without an owner."""
        with _raising_unreadable(self._location):
            self._send_request(obstore.put_async, SENTINEL_NAME, build_content(installation))

    def _send_request(self, request: Callable[..., Awaitable[StoreAnswer]], *arguments: object) -> StoreAnswer:
        return asyncio.run(
            send_request(request, self._store, *arguments, timeout_seconds=2 * PLACE_TIMEOUT.total_seconds())
        )


async def read_store_owner(store: ObjectStore) -> str:
    """Return the owner of *store*, as `parse_owner` does; raise one of `STORE_ERRORS`."""
    return parse_owner(bytes(await (await obstore.get_async(store, SENTINEL_NAME)).bytes_async()))


Place = Folder | Store


@contextmanager
def _raising_unreadable(place: str) -> Iterator[None]:
    try:
        yield
    except STORE_ERRORS as error:
        raise PlaceUnreadable(f"{place}: {describe_error(error)}") from None
