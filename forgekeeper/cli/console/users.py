"""The file of the console's users: one line each, `name:role:hash`.

The hash is argon2's. A user whom only a proxy names has the hash `-`, which matches no password.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from forgekeeper.cli.console.named_lines import LineFormat, is_valid_name

Role = Literal["viewer", "operator"]
PROXY_USER_HASH = "-"
LOCAL_HOST_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of this machine in a browser's address."""
USER_LINE = re.compile(r"([^:]+):(viewer|operator):(-|\$argon2\S+)")


class User(NamedTuple):
    """A line of the file."""

    name: str
    role: Role
    hash: str

    def format_line(self) -> str:
        """Return the user's line."""
        return ":".join(self)


def hash_password(password: str) -> str:
    """Return the hash for the file."""
    import argon2  # part of the extra, without which the command line must work

    return argon2.PasswordHasher().hash(password)


def is_correct_password(user: User | None, password: str) -> bool:
    """Check a user's password; an unknown user takes the same time."""
    import argon2

    if user is None or user.hash == PROXY_USER_HASH:
        hash_password(password)
        return False
    try:
        return argon2.PasswordHasher().verify(user.hash, password)
    except (argon2.exceptions.VerificationError, argon2.exceptions.InvalidHashError):
        return False


def _parse_user(line: str) -> User | None:
    match = USER_LINE.fullmatch(line)
    if match is None or not is_valid_name(match[1]):
        return None
    return User(match[1], "operator" if match[2] == "operator" else "viewer", match[3])


USER_FORMAT = LineFormat("user", "name:role:hash", "`forgekeeper console user add`", _parse_user)
"""A line of the file of users."""
