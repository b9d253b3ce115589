"""The register of direct uploads that have begun and not completed (batch 100).

It lives in Redis alone and goes by Redis's clock.  An entry is `pending` until either its
producer completes it or a run claims it, in one atomic step: exactly one of them has it.
A claimed entry is in `deleting` until its object is gone, and in `failed` when that could
not be done; there a person finds it.

A worker that was paused for longer than its claim may still delete the object once more
than others have.  That is harmless while a path is used once, as docs/uploads.md demands.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import redis

from forgekeeper import redis_types, scripts
from forgekeeper.redis_values import moment, second, whole
from forgekeeper.redis_values import raw as _encode
from forgekeeper.redis_values import text as _decode
from forgekeeper.scripts import call
from workers.stale_direct_uploads.entries import CLAIM_TTL, BeingDeleted, Claim, Entry, member

scripts.add("workers.stale_direct_uploads")

PENDING = "{pending_direct_uploads}:pending"
DELETING = "{pending_direct_uploads}:deleting"
FAILED = "{pending_direct_uploads}:failed"
ATTEMPTS = "{pending_direct_uploads}:attempts"
CLAIMS = "{pending_direct_uploads}:claims"
ADOPTED = "{pending_direct_uploads}:adopted"
"""What `adopt` has registered, not a producer; an entry stays in it until it is settled."""
redis_types.declare(
    dict.fromkeys((PENDING, DELETING, FAILED, ADOPTED), "zset") | dict.fromkeys((ATTEMPTS, CLAIMS), "hash")
)

MAX_UPLOAD_DURATION = timedelta(hours=3)
ADOPTION = timedelta(days=1)
"""So long an adopted entry waits before it is due: a person may have been wrong, and withdraws it."""

REFERENCE = "pending_direct_uploads"
"""The hash in which the forge itself registers uploads.  Nobody here reads it."""

LONGEST_AHEAD = timedelta(days=1)
"""No entry waits for longer by right: for its next attempt, or for somebody to take it back."""
MAX_ATTEMPTS = 5


class Due(NamedTuple):
    """An entry that a run would claim, and since when."""

    entry: Entry
    since: datetime


class Census(NamedTuple):
    """How many entries there are: pending (`unsettled`), due to be deleted and since when, and given up."""

    pending: int
    due: int
    due_since: datetime | None
    failed: int


def insist(location: str, path: str) -> None:
    """Raise `MalformedUpload` unless an object may be called so."""
    member(location, path)


def prepare(client: redis.Redis, location: str, path: str) -> None:
    """Register an upload that is about to begin.

    Raises `BeingDeleted` while the register still holds the path to delete its object, and
    `MalformedUpload`.  Preparing again starts its time anew.
    """
    keys = [PENDING, DELETING, FAILED, ADOPTED]
    if not call(client, "upload_prepare", keys=keys, args=[member(location, path)]):
        raise BeingDeleted(f"{location}:{path} is being deleted; use another path")


def complete(client: redis.Redis, location: str, path: str) -> bool:
    """Take the upload off the register; return False when it is too late for that.

    After True it is never claimed, as long as Redis does not go back to what it was before; for
    that a producer asks PostgreSQL as well (`workers.stale_direct_uploads.producer`).  After False its object is
    gone or about to go, and the upload must be treated as failed; so must one whose answer was
    lost, for asking again answers False.
    """
    return bool(client.zrem(PENDING, member(location, path)))


def exists(client: redis.Redis, location: str, path: str) -> bool:
    """Say whether the upload is pending."""
    return client.zscore(PENDING, member(location, path)) is not None


def count(client: redis.Redis) -> int:
    """Count the uploads that may still complete, fresh ones too; not what was adopted and waits for its day."""
    seconds, _microseconds = client.time()
    with client.pipeline(transaction=True) as pipe:
        pipe.zcard(PENDING)
        _count_waiting(pipe, seconds)
        pending, waiting = pipe.execute()
    return max(0, int(pending) - int(waiting))


def unsettled(client: redis.Redis) -> int:
    """Count what has neither completed nor been settled: `count`, and the claimed whose object is not gone yet."""
    return count(client) + int(client.zcard(DELETING))


def unread(client: redis.Redis) -> int:
    """Count the uploads in the forge's own register, of which this one knows nothing; 0 where there is none."""
    return int(client.hlen(REFERENCE)) if client.type(REFERENCE) == b"hash" else 0


