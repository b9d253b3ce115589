"""The register of direct uploads that have begun and not completed (batch 100).

It lives in Redis alone and goes by Redis's clock.  An entry is `pending` until either its producer completes it or a
run claims it, in one atomic step: exactly one of them has it.  A claimed entry is in `deleting` until its object is
gone, and in `failed` when that could not be done; there a person finds it.

A worker that was paused for longer than its claim may still delete the object once more than others have.  That is
harmless while a path is used once, as docs/uploads.md demands.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import redis
from peewee import chunked

from forgekeeper.platform.connections import add_scripts, call
from forgekeeper.platform.coordination.values import misfits, moment, raw, second, text, whole
from workers.stale_direct_uploads import bridge
from workers.stale_direct_uploads.entries import BeingDeleted, Claim, Entry, member
from workers.stale_direct_uploads.keys import (
    ADOPTED,
    ATTEMPTS,
    CLAIMS,
    DELETING,
    DUE_AT_AGE,
    FAILED,
    LONGEST_AHEAD,
    MAX_UPLOAD_DURATION,
    PAGE,
    PENDING,
    REFERENCE,
)

add_scripts("workers.stale_direct_uploads")

ADOPTION = timedelta(days=1)
"""How long an adopted entry waits before it is due: a person may have been wrong, and withdraws it."""
SOURCES = ((DELETING, 0), (PENDING, DUE_AT_AGE))
"""The sets that entries are claimed from, and how many seconds past its score one is due there."""
MAX_ATTEMPTS = 5


class Due(NamedTuple):
    """An entry that a run would claim, and since when; *bridged* says that the forge's own register has it still."""

    entry: Entry
    since: datetime
    bridged: bool = False


class Census(NamedTuple):
    """How many entries have neither completed nor been settled, are due and since when, and how many have failed.

    *unreadable* are those of the forge's own register whose time is none, *first* is one of them.
    """

    pending: int
    due: int
    due_since: datetime | None
    failed: int
    unreadable: int = 0
    first: str = ""


def prepare(client: redis.Redis, location: str, path: str) -> None:
    """Register an upload that is about to begin; one that is prepared again has three hours from then.

    Raises `BeingDeleted` while the register still holds the path to delete its object, and `MalformedUpload`.
    """
    keys = [PENDING, DELETING, FAILED, ADOPTED]
    if not call(client, "upload_prepare", keys=keys, args=[member(location, path)]):
        raise BeingDeleted(f"{location}:{path} is being deleted; use another path")


def complete(client: redis.Redis, location: str, path: str) -> bool:
    """Take the upload off the register; return False when it is too late for that, as `producer.complete` explains.

    After True it is never claimed, unless Redis goes back to what it was before; for that PostgreSQL is asked as well.
    """
    return bool(client.zrem(PENDING, member(location, path)))


def count(client: redis.Redis) -> int:
    """Count the uploads that may still complete, fresh ones too; not what was adopted and waits for its day."""
    seconds, _microseconds = client.time()
    with client.pipeline(transaction=True) as pipe:
        pipe.zcard(PENDING)
        _count_waiting(pipe, seconds)
        pending, waiting = pipe.execute()
    return max(0, int(pending) - int(waiting)) + bridge.size(client)


def unread(client: redis.Redis) -> list[str]:
    """Return a sentence where uploads are registered in the forge's own register, and this batch cannot read that."""
    if bridge.bridges(client):
        return list(misfits(client, {REFERENCE: "hash"}))
    count = client.hlen(REFERENCE) if client.type(REFERENCE) == b"hash" else 0
    said = f"Redis has a hash {REFERENCE} with {count} uploads, which this batch does not read: "
    cure = "set FORGEKEEPER_UPLOADS_REGISTER=hash and it does, let the forge register them as docs/uploads.md says, "
    return [f"{said}{cure}or give forgekeeper a Redis of its own"] if count else []


def sampled(client: redis.Redis, location: str, size: int) -> list[str]:
    """Return the paths of some pending uploads of the location, as their producers have registered them."""
    pending: Any = client.zrandmember(PENDING, size) or []
    members = [*pending, *bridge.sampled(client, size)]
    # What was adopted was found in a store, and so proves nothing about it.
    found = client.zmscore(ADOPTED, members) if members else []
    parts = (text(member).partition(":") for member, adopted in zip(members, found, strict=True) if adopted is None)
    return [path for place, _, path in parts if place == location]


