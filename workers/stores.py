"""The object stores of this process: one client per location, made when first needed.

They are made after the fork: obstore hangs for ever in a child of a process that used it.
"""

from __future__ import annotations

from threading import Lock

from settings import Settings
from storage.objects import Objects

ARTIFACTS = "artifacts"
"""The location of job artifacts' objects."""

_opened: dict[str, Objects] = {}
_opening = Lock()


def at(location: str, settings: Settings) -> Objects | None:
    """Return the location's client, None when no store of that name is configured.

    Raises `StoreUnavailable` when its URL is wrong or its folder is not there.
    """
    url = settings.object_stores.get(location)
    if url is None:
        return None
    with _opening:
        if location not in _opened:
            _opened[location] = Objects(location, url.get_secret_value(), request_timeout=settings.store_timeout)
        return _opened[location]
