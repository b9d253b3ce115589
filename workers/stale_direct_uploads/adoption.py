"""Objects of a store that nothing names: found, and adopted, that is put into the register (batch 100).

There a person can still withdraw them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import redis

from forgekeeper.cli.console import Problem, wrong_use
from forgekeeper.coordination.client import call
from forgekeeper.coordination.values import moment, text
from forgekeeper.database import now
from forgekeeper.settings import Settings
from forgekeeper.storage import stores
from forgekeeper.storage.objects import StoreUnavailable
from models import JobArtifact
from workers.stale_direct_uploads import register
from workers.stale_direct_uploads.entries import member
from workers.stale_direct_uploads.register import ADOPTED, ADOPTION, DELETING, FAILED, PENDING

ORPHAN_AFTER = timedelta(days=1)
"""An upload may last three hours; whatever is a day old and named by nothing was left behind."""
MOST_UNNAMED = 0.1
"""A larger share of the objects that nothing names speaks of another database, or of a store that others share."""


class Found(NamedTuple):
    """What lies below a prefix: how many objects older than a day, how many of them the database names, and the rest.

    *orphans* are those that nothing names, not even the register; *outside* counts such as may not be deleted.
    """

    examined: int
    named: int
    orphans: list[str]
    outside: int

    def refusal(self, expect: int | None) -> str | None:
        """Return why the orphans must not be registered, None if they may; *expect* is their number, repeated."""
        number = len(self.orphans)
        if expect is not None:
            return None if expect == number else f"{expect} objects were expected and {number} are named by nothing"
        repeat = f"if they may all go, repeat their number: --expect {number}"
        if number and not self.named:
            return f"nothing in this database names any of the {self.examined} objects: is it the right one? {repeat}"
        if number > MOST_UNNAMED * self.examined:
            return f"{number} of {self.examined} objects are named by nothing, more than {MOST_UNNAMED:.0%}; {repeat}"
        return None


class Withdrawn(NamedTuple):
    """What became of entries to withdraw: those taken off the register, and those that are being deleted right now."""

    members: list[str]
    too_late: list[str]


def look(client: redis.Redis, location: str, prefix: str, settings: Settings) -> Found:
    """Find what was left behind below *prefix*; ends the command where the store cannot be used."""
    if location not in settings.object_stores:
        wrong_use(f"there is no object store {location!r}; there are: {', '.join(settings.object_stores) or 'none'}")
    try:
        store = stores.at(location, settings)
        assert store is not None
        horizon = now() - ORPHAN_AFTER
        found, named, unnamed = list(store.listed(prefix, before=horizon)), 0, list[str]()
        for page in register.pages(found):
            in_database = stores.answered_for(JobArtifact, location, page, settings)
            named += len(in_database)
            known = in_database.keys() | _registered(client, location, page)
            unnamed += [path for path in page if path not in known]
        allowed = [path for path in unnamed if store.may_delete(path)]
        # A listing may spell a name otherwise than its object does, and so mean another.
        orphans = [path for path in allowed if (written := store.written(path)) is not None and written < horizon]
        return Found(len(found), named, orphans, len(unnamed) - len(allowed))
    except StoreUnavailable as error:
        hint = "leave a name that cannot be listed out with --prefix; else `forgekeeper check` looks for the cause"
        raise Problem(f"object store {error}; {hint}") from error


def _registered(client: redis.Redis, location: str, paths: Sequence[str]) -> Iterator[str]:
    """Yield those of *paths* that the register names, pending or not."""
    members = [f"{location}:{path}" for path in paths]
    scores = [client.zmscore(key, members) for key in (PENDING, DELETING, FAILED)]
    return (path for path, *found in zip(paths, *scores, strict=True) if any(score is not None for score in found))


def adopt(client: redis.Redis, location: str, paths: Collection[str]) -> int:
    """Register objects, unchanged for a day, that nothing names; return how many are new.

    They wait for `ADOPTION`, in which `withdraw` takes them back, and are stale from then on: they are deleted as every
    stale upload is, with all its checks.
    """
    head_start = math.ceil((ADOPTION - register.MAX_UPLOAD_DURATION).total_seconds())
    members = [member(location, path) for path in paths]
    keys = [PENDING, DELETING, FAILED, ADOPTED]
    return int(call(client, "upload_adopt", keys=keys, args=[head_start, *members]))


def adopted(client: redis.Redis) -> dict[str, datetime]:
    """Return the entries that were adopted and are not settled, and when each is due; those due first come first."""
    found: Any = client.zrange(ADOPTED, 0, -1, withscores=True)
    return {text(member): moment(score + ADOPTION.total_seconds()) for member, score in found}


def withdraw(client: redis.Redis, members: Sequence[str]) -> Withdrawn:
    """Take adopted entries off the register: their objects stay.

    What a producer has registered stays there.  It is too late for what a run has claimed: its object is about to go.
    """
    became = list(zip(members, register.settle(client, "withdraw", members), strict=True))
    return Withdrawn([one for one, answer in became if answer == 1], [one for one, answer in became if answer == -1])
