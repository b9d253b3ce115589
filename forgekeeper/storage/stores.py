"""The object stores of this process: one client per location, made when first needed.

They are made after the fork: obstore hangs for ever in a child of a process that used it.
"""

from __future__ import annotations

from threading import Lock

from forgekeeper.database.installation import Installation
from forgekeeper.settings import Settings
from forgekeeper.storage.objects import Objects

ARTIFACTS = "artifacts"
"""The location of job artifacts' objects."""

_opened: dict[tuple[str, str, tuple[str, ...]], Objects] = {}
_opening = Lock()


def at(location: str, settings: Settings) -> Objects | None:
    """Return the location's client, None when no store of that name is configured.

    It deletes for the installation that the database is of, and needs a connection to it.  Raises
    `StoreUnavailable` when its URL is wrong or its folder is not there.
    """
    url = settings.object_stores.get(location)
    if url is None:
        return None
    installation = Installation.ensure()
    with _opening:
        prefixes = settings.object_prefixes.get(location, ())
        key = location, installation, prefixes
        if key not in _opened:
            _opened[key] = Objects(
                location,
                url.get_secret_value(),
                installation=installation,
                prefixes=prefixes,
                request_timeout=settings.store_timeout,
            )
        return _opened[key]
