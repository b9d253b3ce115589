"""Entries of a register of uploads, and claims on them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

UNPRINTABLE_CHARACTERS = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and surrogates, which represent bytes other than UTF-8."""


class MalformedUpload(ValueError):
    """A location is a name without a colon; a path has no empty, `.` or `..` part and no control character."""


class BeingDeleted(Exception):
    """The object of an earlier upload to this path is being deleted; use another path."""


@dataclass(eq=False)
class UploadEntry:
    """An upload that was never completed, and the failed attempts to delete its object.

    *adopted_at* is the epoch second of its adoption, None for a producer's entry.  *registered_at* is the epoch second
    of its registration, None for an entry that was claimed before.  *token* is the token of its claim.  *location* is
    the text before the member's first colon, *path* the text after it, which may contain more colons.  An entry equals
    only itself, so that it is a cheap key.
    """

    member: str
    attempts: int
    adopted_at: int | None = None
    registered_at: int | None = None
    token: str = ""
    location: str = field(init=False, repr=False)
    path: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.location, _, self.path = self.member.partition(":")


class UploadClaim(NamedTuple):
    """Entries that one worker has claimed, and the token of the claim."""

    token: str
    entries: list[UploadEntry]


class DueEntry(NamedTuple):
    """An entry that a run would claim, and its due time.

    *bridged* entries are still in the forge's own register.
    """

    entry: UploadEntry
    since: datetime
    bridged: bool = False


class EntryCounts(NamedTuple):
    """Counts of entries: neither completed nor settled, due (and since when), failed for good.

    *unreadable* counts entries of the forge's own register without a valid time; *unreadable_example* is an example.
    """

    pending: int
    due: int
    due_since: datetime | None
    failed: int
    unreadable: int = 0
    unreadable_example: str = ""


def build_member(location: str, path: str) -> str:
    """Return the register's member of an upload; raise `MalformedUpload` for a bad name."""
    name, parts = f"{location}:{path}", path.split("/")
    if not location or ":" in location or {"", ".", ".."}.intersection(parts) or UNPRINTABLE_CHARACTERS.search(name):
        raise MalformedUpload(f"{location!r}, {path!r}: {MalformedUpload.__doc__}")
    return name
