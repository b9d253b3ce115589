"""Whose Redis this is: the id of the one installation that keeps its messages here.

An emptied Redis is nobody's, and belongs to whoever claims it first.  So two installations
that share one by mistake find out, at the latest when the second claims it.
"""

from __future__ import annotations

import redis

from forgekeeper.delivery.queues import INSTALLATION


def claim(client: redis.Redis, installation: str) -> str:
    """Claim this Redis for *installation* unless it is somebody's; return whose it is."""
    while (found := client.get(INSTALLATION)) is None:
        client.set(INSTALLATION, installation, nx=True)
    return _text(found)


def claim_by_writing(client: redis.Redis, installation: str) -> None:
    """Claim this Redis, and raise what it says where it takes no writes; it is not changed where it is claimed."""
    client.set(INSTALLATION, installation, nx=True)


def owner(client: redis.Redis) -> str | None:
    """Return whose Redis this is, None while it is nobody's."""
    found = client.get(INSTALLATION)
    return None if found is None else _text(found)


def _text(found: object) -> str:
    return found.decode(errors="replace") if isinstance(found, bytes) else str(found)
