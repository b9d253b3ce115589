"""Objects that nothing names are adopted: put into the register, where a person can still withdraw them (batch 100)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import redis

from forgekeeper.coordination.scripts import call
from forgekeeper.coordination.values import moment, raw, text
from workers.stale_direct_uploads.entries import member
from workers.stale_direct_uploads.register import ADOPTED, ADOPTION, ATTEMPTS, CLAIMS, DELETING, FAILED, PENDING


class Withdrawn(NamedTuple):
    """What became of entries to withdraw: those taken off the register, and those that are being deleted right now."""

    members: list[str]
    too_late: list[str]


def registered(client: redis.Redis, location: str, paths: Sequence[str]) -> set[str]:
    """Return those of *paths* that the register names, pending or not."""
    if not paths:
        return set()
    members = [f"{location}:{path}" for path in paths]
    scores = [client.zmscore(key, members) for key in (PENDING, DELETING, FAILED)]
    return {path for path, *found in zip(paths, *scores, strict=True) if any(score is not None for score in found)}


def adopt(client: redis.Redis, location: str, paths: Collection[str], *, stale_after: timedelta) -> int:
    """Register objects, unchanged for a day, that nothing names; return how many are new.

    They wait for `ADOPTION`, in which `withdraw` takes them back, and are stale from then on: they are deleted as every
    stale upload is, with all its checks.
    """
    head_start = math.ceil((ADOPTION - stale_after).total_seconds())
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
    keys = [PENDING, DELETING, FAILED, ATTEMPTS, CLAIMS, ADOPTED]
    answers: list[int] = call(client, "upload_withdraw", keys=keys, args=[raw(member) for member in members])
    became = list(zip(members, answers, strict=True))
    return Withdrawn([one for one, answer in became if answer == 1], [one for one, answer in became if answer == -1])
