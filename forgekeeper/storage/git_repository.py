"""Find a repository below the root, and keep git inside it.

A disk that is not mounted looks exactly like one from which everything was deleted: a repository is believed to be gone
only while the sentinel can be read.

Git follows a symbolic link in the path of a ref, of its log and of `packed-refs`, and `commondir` names the folder in
which the refs are.  A bare repository of a forge has none of these.  What git only reads may lead elsewhere: `HEAD` as
a link, as old gits made it, `objects` and its alternates, as pools of forks have them.  A loose ref that is itself a
link is deleted as a link.  We look right before git does: a link that is put in place in between is followed, and a
bind mount or a hard link looks like what it leads to.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryFile

from forgekeeper.storage.git_command import GitError
from forgekeeper.storage.sentinel import NAME

_NAME_MAX, _PATH_MAX = 255, 4_096
"""Bytes, Linux's limits for a component of a path and, its end included, for all of it."""
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
FEW = 3
"""Fewer repositories than so many may be gone whatever share of all they are."""

_WRITTEN = {b"packed-refs", b"reftable", b"logs", b"logs/HEAD", b"refs", b"logs/refs"}
"""What git writes for a deletion, beside the folders of refs and of their logs."""
# Git 2.53 and later can have the refs in a folder that is named there; includes do not count for it.
_REFS_ELSEWHERE = re.compile(rb"refstorage\s*=(?:\\\r?\n|[^\n#;])*[:/]", re.IGNORECASE)


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
            said = self._way_out(names)
        except OSError as error:
            said = f"what git would write cannot be looked at: {error.strerror}"
        if said is not None:
            raise RepositoryFailed(said)

    def _way_out(self, names: Iterable[bytes]) -> str | None:
        if self._kind(b"commondir") is not None:
            return "commondir sends git to another folder: remove it, or correct disk_path"
        with suppress(FileNotFoundError, NotADirectoryError), (self.git_dir / "config").open("rb") as config:
            if _REFS_ELSEWHERE.search(config.read(1_000_000)):
                return "extensions.refStorage in its config names another folder: git must keep the refs here"
        written = set(_WRITTEN)
        for name in names:
            folder = name.rpartition(b"/")[0]
            while folder and folder not in written:
                written |= {folder, b"logs/" + folder}
                folder = folder.rpartition(b"/")[0]
        for path in sorted(written):
            if self._kind(path) == stat.S_IFLNK:
                shown = path.decode(errors="backslashreplace")
                return f"{shown} is a symbolic link, and git would delete where it leads: put the real thing there"
        return None

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
        return self._kind(name) not in (None, stat.S_IFDIR)

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

    def _kind(self, path: bytes) -> int | None:
        """Return what lies at *path*, by the name of `stat`; None where nothing can."""
        try:
            return stat.S_IFMT(os.lstat(self._path(path)).st_mode)
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                return None
            raise

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
        git_dir = (root / disk_path).resolve()
        if root.resolve() not in git_dir.parents:
            raise RepositoryFailed("the path of the repository does not lead below the root")
        if (root / disk_path).is_symlink() and not git_dir.exists():
            raise RepositoryFailed("the path of the repository is a symbolic link to nothing")
    except (OSError, RuntimeError, UnicodeError):
        raise RepositoryFailed("the path of the repository cannot be followed") from None
    return Repository(root, git_dir, _identity(git_dir, root))


def is_missing(root: Path, disk_path: str) -> bool:
    """Return whether nothing is at *disk_path*; what cannot be looked at is for `open_repository` to judge.

    Raises `RootUnavailable`.
    """
    with suppress(OSError, ValueError):
        (root / disk_path).stat()  # most are there, and need no more than that
        return False
    try:
        open_repository(root, disk_path)
    except GitError as error:
        if isinstance(error, RootUnavailable):
            raise
        return isinstance(error, RepositoryMissing)
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


def _identity(git_dir: Path, root: Path) -> tuple[int, int]:
    try:
        found = git_dir.stat()
    except OSError as error:
        _read_sentinel(root)
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise RepositoryMissing("there is nothing at the path of the repository") from None
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