def census(client: redis.Redis) -> Census:
    """Count the entries; due is what a run would claim now."""
    seconds, _microseconds = client.time()
    stale = MAX_UPLOAD_DURATION.total_seconds()
    with client.pipeline(transaction=False) as pipe:
        pipe.zcard(PENDING)
        pipe.zcount(PENDING, "-inf", f"({seconds - stale}")
        pipe.zcount(DELETING, "-inf", seconds)
        pipe.zrange(PENDING, 0, 0, withscores=True)
        pipe.zrange(DELETING, 0, 0, withscores=True)
        pipe.zcard(FAILED)
        pipe.zcard(DELETING)
        _count_waiting(pipe, seconds)
        pending, stale_now, again, first, first_again, failed, claimed, waiting = pipe.execute()
    theirs = bridge.count(client)
    since = [score + stale for _, score in first] + [score for _, score in first_again]
    since += [] if theirs.oldest is None else [theirs.oldest + stale]
    due_since = min((moment(instant) for instant in since if instant <= seconds), default=None)
    ours, due_now = max(0, pending - waiting) + claimed, stale_now + again
    known = ours + theirs.registered, due_now + theirs.due, due_since, failed
    return Census(*known, theirs.unreadable, theirs.first)


def pending_only(client: redis.Redis, location: str, paths: Sequence[str]) -> list[str]:
    """Return those of *paths* that are pending, in their order."""
    if not paths:
        return []
    members = [member(location, path) for path in paths]
    scores, theirs = client.zmscore(PENDING, members), bridge.named(client, members)
    found = zip(paths, members, scores, strict=True)
    return [path for path, name, score in found if score is not None or name in theirs]


def claim(client: redis.Redis, *, visibility: timedelta, limit: int, only: Collection[str] | None = None) -> Claim:
    """Claim up to *limit* entries: first those whose deletion is due again, then stale ones, oldest first.

    With *only* these members, as far as they are due.  Each entry is claimed in one atomic step, and no other claim
    gets it for *visibility*; fresh entries are not read.  Where there is none, what is stale in the forge's own
    register is moved here, in no order, and claimed.
    """
    result, names = Claim(secrets.token_hex(8), []), None if only is None else {*map(raw, only)}
    if names == set():
        return result
    claim = partial(_claim, client, result, visibility=visibility, limit=limit, only=names or ())
    for source in SOURCES:
        claim(source)
    # Others may claim what was moved.
    while not result.entries and bridge.move(client, limit=limit, only=names):
        claim((PENDING, DUE_AT_AGE))
    return result


def _claim(
    client: redis.Redis,
    result: Claim,
    source: tuple[str, int],
    *,
    visibility: timedelta,
    limit: int,
    only: Collection[bytes],
) -> None:
    key, due_at_age = source
    keys = [key, PENDING, DELETING, ATTEMPTS, CLAIMS, ADOPTED]
    args = [result.token, due_at_age, math.floor(visibility.total_seconds()), limit - len(result.entries), *only]
    for name, attempts, *seconds in call(client, "upload_claim", keys=keys, args=args):
        adopted, registered = (second(one) if one else None for one in seconds)
        result.entries.append(Entry(text(name), whole(attempts), adopted, registered))


def due(client: redis.Redis) -> Iterator[list[Due]]:
    """Yield what `claim` would claim, in its order, after `correct_clock`; nothing is claimed."""
    seconds, _microseconds = client.time()
    for source, due_at_age in SOURCES:
        last, start = seconds - due_at_age, 0
        while found := scored(client.zrangebyscore(source, "-inf", last, start, PAGE, withscores=True)):
            yield dated(client, found, due_at_age)
            start += PAGE
    ahead: Any = client.zrangebyscore(DELETING, _ahead(seconds), "+inf", 0, PAGE)
    yield dated(client, [(member, seconds) for member in ahead])
    for theirs in bridge.stale(client):
        yield [one._replace(bridged=True) for one in dated(client, theirs, DUE_AT_AGE)]


