"""What still names an object: asked once more before it is deleted.

A table names the objects of one location.  Another location may lead to the same place, or to a folder
within it or above it: its objects are looked for under their names there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forgekeeper.settings import Settings
from forgekeeper.storage.opening import place
from forgekeeper.storage.outbox import DeletedObject
from forgekeeper.storage.settled import SettledUpload


class Owner(Protocol):
    """A table whose rows name objects at *location*; *sentence* is the reason why one that it names stays."""

    location: str
    sentence: str

    def named(self, paths: Sequence[str]) -> set[str]:
        """Return those of *paths* that a row names."""


def answered_for(owner: Owner, location: str, paths: Sequence[str], settings: Settings) -> dict[str, str]:
    """Return those of *paths* that the *owner*, the outbox or a producer names, and a sentence that says which."""
    kept: dict[str, str] = {}
    # The owner first: what is deleted there between the two questions is in the outbox by the second.
    for table in (owner, DeletedObject):
        known = _at(table.location, location, paths, settings)
        named = table.named(list(known.values()))
        kept |= {path: table.sentence for path, name in known.items() if name in named}
    completed = SettledUpload.named(location, paths, reaped=False)
    return dict.fromkeys(completed, "its producer has completed it") | kept


def _at(theirs: str, location: str, paths: Sequence[str], settings: Settings) -> dict[str, str]:
    """Return those of *paths* that lie at the place of *theirs*, too, and what each is called there."""
    if location == theirs:
        return {path: path for path in paths}
    urls = [settings.object_stores.get(name) for name in (location, theirs)]
    here, there = (place(url.get_secret_value()) if url else None for url in urls)
    if here is None or there is None:
        return {}
    if there == here[: len(there)]:
        below = "".join(f"{part}/" for part in here[len(there) :])
        return {path: below + path for path in paths}
    if here == there[: len(here)]:
        below = "".join(f"{part}/" for part in there[len(here) :])
        return {path: path.removeprefix(below) for path in paths if path.startswith(below)}
    return {}
