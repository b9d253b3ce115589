"""The id of the installation that a Redis belongs to: the first that claims it."""

from __future__ import annotations

import redis

from forgekeeper.coordination import key_types

INSTALLATION = "forgekeeper:installation"
"""String, the id of the one installation that keeps its messages here."""
key_types.declare({INSTALLATION: "string"})


def claim(client: redis.Redis, installation: str) -> str:
    """Claim this Redis for *installation* unless it is claimed; return whose it is."""
    while (found := client.get(INSTALLATION)) is None:
        client.set(INSTALLATION, installation, nx=True)
    return _text(found)


def claim_by_writing(client: redis.Redis, installation: str) -> None:
    """Claim this Redis unless it is claimed; raise what it answers where it takes no writes."""
    client.set(INSTALLATION, installation, nx=True)


def owner(client: redis.Redis) -> str | None:
    """Return whose Redis this is, None while it is nobody's."""
    found = client.get(INSTALLATION)
    return None if found is None else _text(found)


def _text(found: object) -> str:
    return found.decode(errors="replace") if isinstance(found, bytes) else str(found)
