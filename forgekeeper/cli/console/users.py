"""The file of the console's users: one line each, `name:role:hash`.

The hash is argon2's. A user whom only a proxy names has the hash `-`, which matches no password.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Literal, NamedTuple

from forgekeeper.cli.terminal import WRONG_USE_STATUS, Problem

Role = Literal["viewer", "operator"]
PROXY_USER_HASH = "-"
LOCAL_HOST_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of this machine in a browser's address."""
MAX_NAME_LENGTH = 100
"""Maximum characters of a name."""
USER_LINE = re.compile(r"([^:]+):(viewer|operator):(-|\$argon2\S+)")
ADD_USER_COMMAND = "`forgekeeper console user add`"


class User(NamedTuple):
    """A line of the file."""

    name: str
    role: Role
    hash: str


class UserFile(NamedTuple):
    """The users in a file."""

    path: Path

    def read_users(self) -> dict[str, User]:
        """Read the users by name; raise `Problem` if the file is unreadable or writable by others."""
        try:
            text, mode = self.path.read_text(encoding="utf-8"), self.path.stat().st_mode
        except FileNotFoundError:
            raise Problem(f"there is no {self.path}: {ADD_USER_COMMAND} creates it", WRONG_USE_STATUS) from None
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8"
            raise Problem(f"cannot read the users in {self.path}: {why}; fix the file", WRONG_USE_STATUS) from None
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Problem(f"others may write {self.path}: run `chmod 600 {self.path}`", WRONG_USE_STATUS)
        users: dict[str, User] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            if (user := _parse_user(line)) is None or user.name in users:
                # The line may contain a password, so the error does not repeat it.
                sentence = (
                    f"line {number} of {self.path} is not a user, or repeats a user: write name:role:hash, or run"
                    f" {ADD_USER_COMMAND}"
                )
                raise Problem(sentence, WRONG_USE_STATUS)
            users[user.name] = user
        return users

    @contextmanager
    def edit_users(self) -> Iterator[dict[str, User]]:
        """Change the users inside the block, under a lock.

        The file is replaced atomically, and only its owner may read it.
        """
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            # Without the lock, the later of two concurrent changes would restore a user whom the earlier removed.
            fcntl.flock(folder, fcntl.LOCK_EX)
            users = self.read_users() if self.path.exists() else {}
            yield users
            _replace_file(self.path.resolve(), "".join(f"{':'.join(user)}\n" for user in users.values()))
        finally:
            os.close(folder)


def is_valid_name(name: str) -> bool:
    """Check whether *name* is valid for a user."""
    return 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable() and ":" not in name and name == name.strip()


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


def _replace_file(path: Path, text: str) -> None:
    with NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    if path.exists() and os.geteuid() == 0:
        os.chown(file.name, path.stat().st_uid, path.stat().st_gid)
    Path(file.name).replace(path)


def _parse_user(line: str) -> User | None:
    match = USER_LINE.fullmatch(line.strip())
    if match is None or not is_valid_name(match[1]):
        return None
    return User(match[1], "operator" if match[2] == "operator" else "viewer", match[3])