def sampled(client: redis.Redis, location: str, size: int) -> list[str]:
    """Return the paths of some pending uploads of the location, as their producers have registered them."""
    members: Any = client.zrandmember(PENDING, size) or []
    # What was adopted was found in a store, and so proves nothing about it.
    found = client.zmscore(ADOPTED, members) if members else []
    parts = (_decode(member).partition(":") for member, adopted in zip(members, found, strict=True) if adopted is None)
    return [path for place, _, path in parts if place == location]


def census(client: redis.Redis, stale_after: timedelta) -> Census:
    """Count the entries; due is what a run would claim now."""
    seconds, _microseconds = client.time()
    stale = stale_after.total_seconds()
    with client.pipeline(transaction=False) as pipe:
        pipe.zcard(PENDING)
        pipe.zcount(PENDING, "-inf", f"({seconds - stale}")
        pipe.zcount(DELETING, "-inf", seconds)
        pipe.zrange(PENDING, 0, 0, withscores=True)
        pipe.zrange(DELETING, 0, 0, withscores=True)
        pipe.zcard(FAILED)
        pipe.zcard(DELETING)
        _count_waiting(pipe, seconds)
        pending, fresh_no_more, again, first, first_again, given_up, claimed, waiting = pipe.execute()
    since = [score + stale for _, score in first] + [score for _, score in first_again]
    due_since = min((instant for instant in since if instant <= seconds), default=None)
    first_due = None if due_since is None else moment(due_since)
    return Census(max(0, pending - waiting) + claimed, fresh_no_more + again, first_due, given_up)


def pending_only(client: redis.Redis, location: str, paths: Sequence[str]) -> list[str]:
    """Return those of *paths* that are pending, in their order."""
    if not paths:
        return []
    scores = client.zmscore(PENDING, [member(location, path) for path in paths])
    return [path for path, score in zip(paths, scores, strict=True) if score is not None]


