"""The file of the console's users: a line each, `name:role:hash`.

The hash is argon2's; of a user whom only a proxy names it is `-`, and no password lets that user in.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from forgekeeper.cli.terminal import WRONG_USE, Problem

Role = Literal["viewer", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)
BY_PROXY = "-"
LONGEST = 100
"""Characters of a name."""
HASH = re.compile(r"\$argon2(?:id|i|d)\$v=\d+\$m=\d+,t=\d+,p=\d+\$[\w+/]+\$[\w+/]+", re.ASCII)
FORM = "write name:role:hash, or run `forgekeeper console user add`"


class User(NamedTuple):
    """A line of the file."""

    name: str
    role: Role
    hash: str


class Users:
    """The users in a file, which is read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, ...] = ()
        self._users: dict[str, User] = {}

    def known(self) -> dict[str, User]:
        """Return the users by name; raise `Problem` where the file cannot be used, rather than take the last for it."""
        try:
            found = self.path.stat()
            if (seen := (found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode)) != self._seen:
                self._users, self._seen = _read(self.path, found.st_mode), seen
        except FileNotFoundError:
            raise Problem(f"there is no {self.path}: `forgekeeper console user add` makes it", WRONG_USE) from None
        except (OSError, UnicodeDecodeError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8"
            raise Problem(f"cannot read the users in {self.path}: {why}; correct that", WRONG_USE) from None
        return self._users

    @contextmanager
    def changed(self) -> Iterator[dict[str, User]]:
        """Let the users be changed within, by one at a time; nobody sees half of it."""
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            users = dict(self.known()) if self.path.exists() else {}
            yield users
            _write(self.path.resolve(), users.values())
        finally:
            os.close(folder)


def fits(name: str) -> bool:
    """Say whether it can be a user's name."""
    return 0 < len(name) <= LONGEST and name.isprintable() and ":" not in name and name == name.strip()


def hashed_password(password: str) -> str:
    """Return the hash that stands in the file."""
    import argon2  # of the extra, without which the command line is there too

    return argon2.PasswordHasher().hash(password)


def is_password(user: User | None, password: str) -> bool:
    """Say whether the password is the user's; where there is no such user, that takes as long."""
    import argon2

    known = user is not None and user.hash != BY_PROXY
    try:
        return argon2.PasswordHasher().verify(user.hash if user and known else _nobody_s(), password) and known
    except (argon2.exceptions.VerificationError, argon2.exceptions.InvalidHashError):
        return False


@cache
def _nobody_s() -> str:
    return hashed_password(secrets.token_hex())


def _read(path: Path, mode: int) -> dict[str, User]:
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Problem(f"others may write {path}: run `chmod 600 {path}`", WRONG_USE)
    users: dict[str, User] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            user = _user(line, f"line {number} of {path}")
            if user.name in users:
                raise Problem(f"line {number} of {path} names {user.name} again: remove one of the two", WRONG_USE)
            users[user.name] = user
    return users


def _user(line: str, where: str) -> User:
    """Read a line; no message repeats it, as it may hold a password."""
    name, _, rest = line.strip().partition(":")
    written, _, hashed = rest.partition(":")
    role = next((role for role in ROLES if role == written), None)
    if role is None or not fits(name):
        raise Problem(f"{where} is no user with the role {' or '.join(ROLES)}: {FORM}", WRONG_USE)
    if hashed != BY_PROXY and not HASH.fullmatch(hashed):
        raise Problem(f"{where} has no hash of argon2: {FORM}", WRONG_USE)
    return User(name, role, hashed)


def _write(path: Path, users: Iterable[User]) -> None:
    """Replace the file at once; only its owner may read it, who stays the same."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{':'.join(user)}\n" for user in users)
            file.flush()
            os.fsync(descriptor)
            if path.exists() and (owner := path.stat()).st_uid != os.geteuid():
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
