"""The object stores of this process, and what still names an object: asked once more before it is deleted.

A table names the objects of one location.  Another location may lead to the same place, or to a folder
within it or above it: its objects are looked for under their names there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from urllib.parse import unquote, urlsplit

from forgekeeper.api.objects import Owner
from forgekeeper.platform.installation import Installation
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.settled import SettledUpload
from forgekeeper.targets.objects import ObjectStore

opened = cache(ObjectStore)
"""One client per location, made after the fork: obstore hangs for ever in a child of a process that used it."""


def at(location: str, settings: Settings) -> ObjectStore | None:
    """Return the location's client, None when no store of that name is configured.

    It deletes for the installation that the database is of, and needs a connection to it.  Raises
    `StoreUnavailable` when its URL is wrong or its folder is not there.
    """
    url = settings.object_stores.get(location)
    if url is None:
        return None
    return opened(
        location,
        url.get_secret_value(),
        installation=Installation.ensure(),
        prefixes=settings.object_prefixes.get(location, ()),
        request_timeout=settings.store_timeout,
    )


def answered_for(owner: Owner | None, location: str, paths: Sequence[str], settings: Settings) -> dict[str, str]:
    """Return the *paths* that the *owner*, the outbox or a producer names, and a sentence that says which of them."""
    kept: dict[str, str] = {}
    tables: tuple[Owner, ...] = (DeletedObject,) if owner is None else (owner, DeletedObject)
    # The owner first: a row that is deleted there between the two questions is in the outbox by the second.
    for table in tables:
        kept |= dict.fromkeys(named_by(table, location, paths, settings), table.sentence)
    completed = SettledUpload.named(location, paths, reaped=False)
    return dict.fromkeys(completed, "its producer has completed it") | kept


def named_by(owner: Owner, location: str, paths: Sequence[str], settings: Settings) -> set[str]:
    """Return those of *paths* at *location* that a row of the *owner* names, by this or another location."""
    pairs = [pair for theirs in owner.locations for pair in _named_at(theirs, location, paths, settings).items()]
    named = owner.named(list({name for _, name in pairs}))
    return {path for path, name in pairs if name in named}


def _named_at(theirs: str, location: str, paths: Sequence[str], settings: Settings) -> dict[str, str]:
    """Return those of *paths* that lie at the place of *theirs*, too, and what each is called there."""
    if location == theirs:
        return {path: path for path in paths}
    urls = [settings.object_stores.get(name) for name in (location, theirs)]
    here, there = (_place(url.get_secret_value()) if url else None for url in urls)
    if here is None or there is None:
        return {}
    if there == here[: len(there)]:
        below = "".join(f"{part}/" for part in here[len(there) :])
        return {path: below + path for path in paths}
    if here == there[: len(here)]:
        below = "".join(f"{part}/" for part in there[len(here) :])
        return {path: path.removeprefix(below) for path in paths if path.startswith(below)}
    return {}


def _place(url: str) -> tuple[str, ...]:
    """Name the place behind *url* by the folders that lead to it: what lies within another begins like that.

    Of a bucket nothing but its name counts: two of one name at different servers are taken for the same.
    """
    try:
        parts = urlsplit(url.partition("?")[0])
    except ValueError:
        return (url,)
    path = os.path.realpath(unquote(parts.path)) if parts.scheme == "file" else unquote(parts.path)
    return (parts.scheme, parts.netloc, *filter(None, path.split("/")))
