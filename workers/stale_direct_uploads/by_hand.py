"""What a person does with the register of direct uploads: try again what failed, adopt what nobody answers for."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import count as count_from
from typing import Any, NamedTuple

import redis

from forgekeeper.declaring.refused import Entry
from forgekeeper.redis_values import moment, whole
from forgekeeper.redis_values import raw as _encode
from forgekeeper.redis_values import text as _decode
from forgekeeper.scripts import call
from forgekeeper.settings import Settings
from forgekeeper.storage.objects import OUTSIDE, is_below, is_normal
from workers.stale_direct_uploads.entries import Failure, member
from workers.stale_direct_uploads.register import ADOPTED, ADOPTION, ATTEMPTS, CLAIMS, DELETING, FAILED, PENDING

PAGE = 1_000
"""So many entries go into one command: a millisecond or so of everybody's time."""


class Withdrawn(NamedTuple):
    """What became of entries to withdraw: those taken off the register, and those that are being deleted right now."""

    members: list[str]
    too_late: list[str]


def registered(client: redis.Redis, location: str, paths: Sequence[str]) -> set[str]:
    """Return those of *paths* that the register names, whatever has become of them."""
    if not paths:
        return set()
    members = [f"{location}:{path}" for path in paths]
    scores = [client.zmscore(key, members) for key in (PENDING, DELETING, FAILED)]
    return {path for path, *found in zip(paths, *scores, strict=True) if any(score is not None for score in found)}


def adopt(client: redis.Redis, location: str, paths: Collection[str], *, stale_after: timedelta) -> int:
    """Register objects, unchanged for a day, that nobody answers for; return how many are new.

    They wait for `ADOPTION`, in which `withdraw` takes them back, and are stale from then on:
    they go the way of every stale upload, with all its checks.
    """
    head_start = math.ceil((ADOPTION - stale_after).total_seconds())
    members = [member(location, path) for path in paths]
    adopted: int = call(client, "upload_adopt", keys=[PENDING, DELETING, FAILED, ADOPTED], args=[head_start, *members])
    return adopted


def adopted(client: redis.Redis) -> dict[str, datetime]:
    """Return the entries that were adopted and are not settled, and when each is due; those due first come first."""
    found: Any = client.zrange(ADOPTED, 0, -1, withscores=True)
    return {_decode(member): moment(score + ADOPTION.total_seconds()) for member, score in found}


def withdraw(client: redis.Redis, members: Sequence[str]) -> Withdrawn:
    """Take adopted entries off the register: their objects stay.

    What a producer has registered is left alone.  It is too late for what a run has claimed:
    its object is about to go.
    """
    keys = [PENDING, DELETING, FAILED, ATTEMPTS, CLAIMS, ADOPTED]
    answers: list[int] = call(client, "upload_withdraw", keys=keys, args=[_encode(member) for member in members])
    told = list(zip(members, answers, strict=True))
    return Withdrawn([member for member, answer in told if answer == 1], [m for m, answer in told if answer == -1])


def failed(client: redis.Redis, limit: int) -> list[Failure]:
    """Return the entries that were given up, those of longest ago first."""
    found: Any = client.zrange(FAILED, 0, limit - 1, withscores=True)
    return [Failure(_decode(member), whole(client.hget(ATTEMPTS, member)), at=moment(score)) for member, score in found]


def failing(client: redis.Redis) -> list[Failure]:
    """Return the entries that have failed and will be tried again, those due first at the head."""
    found = []
    for page in _pages(client, DELETING):
        attempts = client.hmget(ATTEMPTS, [member for member, _ in page])
        found += [
            Failure(_decode(member), whole(tried), again=moment(score))
            for (member, score), tried in zip(page, attempts, strict=True)
            if tried
        ]
    return found


def all_failed(client: redis.Redis) -> list[str]:
    """Return all entries that could not be deleted: those that were given up, and those that will be tried again."""
    given_up: Any = client.zrange(FAILED, 0, -1)
    return [*map(_decode, given_up), *(failure.member for failure in failing(client))]


def retry(client: redis.Redis, members: Collection[str] | None = None) -> int:
    """Let *members* that have failed, or all that have, be tried anew; return how many there were.

    One that a run is at just now is left to it.
    """
    chosen = [_encode(member) for member in (all_failed(client) if members is None else members)]
    keys = [DELETING, FAILED, ATTEMPTS, CLAIMS]
    return sum(call(client, "upload_retry", keys=keys, args=chosen[n : n + PAGE]) for n in range(0, len(chosen), PAGE))


def discard(client: redis.Redis, members: Collection[str] | None = None) -> int:
    """Forget *members* that were given up, or all that were; return how many.  Their objects stay."""
    chosen: Any = client.zrange(FAILED, 0, -1) if members is None else [_encode(member) for member in members]
    # The removal decides whose it is; what is known of it beside is nobody else's then.
    forgotten = [one for one in chosen if client.zrem(FAILED, one)]
    for one in forgotten:
        client.hdel(ATTEMPTS, one)
        client.zrem(ADOPTED, one)
    return len(forgotten)


def refused(client: redis.Redis, settings: Settings, limit: int) -> Iterator[Entry]:
    """Yield up to *limit* entries that were given up, and as many that will be tried again."""
    for one in [*failed(client, limit), *failing(client)[:limit]]:
        yield Entry(one.member, why(one, settings), one.attempts, one.at, one.again)


def why(failure: Failure, settings: Settings) -> str:
    """Say why the entry could not be deleted, by these settings; what a store has said is in the log."""
    if failure.malformed or not is_normal(failure.path):
        return "it names no object"
    if failure.location not in settings.object_stores:
        return f"no store is configured for {failure.location}"
    within = is_below(settings.object_prefixes.get(failure.location, ()), failure.path)
    return "the store refused to delete it: the log says why" if within else f"it is {OUTSIDE}"


def _pages(client: redis.Redis, key: str) -> Iterator[list[tuple[bytes, float]]]:
    """Yield the members and scores of a sorted set, a thousand at a time."""
    for start in count_from(0, PAGE):
        page: Any = client.zrange(key, start, start + PAGE - 1, withscores=True)
        if not page:
            return
        yield page
