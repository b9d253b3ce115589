"""Find a repository below the root, and believe that it is gone only while the sentinel can be read.

A disk that is not mounted looks exactly like one from which everything was deleted.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryFile

from forgekeeper.storage.git_command import GitError
from forgekeeper.storage.git_enclosure import way_out
from forgekeeper.storage.sentinel import NAME

_NAME_MAX, _PATH_MAX = 255, 4_096
"""Bytes, Linux's limits for a component of a path and, its end included, for all of it."""
FEW = 3
"""Fewer repositories than so many may be gone whatever share of all they are."""


class RootUnavailable(GitError):
    """The sentinel cannot be read; nothing is believed to be gone."""


class RepositoryMissing(GitError):
    """The sentinel can be read, and there is nothing where the repository should be."""


class RepositoriesMissing(GitError):
    """So many repositories are missing that they are not believed to be gone; the message says what to do."""


class RepositoryLocked(GitError):
    """Another process holds a lock of the whole repository, or died with it; nothing was done."""


class RepositoryFailed(GitError):
    """Git cannot work in this repository; the message is a short sentence."""


@dataclass(frozen=True)
class Repository:
    """A directory below the root, as it was when it was opened."""

    root: Path
    git_dir: Path
    identity: tuple[int, int]

    def confirm(self) -> None:
        """Raise unless root and repository are still those that were opened.

        Raises `RootUnavailable`, `RepositoryMissing` and `RepositoryFailed`.
        """
        _read_sentinel(self.root)
        if _identity(self.git_dir, self.root) != self.identity:
            raise RepositoryFailed("another directory has taken the repository's place")

    def enclose(self, names: Iterable[bytes] = ()) -> None:
        """Raise `RepositoryFailed` where git, deleting refs of these names, would leave the repository's own folder."""
        try:
            said = way_out(os.fsencode(self.git_dir), names)
        except OSError as error:
            said = f"what git would write cannot be looked at: {error.strerror}"
        if said is not None:
            raise RepositoryFailed(said)

    def can_lock(self, name: bytes) -> bool:
        """Return whether there can be a lock for the ref; where refs are no files there always can."""
        lock = self._path(name) + b".lock"
        fits = len(lock) < _PATH_MAX and all(len(component) <= _NAME_MAX for component in lock.split(b"/"))
        return fits or self.has_reftable()

    def has_reftable(self) -> bool:
        """Return whether refs are kept in tables, not in files."""
        return (self.git_dir / "reftable").is_dir()

    def has_file(self, name: bytes) -> bool:
        """Return whether something lies where a loose ref of that name would; may raise OSError."""
        try:
            return not stat.S_ISDIR(os.lstat(self._path(name)).st_mode)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
                return False
            raise

    def in_the_way(self, name: bytes) -> bytes | None:
        """Return the file that lies where a folder of the ref's name would; git can make no lock behind it."""
        with suppress(OSError):
            try:
                os.lstat(self._path(name))
            except NotADirectoryError:
                parts = name.split(b"/")
                return next(filter(self.has_file, (b"/".join(parts[:end]) for end in range(1, len(parts)))), None)
        return None

    def loose(self, name: bytes) -> bytes:
        """Return how the file of a loose ref begins; nothing where there is none that can be read."""
        with suppress(OSError):
            handle = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                return os.read(handle, _PATH_MAX)
            finally:
                os.close(handle)
        return b""

    def locked(self, names: Iterable[bytes]) -> list[bytes]:
        """Return those of *names* whose locks exist now."""
        return [name for name in names if os.path.lexists(self._path(name) + b".lock")]

    def age(self, path: str) -> timedelta | None:
        """Return how old a file is by the clock of its file system; None when it is gone or cannot be looked at."""
        with suppress(OSError), TemporaryFile(dir=self.git_dir) as new:
            seconds = os.fstat(new.fileno()).st_mtime - (self.git_dir / path).lstat().st_mtime
            return timedelta(seconds=max(0, round(seconds)))
        return None

    def _path(self, name: bytes) -> bytes:
        return os.fsencode(self.git_dir) + b"/" + name


def open_repository(root: Path, disk_path: str) -> Repository:
    """Return the repository at *disk_path*, relative to *root*.

    Raises `RootUnavailable`, `RepositoryMissing`, and `RepositoryFailed` for a path that leads
    out of the root or to no directory.
    """
    _read_sentinel(root)
    if disk_path.startswith("/") or "\0" in disk_path or ".." in disk_path.split("/"):
        raise RepositoryFailed("the path of the repository is not a plain relative path")
    try:
        inside, git_dir = root.resolve(), (root / disk_path).resolve()
        dangling = (root / disk_path).is_symlink() and not git_dir.exists()
    except OSError as error:
        raise RepositoryFailed(f"the path of the repository cannot be followed: {error.strerror}") from None
    except (RuntimeError, UnicodeError):
        raise RepositoryFailed("the path of the repository cannot be followed") from None
    if inside not in git_dir.parents:
        raise RepositoryFailed("the path of the repository does not lead below the root")
    if dangling:
        raise RepositoryFailed("the path of the repository is a symbolic link to nothing")
    return Repository(root, git_dir, _identity(git_dir, root))


def is_missing(root: Path, disk_path: str) -> bool:
    """Return whether nothing is at *disk_path*; what cannot be looked at is for `open_repository` to judge.

    Raises `RootUnavailable`.
    """
    with suppress(OSError, ValueError):
        (root / disk_path).stat()
        return False
    try:
        open_repository(root, disk_path)
    except RepositoryMissing:
        return True
    except RepositoryFailed:
        pass
    return False


def too_many_missing(missing: int, projects: int, share: float) -> bool:
    """Return whether more than *share* of *projects* are missing, and not just a few: then they are not gone."""
    return missing >= FEW and missing > share * projects


def misnamed(root: Path, disk_path: str) -> str | None:
    """Return *disk_path* with its `.git` added or taken away if something lies there."""
    other = disk_path.removesuffix(".git") if disk_path.endswith(".git") else f"{disk_path}.git"
    with suppress(OSError, ValueError):
        (root / other).lstat()
        return other
    return None


def objection(root: Path, disk_path: str) -> str | None:
    """Return why no ref of the repository at *disk_path* would be deleted, as far as its folder shows.

    Raises `RootUnavailable`; a repository that is missing is none to object to.
    """
    try:
        open_repository(root, disk_path).enclose()
    except RepositoryFailed as error:
        return str(error)
    except RepositoryMissing:
        pass
    return None


def _identity(git_dir: Path, root: Path) -> tuple[int, int]:
    try:
        found = git_dir.stat()
    except (FileNotFoundError, NotADirectoryError):
        _read_sentinel(root)
        raise RepositoryMissing("there is nothing at the path of the repository") from None
    except OSError as error:
        _read_sentinel(root)
        raise RepositoryFailed(f"the repository cannot be looked at: {error.strerror}") from None
    # A file would send git to wherever it says.
    if not stat.S_ISDIR(found.st_mode):
        raise RepositoryFailed("the path of the repository leads to a file")
    return found.st_dev, found.st_ino


def _read_sentinel(root: Path) -> None:
    try:
        with (root / NAME).open("rb") as sentinel:
            sentinel.read(1)
    except OSError as error:
        raise RootUnavailable(f"{root / NAME} cannot be read: {error.strerror}") from None
