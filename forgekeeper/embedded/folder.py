"""The folder the servers live in, who owns it, and how it goes away."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from forgekeeper.embedded.errors import EmbeddedError
from forgekeeper.embedded.waiting import wait_until

# Room for the servers of a killed predecessor to finish, before we call the folder taken.
LOCK_PATIENCE = 2.0
# What `sun_path` holds, without the final zero.
LONGEST_SOCKET_PATH = 107
LONGEST_SOCKET_NAME = ".s.PGSQL.5432"


@dataclass(frozen=True)
class Site:
    """Where one pair of servers lives; *lock* is inherited by them, so it is held until the last has gone."""

    folder: Path
    sockets: Path
    temporary: bool
    lock: int

    @property
    def temporary_folders(self) -> list[Path]:
        """Everything that has to be gone in the end."""
        outside = [self.sockets] if self.sockets.parent != self.folder else []
        return [self.folder, *outside] if self.temporary else outside


@contextmanager
def opened(folder: Path | None) -> Iterator[Site]:
    """Prepare *folder*, or a temporary one, and hold it; remove on leaving what is temporary."""
    temporary = folder is None
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="forgekeeper-"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with _locked(folder) as lock, _sockets(folder) as sockets:
            yield Site(folder, sockets, temporary, lock)
    finally:
        if temporary:
            remove_when_unused(folder)


def remove_when_unused(folder: Path) -> None:
    """Remove *folder*, if it is still there, once no server writes into it any more."""
    with suppress(EmbeddedError, FileNotFoundError), _locked(folder):
        pass
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not wait_until(lambda: _acquired(lock), LOCK_PATIENCE):
            raise EmbeddedError(f"{folder} is in use by other embedded servers; stop those, or use another folder.")
        yield lock
    finally:
        os.close(lock)


def _acquired(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _sockets(folder: Path) -> Iterator[Path]:
    """Make an empty private folder for the sockets: in *folder*, or a short one where that cannot be."""
    sockets = folder / "sockets"
    shutil.rmtree(sockets, ignore_errors=True)
    if _fits(sockets):
        sockets.mkdir(mode=0o700)
    else:
        sockets = Path(tempfile.mkdtemp(prefix="forgekeeper-", dir="/tmp"))
    try:
        yield sockets
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def _fits(sockets: Path) -> bool:
    # To libpq a comma separates two hosts, and nothing quotes it.
    longest = os.fsencode(sockets / LONGEST_SOCKET_NAME)
    return len(longest) <= LONGEST_SOCKET_PATH and b"," not in longest
