"""Read why git has refused a transaction: which ref it is about, which lock, or all of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

from forgekeeper.storage.git_command import legible

# No name contains ": ".
_REF = re.compile(rb"cannot lock ref '(?P<ref>.+?)': (?P<why>.+)")
_LOCK = re.compile(rb"[Uu]nable to create (?:file )?'?(?P<path>.+?)'?: File exists")
_CHANGED = re.compile(
    rb"is at \w+ but expected \w+\Z|unable to resolve reference '[^:]+'\Z|'.+' exists; cannot create '"
)
_TOO_LONG = re.compile(rb": File name too long\Z")
_GENERAL = re.compile(
    rb"No space left on device|Disk quota exceeded|Read-only file system|Input/output error|Too many open files"
)


class Complaint(NamedTuple):
    """What git wrote, and what is understood of it.

    *ref* is the ref it stopped at; *became* says that it is not what it was, or that no lock can have its name.
    *lock* is the lock that is held, relative to the repository; *general* means that no ref would fare better.
    """

    text: str
    ref: bytes | None
    became: Literal["changed", "too long"] | None
    lock: bytes | None
    general: bool


def understand(said: bytes, git_dir: Path) -> Complaint:
    """Read what git wrote, in the language of LC_ALL=C."""
    ref = _REF.search(said)
    lock = _LOCK.search(said)
    return Complaint(
        text=legible(ref["why"] if ref else said),
        ref=ref["ref"] if ref else None,
        became=_became(ref["why"]) if ref else None,
        lock=os.path.relpath(lock["path"], os.fsencode(git_dir)) if lock else None,
        general=bool(_GENERAL.search(said)),
    )


def _became(why: bytes) -> Literal["changed", "too long"] | None:
    if _TOO_LONG.search(why):
        return "too long"
    return "changed" if _CHANGED.match(why) else None
