"""Entries of the register of direct uploads: what they are, and what is claimed of them (batch 100)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta

CLAIM_TTL = timedelta(seconds=60)
"""How long a claim may be acted on by whoever took it, unless that says otherwise."""

_NO_TEXT = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")  # control characters, and what is left of bytes that are no UTF-8


class MalformedUpload(ValueError):
    """A location is a name without a colon; a path has no empty, `.` or `..` part and no control character."""


class BeingDeleted(Exception):
    """The object of an earlier upload to this path is being deleted; use another path."""


@dataclass(frozen=True)
class Entry:
    """An upload that was never completed, and how often deleting its object has failed.

    *adopted* is the epoch second of its adoption, None for what a producer has registered; *registered* that of its
    registration, None where that was long ago.
    """

    member: str
    attempts: int
    adopted: int | None = None
    registered: int | None = field(default=None, compare=False)

    def __hash__(self) -> int:
        """Go by the member alone: a run looks each entry up a dozen times."""
        return hash(self.member)

    @property
    def location(self) -> str:
        """What stands before the first colon."""
        return self.member.partition(":")[0]

    @property
    def path(self) -> str:
        """What stands after the first colon; it may contain more of them."""
        return self.member.partition(":")[2]

    @property
    def malformed(self) -> bool:
        """Whether no object can be meant; the register holds what other programs write."""
        parts = self.path.split("/")
        return not self.location or bool({"", ".", ".."}.intersection(parts) or _NO_TEXT.search(self.member))


@dataclass(frozen=True)
class Failure(Entry):
    """An entry whose object could not be deleted: when it was given up, or else when it will be tried again."""

    at: datetime | None = field(kw_only=True, default=None)
    again: datetime | None = field(kw_only=True, default=None)


@dataclass(frozen=True)
class Claim:
    """Entries that belong to one worker for a while."""

    token: str
    taken: float
    entries: list[Entry]
    ttl: timedelta = CLAIM_TTL

    @property
    def until(self) -> float:
        """The monotonic instant after which nothing may be done about the entries."""
        return self.taken + self.ttl.total_seconds()

    def expired(self, now: float) -> bool:
        """Say whether the claim is too old to be acted on; *now* is monotonic.

        Ask before each deletion.  A worker that was paused drops its claim: the next run finds it.
        """
        return now > self.until


def member(location: str, path: str) -> str:
    """Return the register's member of an upload; raise `MalformedUpload` unless an object may be called so."""
    entry = Entry(f"{location}:{path}", 0)
    if entry.location != location or entry.malformed:
        raise MalformedUpload(f"{location!r}, {path!r}: {MalformedUpload.__doc__}")
    return entry.member
