"""The file of the API's tokens: one line each, `name:created:expires:hash`.

A token is 256 random bits. Nobody can guess it, so its hash is a plain SHA-256, which costs a request nothing. Only
the hash is stored.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from hashlib import sha256
from hmac import compare_digest
from typing import NamedTuple

from forgekeeper.cli.console.named_lines import LineFormat, is_valid_name

TOKEN_PREFIX = "forgekeeper_read_"  # noqa: S105, the beginning of every token, for scanners of secrets
TOKEN_BYTES = 32
TIME_FORMAT = "%Y%m%dT%H%M%SZ"
"""ISO 8601 without colons, which separate the parts of a line."""
NEVER = "-"
TOKEN_LINE = re.compile(r"([^:]+):(\d{8}T\d{6}Z):(-|\d{8}T\d{6}Z):sha256\$([0-9a-f]{64})")


class ApiToken(NamedTuple):
    """A line of the file; without *expires_at* the token is valid until it is removed."""

    name: str
    created_at: datetime
    expires_at: datetime | None
    hash: str

    def format_line(self) -> str:
        """Return the token's line."""
        created, expires = (NEVER if at is None else at.strftime(TIME_FORMAT) for at in self[1:3])
        return f"{self.name}:{created}:{expires}:sha256${self.hash}"

    def is_expired(self, instant: datetime) -> bool:
        """Check whether the token's time is over."""
        return self.expires_at is not None and self.expires_at <= instant


def read_clock() -> datetime:
    """Return the time of this machine, in whole seconds: tokens also end while PostgreSQL is away."""
    return datetime.now(UTC).replace(microsecond=0)


def create_token() -> str:
    """Create a random token."""
    return TOKEN_PREFIX + secrets.token_hex(TOKEN_BYTES)


def hash_token(token: str) -> str:
    """Return the hash for the file."""
    return sha256(token.encode()).hexdigest()


def find_token(known: Iterable[ApiToken], token: str) -> ApiToken | None:
    """Return the line of *token*, even if it has expired.

    Compares with every line in constant time, so the time of the answer says nothing about a hash.
    """
    hashed, found = hash_token(token), None
    for one in known:
        if compare_digest(one.hash, hashed):
            found = one
    return found


def _parse_token(line: str) -> ApiToken | None:
    match = TOKEN_LINE.fullmatch(line)
    if match is None or not is_valid_name(match[1]):
        return None
    try:
        created, expires = (None if at == NEVER else _parse_time(at) for at in match.group(2, 3))
    except ValueError:
        return None
    return None if created is None else ApiToken(match[1], created, expires, match[4])


def _parse_time(text: str) -> datetime:
    return datetime.strptime(text, TIME_FORMAT).replace(tzinfo=UTC)


TOKEN_FORMAT = LineFormat("token", "name:created:expires:hash", "`forgekeeper console token add`", _parse_token)
"""A line of the file of tokens."""
