"""One installation: everything that a process has been pointed at has to belong to it.

The id is made with the database and claimed for Redis; every sentinel carries it.  A wrong
URL, bucket or mount then is a refusal, and not somebody else's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import peewee as pw
import redis

from forgekeeper.connections import client
from forgekeeper.database import sqlstate
from forgekeeper.delivery.queues import INSTALLATION
from forgekeeper.installation import place
from forgekeeper.installation.in_redis import claim, owner
from forgekeeper.installation.row import Installation
from forgekeeper.settings import Place, Settings
from forgekeeper.storage import sentinel, stores
from forgekeeper.storage.objects import StoreUnavailable

UNDEFINED_TABLE = "42P01"


class Disagreement(Exception):
    """The database and Redis, or a place, belong to different installations; the message says what to do."""


def agree() -> str:
    """Return the id on which database and Redis agree, and claim a Redis that is nobody's.

    From a place that is not the installation's nothing is claimed: the database may be a copy.  Raises `Disagreement`,
    and what the servers raise when they are away.
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
    """Say that the Redis is another installation's, and what can be done."""
    return (
        f"the database is of installation {ours}, Redis of installation {theirs}: give each a Redis of its own "
        f"(FORGEKEEPER_REDIS_URL), or delete Redis's key {INSTALLATION} if that installation is no more"
    )


def require(deletes_from: Place | None, settings: Settings) -> None:
    """Raise `Disagreement` unless database, Redis and the places that are deleted from are one installation's.

    In a copy of the installation's database, and in one that was moved, they are not until a person says which it is.
    What does not answer, or has no sentinel, is not this question's: the batch finds out if it needs that.
    """
    require_own_place()
    try:
        ours = agree()
    except redis.RedisError:
        ours = Installation.ensure()
    require_places(deletes_from, settings, ours)


def require_own_place() -> None:
    """Raise `Disagreement` unless the database is where the installation was last."""
    if said := place.objection():
        raise Disagreement(said)


def known() -> str | None:
    """Return the id of the database, None where it has none; raise `Disagreement` unless all agree as in a run.

    Claims nothing, and makes none.
    """
    require_own_place()
    ours = Installation.known()
    theirs = owner(client)
    if ours is not None and theirs not in (None, ours):
        raise Disagreement(conflict(ours, theirs))
    return ours


def require_places(deletes_from: Place | None, settings: Settings, ours: str) -> None:
    """Raise `Disagreement` unless the places that are deleted from are installation *ours*; as far as they answer."""
    for where, look in places(deletes_from, settings):
        try:
            found = look()
        except (sentinel.Unreadable, StoreUnavailable):
            continue
        if found is not None and (said := sentinel.objection(where, found, ours)):
            raise Disagreement(said)


def places(
    deletes_from: Place | None, settings: Settings
) -> Iterator[tuple[str, Callable[[], sentinel.Sentinel | None]]]:
    """Yield the places that a batch deletes from, as far as they are configured, and how to read their sentinels."""
    root, locations = settings.repositories_root, settings.object_stores
    if deletes_from == "repositories" and root is not None:
        yield str(root), sentinel.Folder(root).sentinel
    for location in locations:
        if deletes_from == "stores" or (deletes_from == "artifacts" and location == stores.ARTIFACTS):
            yield location, partial(_of_store, location, settings)


def _of_store(location: str, settings: Settings) -> sentinel.Sentinel | None:
    store = stores.at(location, settings)
    assert store is not None
    return store.sentinel()
