"""The keys of a register in Redis, and the limits of its commands."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple, Self

from forgekeeper.platform.coordination.redis_values import KEY_TYPES

MAX_TIME_AHEAD = timedelta(days=1)
"""Maximum wait of an entry for its next attempt or its withdrawal.  A time further ahead comes from a wrong clock."""
ENTRIES_PER_COMMAND = 1_000
"""Entries per command.  Such a command takes the server about a millisecond."""


class RegisterKeys(NamedTuple):
    """The keys of a register, all with one hash tag but the last.

    *pending* has the entries that may still complete, *deleting* has entries that a run has claimed or will retry,
    *failed* has entries that wait for a person.  *attempts* counts failures and *claims* has the token of each claim.
    *adopted* has entries that `uploads reconcile` registered, until they are settled.  *cursor* is the position in the
    forge's own hash after the last move.  *epoch* tells this Redis from another server, and from itself after it was
    emptied.  *hash* is the forge's own register, which is read if `Bridge.is_open`.
    """

    pending: str
    deleting: str
    failed: str
    attempts: str
    claims: str
    adopted: str
    cursor: str
    epoch: str
    hash: str

    @classmethod
    def for_register(cls, name: str) -> Self:
        """Return the keys of the register of that name."""
        return cls._make([*(f"{{{name}}}:{field}" for field in cls._fields[:-1]), name])

    def declare_types(self) -> None:
        """Let `check` name each key with a wrong type, except the hash, which is the forge's."""
        KEY_TYPES.update(dict.fromkeys((self.pending, self.deleting, self.failed, self.adopted), "zset"))
        KEY_TYPES.update(dict.fromkeys((self.attempts, self.claims), "hash"))
        KEY_TYPES.update(dict.fromkeys((self.cursor, self.epoch), "string"))