def correct_clock(client: redis.Redis) -> int:
    """Correct entries from more than a day ahead, which Redis's clock wrote while it was wrong; return how many.

    They count as registered, or due again, now: their time begins again.
    """
    seconds, _microseconds = client.time()
    corrected = 0
    for key in (PENDING, DELETING):
        ahead: Any = client.zrangebyscore(key, _ahead(seconds), "+inf", 0, PAGE)
        if ahead:
            # Only what is there still, and later than now: others may settle it meanwhile.
            corrected += int(client.zadd(key, dict.fromkeys(ahead, seconds), xx=True, lt=True, ch=True) or 0)
    return corrected


def forget(client: redis.Redis, claim: Claim, entries: Collection[Entry]) -> int:
    """Drop entries whose object is gone, or must stay because something names it; return how many were still ours."""
    return sum(_settle(client, claim, entries, "forget"))


def put_back(client: redis.Redis, claim: Claim, entries: Collection[Entry]) -> int:
    """Give entries back untried, at no attempt, due at once; return how many were still ours."""
    return sum(_settle(client, claim, entries, "put_back"))


def find_lost(client: redis.Redis, claim: Claim, entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries that the claim does not hold any more: they were settled, or claimed by another run."""
    if not entries:
        return []
    holders: Any = client.hmget(CLAIMS, [raw(entry.member) for entry in entries])
    token = claim.token.encode()
    return [entry for entry, holder in zip(entries, holders, strict=True) if holder != token]


def fail(client: redis.Redis, claim: Claim, entry: Entry, *, backoff: timedelta) -> bool:
    """Count a failed attempt; return True when it was the last, and the entry is in `failed`.

    Otherwise it is due again after *backoff*, twice as long after each further attempt.
    """
    return sum(_settle(client, claim, [entry], "fail", (MAX_ATTEMPTS, math.ceil(backoff.total_seconds())))) > 0


def reject(client: redis.Redis, claim: Claim, entries: Collection[Entry]) -> int:
    """Move entries that cannot be tried to `failed` at once; return how many are there."""
    return sum(_settle(client, claim, entries, "fail", (1, 0)))


def _settle(
    client: redis.Redis, claim: Claim, entries: Collection[Entry], what: str, numbers: tuple[int, int] = (0, 0)
) -> list[int]:
    return settle(client, what, [entry.member for entry in entries], claim.token, numbers)


def settle(
    client: redis.Redis, what: str, members: Collection[str], token: str = "", numbers: tuple[int, int] = (0, 0)
) -> list[int]:
    """Settle entries as the script says; return for each whether that was done."""
    keys, args = [PENDING, DELETING, FAILED, ATTEMPTS, CLAIMS, ADOPTED], [what, token, *numbers]
    pages = (call(client, "upload_settle", keys=keys, args=[*args, *page]) for page in chunked(map(raw, members), PAGE))
    return [answer for page in pages for answer in page]


def last_seen(adopted: int) -> datetime:
    """Return an instant by which an adopted object had been written: it was older than a day by the store's clock.

    Half of that day is left for clocks that differ.
    """
    return moment(adopted) - ADOPTION / 2


def scored(found: Any) -> list[tuple[bytes, float]]:
    """Type what a sorted set answers with scores: the client's types do not."""
    return list(found)


def dated(client: redis.Redis, found: Sequence[tuple[bytes, float]], due_at_age: int = 0) -> list[Due]:
    """Say of members of a set, with their scores, what is known of them; each is due so long past its score."""
    members: Any = [member for member, _ in found]
    if not members:
        return []
    attempts, adopted = client.hmget(ATTEMPTS, members), client.zmscore(ADOPTED, members)
    return [
        Due(Entry(text(member), whole(tries), None if since is None else second(since)), moment(score + due_at_age))
        for (member, score), tries, since in zip(found, attempts, adopted, strict=True)
    ]


def _ahead(seconds: int) -> str:
    return f"({seconds + LONGEST_AHEAD.total_seconds()}"


def _count_waiting(pipe: redis.Redis, seconds: int) -> None:
    pipe.zcount(ADOPTED, f"({seconds - ADOPTION.total_seconds()}", "+inf")
