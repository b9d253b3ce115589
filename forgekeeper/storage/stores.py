"""The object stores of this process: one client per location, made when first needed.

They are made after the fork: obstore hangs for ever in a child of a process that used it.
"""

from __future__ import annotations

from functools import cache

from forgekeeper.database.installation import Installation
from forgekeeper.settings import Settings
from forgekeeper.storage.objects import Objects

ARTIFACTS = "artifacts"
"""The location of job artifacts' objects."""


def at(location: str, settings: Settings) -> Objects | None:
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


opened = cache(Objects)
