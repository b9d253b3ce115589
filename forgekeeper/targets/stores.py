"""The object stores of this process, and the last lookup of an object's owners.

A table names the objects of one location.  Another location may have the same place, or a folder within it or above
it: its objects are looked up by their names at the table's location.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from urllib.parse import unquote, urlsplit

from forgekeeper.api.objects import ObjectOwner
from forgekeeper.platform.installation import Installation
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.settled import SettledUpload
from forgekeeper.targets.objects import ObjectStore

open_object_store = cache(ObjectStore)
"""One client per location, created after the fork: obstore hangs in a child of a process that used it."""


def for_location(location: str, settings: Settings) -> ObjectStore | None:
    """Return the location's client, None if no store has that name.

    The client deletes for the installation of the database, and needs a connection to it.  Raises `StoreUnavailable`
    for a wrong URL or a missing folder.
    """
    url = settings.object_stores.get(location)
    if url is None:
        return None
    return open_object_store(
        location,
        url.get_secret_value(),
        installation=Installation.ensure_id(),
        prefixes=settings.object_prefixes.get(location, ()),
        request_timeout=settings.store_timeout,
    )


def find_kept_paths(
    owner: ObjectOwner | None, location: str, paths: Sequence[str], settings: Settings
) -> dict[str, str]:
    """Return the *paths* that the *owner*, the outbox or a producer names, with a sentence."""
    kept: dict[str, str] = {}
    tables: tuple[ObjectOwner, ...] = (DeletedObject,) if owner is None else (owner, DeletedObject)
    # The owner first: a row that is deleted there between the two queries is in the outbox by the second.
    for table in tables:
        kept |= dict.fromkeys(find_named_paths(table, location, paths, settings), table.sentence)
    completed = SettledUpload.find_settled(location, paths, reaped=False)
    return dict.fromkeys(completed, "its producer completed the upload") | kept


def find_named_paths(owner: ObjectOwner, location: str, paths: Sequence[str], settings: Settings) -> set[str]:
    """Return the *paths* that a row of the *owner* names, by this or another *location*."""
    pairs = [pair for theirs in owner.locations for pair in _names_at_place(theirs, location, paths, settings).items()]
    named = owner.named(list({name for _, name in pairs}))
    return {path for path, name in pairs if name in named}


def _names_at_place(theirs: str, location: str, paths: Sequence[str], settings: Settings) -> dict[str, str]:
    """Return the *paths* that are also at the place of *theirs*, each with its name there."""
    if location == theirs:
        return {path: path for path in paths}
    urls = [settings.object_stores.get(name) for name in (location, theirs)]
    here, there = (_parse_place(url.get_secret_value()) if url else None for url in urls)
    if here is None or there is None:
        return {}
    if there == here[: len(there)]:
        below = "".join(f"{part}/" for part in here[len(there) :])
        return {path: below + path for path in paths}
    if here == there[: len(here)]:
        below = "".join(f"{part}/" for part in there[len(here) :])
        return {path: path.removeprefix(below) for path in paths if path.startswith(below)}
    return {}


def _parse_place(url: str) -> tuple[str, ...]:
    """Return the place behind *url* as a tuple: a place within another begins with its tuple.

    The server is ignored: two buckets of one name at different servers are treated as equal.
    """
    try:
        parts = urlsplit(url.partition("?")[0])
    except ValueError:
        return (url,)
    path = os.path.realpath(unquote(parts.path)) if parts.scheme == "file" else unquote(parts.path)
    return (parts.scheme, parts.netloc, *filter(None, path.split("/")))