def claim(
    client: redis.Redis,
    *,
    stale_after: timedelta,
    visibility: timedelta,
    limit: int,
    ttl: timedelta = CLAIM_TTL,
    skip_locations: Collection[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Claim:
    """Claim up to *limit* entries: first those whose deletion is due again, then stale ones, oldest first.

    Stale is what was registered more than *stale_after* ago.  Each entry is claimed in one
    atomic step and is nobody else's for *visibility*; fresh entries are not even read.
    The claim may be acted on for *ttl*, which must be more than a second shorter.
    """
    if visibility <= ttl + timedelta(seconds=1):
        raise ValueError("another could take a claim that is still being acted on")
    # Taken before Redis is asked: an answer that is long on its way makes the claim older, not younger.
    result = Claim(secrets.token_hex(8), clock(), [], ttl)
    for source, due_at_age in _sources(stale_after):
        rank = 0
        while rank >= 0 and (left := limit - len(result.entries)) > 0:
            rank, *found = call(
                client,
                "upload_claim",
                keys=[source, PENDING, DELETING, ATTEMPTS, CLAIMS, ADOPTED],
                args=[result.token, due_at_age, math.floor(visibility.total_seconds()), left, rank, *skip_locations],
            )
            result.entries.extend(
                Entry(
                    _decode(member),
                    whole(attempts),
                    second(adopted) if adopted else None,
                    second(registered) if registered else None,
                )
                for member, attempts, adopted, registered in found
            )
    return result


def due(client: redis.Redis, *, stale_after: timedelta, page: int = 1_000) -> Iterator[list[Due]]:
    """Yield what `claim` would claim, in its order, after `set_right`; nothing is claimed."""
    seconds, _microseconds = client.time()
    for source, due_at_age in _sources(stale_after):
        start = 0
        last = seconds - due_at_age
        while found := _scored(client.zrangebyscore(source, "-inf", last, start, page, withscores=True)):
            yield _due(client, found, due_at_age)
            start += page
    ahead = f"({seconds + LONGEST_AHEAD.total_seconds()}"
    found = _scored(client.zrangebyscore(DELETING, ahead, "+inf", 0, page, withscores=True))
    yield _due(client, [(member, seconds) for member, _ in found], 0)


def set_right(client: redis.Redis) -> int:
    """Mend entries from more than a day ahead, which Redis's clock wrote while it was wrong; return how many.

    They count as registered, or due again, now: their time begins anew.
    """
    return int(call(client, "upload_set_right", keys=[PENDING, DELETING], args=[LONGEST_AHEAD.total_seconds()]))


def forget(client: redis.Redis, claim: Claim, entries: Collection[Entry]) -> int:
    """Drop entries whose object is gone; return how many were still ours."""
    return _settle(client, "upload_forget", [DELETING, ATTEMPTS, CLAIMS, ADOPTED], claim, entries)


def keep(client: redis.Redis, claim: Claim, entries: Collection[Entry]) -> int:
    """Drop entries whose object must stay because something else answers for it; return how many were still ours."""
    return _settle(client, "upload_forget", [DELETING, ATTEMPTS, CLAIMS, ADOPTED], claim, entries)


def put_back(client: redis.Redis, claim: Claim, entries: Collection[Entry]) -> int:
    """Give entries back untried, at no attempt; return how many were still ours.

    They are due at once.  Whoever goes on claiming names their location in *skip_locations*,
    or gets them again.
    """
    return _settle(client, "upload_put_back", [DELETING, CLAIMS], claim, entries)


def fail(client: redis.Redis, claim: Claim, entry: Entry, *, backoff: timedelta) -> bool:
    """Count a failed attempt; return True when it was the last, and the entry lies in `failed`.

    Otherwise it is due again after *backoff*, twice as long after each further attempt.
    """
    return _fail(client, claim, [entry], MAX_ATTEMPTS, backoff) > 0


def reject(client: redis.Redis, claim: Claim, entries: Collection[Entry]) -> int:
    """Move entries that cannot be tried to `failed` at once; return how many lie there."""
    return _fail(client, claim, entries, 1, timedelta())


def _sources(stale_after: timedelta) -> tuple[tuple[str, int], ...]:
    """Return whence entries are claimed, and how many seconds past its score one is due there."""
    # Redis compares whole seconds: only from one more on is it surely longer than *stale_after*.
    return (DELETING, 0), (PENDING, math.ceil(stale_after.total_seconds()) + 1)


def _scored(found: Any) -> list[tuple[bytes, float]]:
    """Say what a sorted set answers with scores: the client's types do not."""
    return list(found)


def _due(client: redis.Redis, found: Sequence[tuple[bytes, float]], due_at_age: int) -> list[Due]:
    if not found:
        return []
    members: Any = [member for member, _ in found]
    attempts, registered = client.hmget(ATTEMPTS, members), client.zmscore(PENDING, members)
    adopted = [
        # With a whole second a producer has taken the path over.
        None if own is not None and own % 1 == 0 else since
        for own, since in zip(registered, client.zmscore(ADOPTED, members), strict=True)
    ]
    return [
        Due(Entry(_decode(member), whole(tries), None if since is None else int(since)), moment(score + due_at_age))
        for (member, score), tries, since in zip(found, attempts, adopted, strict=True)
    ]


def last_seen(adopted: int) -> datetime:
    """Return an instant by which an adopted object had been written: it was older than a day by the store's clock.

    Half of that day is left for clocks that differ.
    """
    return moment(adopted) - ADOPTION / 2


def _count_waiting(pipe: redis.Redis, seconds: int) -> None:
    pipe.zcount(ADOPTED, f"({seconds - ADOPTION.total_seconds()}", "+inf")


def _fail(client: redis.Redis, claim: Claim, entries: Collection[Entry], attempts: int, backoff: timedelta) -> int:
    keys = [DELETING, FAILED, ATTEMPTS, CLAIMS]
    return _settle(client, "upload_fail", keys, claim, entries, attempts, math.ceil(backoff.total_seconds()))


def _settle(
    client: redis.Redis, script: str, keys: list[str], claim: Claim, entries: Collection[Entry], *args: int
) -> int:
    if not entries:
        return 0
    members = [_encode(entry.member) for entry in entries]
    settled: int = call(client, script, keys=keys, args=[claim.token, *args, *members])
    return settled
