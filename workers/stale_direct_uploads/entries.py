"""Entries of the register of direct uploads, and claims on them (batch 100)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from forgekeeper.platform.settings import Settings
from forgekeeper.targets.objects import is_below, is_normal
from forgekeeper.targets.outcomes import OUTSIDE

_NO_TEXT = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")  # control characters, and what is left of bytes that are no UTF-8


class MalformedUpload(ValueError):
    """A location is a name without a colon; a path has no empty, `.` or `..` part and no control character."""


class BeingDeleted(Exception):
    """The object of an earlier upload to this path is being deleted; use another path."""


@dataclass(frozen=True)
class Entry:
    """An upload that was never completed, and how often deleting its object has failed.

    *adopted* is the epoch second of its adoption, None for a producer's; *registered* that of its registration, None
    where that was long ago.
    """

    member: str
    attempts: int
    adopted: int | None = None
    registered: int | None = field(default=None, compare=False)

    @property
    def location(self) -> str:
        """What stands before the first colon."""
        return self.member.partition(":")[0]

    @property
    def path(self) -> str:
        """What stands after the first colon; it may contain more of them."""
        return self.member.partition(":")[2]


UNFIT = {"malformed": "it names no object", "outside": OUTSIDE, "no_store": "no store is configured for its location"}
"""Why nothing of an entry may be deleted, by what becomes of it."""


def is_malformed(entry: Entry) -> bool:
    """Return whether the entry can name no object at any store; any program may write to the register."""
    return not entry.location or bool(_NO_TEXT.search(entry.location)) or not is_normal(entry.path)


def unfit(entry: Entry, settings: Settings) -> str | None:
    """Return why nothing of the entry may be deleted, a key of `UNFIT`; None where it may."""
    if is_malformed(entry):
        return "malformed"
    if entry.location not in settings.object_stores:
        return "no_store"
    return None if is_below(settings.object_prefixes.get(entry.location, ()), entry.path) else "outside"


class Claim(NamedTuple):
    """Entries that belong to one worker for a while, by the token of the claim."""

    token: str
    entries: list[Entry]


def member(location: str, path: str) -> str:
    """Return the register's member of an upload; raise `MalformedUpload` unless an object may have that name."""
    name, parts = f"{location}:{path}", path.split("/")
    if not location or ":" in location or {"", ".", ".."}.intersection(parts) or _NO_TEXT.search(name):
        raise MalformedUpload(f"{location!r}, {path!r}: {MalformedUpload.__doc__}")
    return name
