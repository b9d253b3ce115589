"""A register of uploads in Redis: prepare, complete, claim, settle, adopt and count entries.

An entry is pending until either its producer completes it or a run claims it, in one atomic step: only the producer or
the run gets it.  A claimed entry is in `deleting` until its object is deleted, and in `failed` if that was impossible;
there a person finds it.  Redis's clock sets all times.

A worker that was suspended for longer than its claim may delete the object after another worker has deleted it.  That
is harmless while a path is used once, as docs/uploads.md demands.
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

from forgekeeper.api.objects import Register
from forgekeeper.platform.connections import add_scripts, run_script
from forgekeeper.platform.coordination.redis_values import (
    decode_text,
    encode_text,
    find_wrong_types,
    parse_count,
    parse_second,
    to_datetime,
)
from forgekeeper.sources.register.bridge import Bridge
from forgekeeper.sources.register.entries import (
    BeingDeleted,
    DueEntry,
    EntryCounts,
    UploadClaim,
    UploadEntry,
    build_member,
)
from forgekeeper.sources.register.keys import ENTRIES_PER_COMMAND, MAX_TIME_AHEAD, RegisterKeys

add_scripts("forgekeeper.sources.register")

ADOPTION_DELAY = timedelta(days=1)
"""Time from the adoption of an entry until it is due.  Until then a person may withdraw it."""


class WithdrawalResult(NamedTuple):
    """Entries that were removed from the register, and entries whose objects are being deleted right now."""

    forgotten: list[str]
    too_late: list[str]


class RedisRegister:
    """The entries of a *register*; it holds no state, so there may be several."""

    def __init__(self, register: Register) -> None:
        self.register, self.keys = register, RegisterKeys.for_register(register.name)
        # Redis compares whole seconds: an entry is certainly older only after another second.
        self._due_at_age = int(register.older_than.total_seconds()) + 1
        self.bridge = Bridge(self.keys, self._due_at_age)
        self._claim_sources = ((self.keys.deleting, 0), (self.keys.pending, self._due_at_age))
        """The sets from which entries are claimed, and the seconds from an entry's score until it is due."""

    def prepare(self, client: redis.Redis, location: str, path: str) -> None:
        """Register an upload that is about to begin; preparing it again makes the entry new.

        Raises `BeingDeleted` while the register still has the path to delete its object, and `MalformedUpload`.
        """
        keys = [self.keys.pending, self.keys.deleting, self.keys.failed, self.keys.adopted]
        if not run_script(client, "upload_prepare", keys=keys, args=[build_member(location, path)]):
            raise BeingDeleted(f"{location}:{path} is being deleted; use another path")

    def complete(self, client: redis.Redis, location: str, path: str) -> bool:
        """Remove an upload from the register; return False if it is too late, as `Producer.complete` explains.

        After True no run claims it, unless Redis returns to an earlier state; for this case runs also ask PostgreSQL.
        """
        return bool(client.zrem(self.keys.pending, build_member(location, path)))

    def count_pending(self, client: redis.Redis) -> int:
        """Count the uploads that may still complete, without adopted entries that still wait."""
        seconds, _microseconds = client.time()
        with client.pipeline(transaction=True) as pipe:
            pipe.zcard(self.keys.pending)
            self._count_waiting(pipe, seconds)
            pending, waiting = pipe.execute()
        return max(0, int(pending) - int(waiting)) + self.bridge.count_registered(client)

    def describe_unread_uploads(self, client: redis.Redis) -> list[str]:
        """Return a sentence if uploads are in the forge's own register, which is not readable."""
        key = self.keys.hash
        if self.bridge.is_open(client):
            return list(find_wrong_types(client, {key: "hash"}))
        count = client.hlen(key) if client.type(key) == b"hash" else 0
        said = f"Redis has a hash {key} with {count} uploads, which this batch does not read: "
        cure = (
            "set FORGEKEEPER_UPLOADS_REGISTER=hash to read it, let the forge register uploads as docs/uploads.md says, "
        )
        return [f"{said}{cure}or give forgekeeper a Redis of its own"] if count else []

    def sample_paths(self, client: redis.Redis, location: str, size: int) -> list[str]:
        """Return the paths of some pending uploads of the location, as their producers have registered them."""
        pending: Any = client.zrandmember(self.keys.pending, size) or []
        members = [*pending, *self.bridge.sample_members(client, size)]
        # Adopted entries were found in a store, and so prove nothing about it.
        found = client.zmscore(self.keys.adopted, members) if members else []
        parts = (
            decode_text(member).partition(":")
            for member, adopted in zip(members, found, strict=True)
            if adopted is None
        )
        return [path for place, _, path in parts if place == location]

    def count_entries(self, client: redis.Redis) -> EntryCounts:
        """Count the entries; entries that a run would claim now are due."""
        seconds, _microseconds = client.time()
        keys, stale = self.keys, self.register.older_than.total_seconds()
        with client.pipeline(transaction=False) as pipe:
            pipe.zcard(keys.pending)
            pipe.zcount(keys.pending, "-inf", f"({seconds - stale}")
            pipe.zcount(keys.deleting, "-inf", seconds)
            pipe.zrange(keys.pending, 0, 0, withscores=True)
            pipe.zrange(keys.deleting, 0, 0, withscores=True)
            pipe.zcard(keys.failed)
            pipe.zcard(keys.deleting)
            self._count_waiting(pipe, seconds)
            pending, stale_now, again, first, first_again, failed, claimed, waiting = pipe.execute()
        theirs = self.bridge.count_by_state(client)
        since = [score + stale for _, score in first] + [score for _, score in first_again]
        since += [] if theirs.oldest is None else [theirs.oldest + stale]
        due_since = min((to_datetime(instant) for instant in since if instant <= seconds), default=None)
        ours, due_now = max(0, pending - waiting) + claimed, stale_now + again
        known = ours + theirs.registered, due_now + theirs.due, due_since, failed
        return EntryCounts(*known, theirs.unreadable, theirs.unreadable_example)

    def _count_waiting(self, pipe: redis.Redis, seconds: int) -> None:
        pipe.zcount(self.keys.adopted, f"({seconds - ADOPTION_DELAY.total_seconds()}", "+inf")

    def pending_only(self, client: redis.Redis, location: str, paths: Sequence[str]) -> list[str]:
        """Return the *paths* that are pending, in their order."""
        if not paths:
            return []
        members = [build_member(location, path) for path in paths]
        scores, theirs = client.zmscore(self.keys.pending, members), self.bridge.find_registered(client, members)
        found = zip(paths, members, scores, strict=True)
        return [path for path, name, score in found if score is not None or name in theirs]

    def find_registered(self, client: redis.Redis, location: str, paths: Sequence[str]) -> set[str]:
        """Return the *paths* that the register names, pending or not."""
        members = [f"{location}:{path}" for path in paths]
        scores = [client.zmscore(key, members) for key in (self.keys.pending, self.keys.deleting, self.keys.failed)]
        theirs = self.bridge.find_registered(client, members)
        found = zip(paths, members, *scores, strict=True)
        return {path for path, name, *some in found if name in theirs or any(score is not None for score in some)}

    def claim(
        self, client: redis.Redis, *, visibility: timedelta, limit: int, only: Collection[str] | None = None
    ) -> UploadClaim:
        """Claim up to *limit* entries: first entries whose deletion is due again, then stale entries, oldest first.

        With *only*, other members are left.  Each entry is claimed in one atomic step, and no other claim gets it for
        *visibility*; fresh entries are not read.  If no entry is due, stale fields of the forge's own register are
        moved here, unordered, and claimed.
        """
        result, names = UploadClaim(secrets.token_hex(8), []), None if only is None else {*map(encode_text, only)}
        if names == set():
            return result
        claim = partial(self._claim_from, client, result, visibility=visibility, limit=limit, only=names or ())
        for source in self._claim_sources:
            claim(source)
        # Others may claim the moved entries.
        while not result.entries and self.bridge.move_stale(client, limit=limit, only=names):
            claim((self.keys.pending, self._due_at_age))
        return result

    def _claim_from(
        self,
        client: redis.Redis,
        result: UploadClaim,
        source: tuple[str, int],
        *,
        visibility: timedelta,
        limit: int,
        only: Collection[bytes],
    ) -> None:
        (key, due_at_age), ours = source, self.keys
        keys = [key, ours.pending, ours.deleting, ours.attempts, ours.claims, ours.adopted]
        args = [result.token, due_at_age, math.floor(visibility.total_seconds()), limit - len(result.entries), *only]
        for name, attempts, adopted_at, registered_at in run_script(client, "upload_claim", keys=keys, args=args):
            adopted = parse_second(adopted_at) if adopted_at else None
            registered = parse_second(registered_at) if registered_at else None
            result.entries.append(
                UploadEntry(decode_text(name), parse_count(attempts), adopted, registered, result.token)
            )

    def read_due_pages(self, client: redis.Redis) -> Iterator[list[DueEntry]]:
        """Yield the entries that `claim` would claim after `correct_clock`, in its order; nothing is claimed."""
        seconds, _microseconds = client.time()
        size = ENTRIES_PER_COMMAND
        for source, due_at_age in self._claim_sources:
            last, start = seconds - due_at_age, 0
            while found := typed_scores(client.zrangebyscore(source, "-inf", last, start, size, withscores=True)):
                yield self.load_due_entries(client, found, due_at_age)
                start += size
        ahead: Any = client.zrangebyscore(self.keys.deleting, _lower_bound_ahead(seconds), "+inf", 0, size)
        yield self.load_due_entries(client, [(member, seconds) for member in ahead])
        for theirs in self.bridge.read_stale_pages(client):
            yield [one._replace(bridged=True) for one in self.load_due_entries(client, theirs, self._due_at_age)]

    def load_due_entries(
        self, client: redis.Redis, found: Sequence[tuple[bytes, float]], due_at_age: int = 0
    ) -> list[DueEntry]:
        """Return the entries of members of a set with scores; each is due *due_at_age* seconds past its score."""
        members: Any = [member for member, _ in found]
        if not members:
            return []
        attempts, adopted = client.hmget(self.keys.attempts, members), client.zmscore(self.keys.adopted, members)
        known = [None if since is None else parse_second(since) for since in adopted]
        return [
            DueEntry(UploadEntry(decode_text(member), parse_count(tries), since), to_datetime(score + due_at_age))
            for (member, score), tries, since in zip(found, attempts, known, strict=True)
        ]

    def correct_clock(self, client: redis.Redis) -> int:
        """Set entries more than a day ahead to now; return the number.

        Redis's clock wrote these times while it was wrong.  The entries count as registered, or due again, now.
        """
        seconds, _microseconds = client.time()
        corrected = 0
        for key in (self.keys.pending, self.keys.deleting):
            ahead: Any = client.zrangebyscore(key, _lower_bound_ahead(seconds), "+inf", 0, ENTRIES_PER_COMMAND)
            if ahead:
                # Only entries that still exist and are ahead: other processes may settle them in the meantime.
                corrected += int(client.zadd(key, dict.fromkeys(ahead, seconds), xx=True, lt=True, ch=True) or 0)
        return corrected

    def find_lost(self, client: redis.Redis, claim: UploadClaim, entries: Sequence[UploadEntry]) -> list[UploadEntry]:
        """Return the entries that the claim has lost: settled, or claimed by another run."""
        if not entries:
            return []
        holders: Any = client.hmget(self.keys.claims, [encode_text(entry.member) for entry in entries])
        token = claim.token.encode()
        return [entry for entry, holder in zip(entries, holders, strict=True) if holder != token]

    def forget(self, client: redis.Redis, claim: UploadClaim, entries: Collection[UploadEntry]) -> int:
        """Remove entries whose object is deleted or must be kept; return how many were ours.

        As in all methods that settle entries, an entry that another run has claimed since is left unchanged.
        """
        return sum(self._settle_claimed(client, claim, entries, "forget"))

    def put_back(self, client: redis.Redis, claim: UploadClaim, entries: Collection[UploadEntry]) -> int:
        """Make entries due at once, without counting an attempt; return how many were still ours."""
        return sum(self._settle_claimed(client, claim, entries, "put_back"))

    def record_failure(self, client: redis.Redis, claim: UploadClaim, entry: UploadEntry) -> bool:
        """Count a failed attempt; return True if it was the last, and the entry is in `failed`.

        Otherwise it is due again after the first pause of the register's `Retry`, doubled after each further attempt.
        """
        first, attempts = self.register.retry
        return (
            sum(self._settle_claimed(client, claim, [entry], "fail", (attempts, math.ceil(first.total_seconds())))) > 0
        )

    def reject(self, client: redis.Redis, claim: UploadClaim, entries: Collection[UploadEntry]) -> int:
        """Move entries that cannot be tried to `failed` at once; return the number."""
        return sum(self._settle_claimed(client, claim, entries, "fail", (1, 0)))

    def _settle_claimed(
        self,
        client: redis.Redis,
        claim: UploadClaim,
        entries: Collection[UploadEntry],
        action: str,
        numbers: tuple[int, int] = (0, 0),
    ) -> list[int]:
        return self.settle(client, action, [entry.member for entry in entries], claim.token, numbers)

    def settle(
        self,
        client: redis.Redis,
        action: str,
        members: Collection[str],
        token: str = "",
        numbers: tuple[int, int] = (0, 0),
    ) -> list[int]:
        """Settle entries by an action of the script `upload_settle`; return its answer for each."""
        ours, args = self.keys, [action, token, *numbers]
        keys = [ours.pending, ours.deleting, ours.failed, ours.attempts, ours.claims, ours.adopted]
        pages = chunked(map(encode_text, members), ENTRIES_PER_COMMAND)
        answers = (run_script(client, "upload_settle", keys=keys, args=[*args, *page]) for page in pages)
        return [answer for page in answers for answer in page]

    def adopt(self, client: redis.Redis, location: str, paths: Collection[str]) -> int:
        """Register objects, unchanged for a day, that nothing names; return how many are new.

        They wait for `ADOPTION_DELAY`; until then `withdraw` can remove them.  Afterwards they are due, and are deleted
        like every stale upload, with all its checks.
        """
        head_start = math.ceil((ADOPTION_DELAY - self.register.older_than).total_seconds())
        pages, ours = chunked((build_member(location, path) for path in paths), ENTRIES_PER_COMMAND), self.keys
        keys = [ours.pending, ours.deleting, ours.failed, ours.adopted]
        keys += [ours.hash] if self.bridge.is_open(client) else []
        return sum(int(run_script(client, "upload_adopt", keys=keys, args=[head_start, *page])) for page in pages)

    def withdraw(self, client: redis.Redis, members: Sequence[str]) -> WithdrawalResult:
        """Remove adopted entries from the register; their objects are kept.

        Entries of producers are kept.  For entries that a run has claimed it is too late: their objects are about to be
        deleted.
        """
        became = list(zip(members, self.settle(client, "withdraw", members), strict=True))
        return WithdrawalResult(
            [one for one, answer in became if answer == 1], [one for one, answer in became if answer == -1]
        )


def written_before(adopted: int) -> datetime:
    """Return an instant before which an adopted object was surely written.

    At its adoption it was older than a day by the store's clock; half of that day is a margin for clocks that differ.
    """
    return to_datetime(adopted) - ADOPTION_DELAY / 2


def typed_scores(found: Any) -> list[tuple[bytes, float]]:
    """Return the members and scores of a sorted set, typed: the client's answer is untyped."""
    return list(found)


def _lower_bound_ahead(seconds: int) -> str:
    return f"({seconds + MAX_TIME_AHEAD.total_seconds()}"
