"""Whether database, Redis and the places that are deleted from belong to one installation.

So a wrong URL, bucket or mount is refused, and nothing of another installation is deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import peewee as pw
import redis

from forgekeeper.connections import client
from forgekeeper.coordination.values import DECLARED
from forgekeeper.database import sqlstate
from forgekeeper.database.installation import Installation
from forgekeeper.installation import place
from forgekeeper.settings import Place, Settings
from forgekeeper.storage import sentinel
from forgekeeper.storage.outbox import DeletedObject

INSTALLATION = "forgekeeper:installation"
"""String, the id of the one installation that keeps its messages here."""
DECLARED.update({INSTALLATION: "string"})

UNDEFINED_TABLE = "42P01"


class Disagreement(Exception):
    """The database and Redis, or a place, belong to different installations; the message says what to do."""


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


def agree() -> str:
    """Return the id on which database and Redis agree, and claim a Redis that is nobody's; raise `Disagreement`.

    A database in another place claims nothing: it may be a copy.
    """
    try:
        ours = Installation.ensure()
    except pw.ProgrammingError as error:
        if sqlstate(error) != UNDEFINED_TABLE:
            raise
        raise Disagreement("the database has no installation's id: run `forgekeeper migrate`") from error
    theirs = (owner(client) or ours) if place.objection() else claim(client, ours)
    if theirs != ours:
        raise Disagreement(conflict(ours, theirs))
    return ours


def conflict(ours: str, theirs: str) -> str:
    """Write that the Redis is another installation's, and what can be done."""
    return (
        f"the database is of installation {ours}, Redis of installation {theirs}: give each a Redis of its own "
        f"(FORGEKEEPER_REDIS_URL), or delete Redis's key {INSTALLATION} if that installation is no more"
    )


def require(deletes_from: Place | None, settings: Settings, *, claims: bool = True) -> None:
    """Raise `Disagreement` unless database, Redis and the places that are deleted from are one installation's.

    A database that was copied or moved is not, until a person says which it is.  Redis and places that do not answer
    are left out: the batch fails if it needs them.  Where nothing *claims*, nothing is written, and a Redis that is
    away raises.
    """
    if said := place.objection():
        raise Disagreement(said)
    ours = _claimed() if claims else _known()
    if ours is None:
        return  # a worker will make one
    root = settings.repositories_root
    if deletes_from == "repositories" and root is not None:
        _require_place(lambda: sentinel.Folder(root), ours)
    for location, url in settings.object_stores.items():
        if deletes_from == "stores" or (deletes_from == "artifacts" and location == DeletedObject.location):
            _require_place(partial(sentinel.Store, location, url.get_secret_value()), ours)


def _claimed() -> str:
    try:
        return agree()
    except redis.RedisError:
        return Installation.ensure()


def _known() -> str | None:
    ours, theirs = Installation.known(), owner(client)
    if ours is not None and theirs not in (None, ours):
        raise Disagreement(conflict(ours, theirs))
    return ours


def _require_place(opened: Callable[[], sentinel.Place], ours: str) -> None:
    with suppress(sentinel.Unreadable):
        at = opened()
        found = at.sentinel()
        if found is not None and (said := sentinel.objection(at, found, ours)):
            raise Disagreement(said)
