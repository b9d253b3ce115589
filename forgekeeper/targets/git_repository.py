"""Find a repository below the root, keep git inside it, and read its refs.

A repository counts as missing only while the sentinel can be read: the disk may not be mounted.

Git follows a symbolic link in the path of a ref, of its log and of `packed-refs`, and `commondir` names the folder of
the refs.  A bare repository of a forge has none of these.  Paths that git only reads may lead outside: `HEAD` as a link
(old versions of git), `objects` and its alternates (pools of forks).  A loose ref that is itself a link is deleted as a
link.  We check right before git runs.  Git follows a link that is created in between, and a bind mount or a hard link
looks like its target.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from grp import getgrgid
from pathlib import Path
from pwd import getpwuid
from tempfile import TemporaryFile
from typing import Literal

from forgekeeper.targets.git_command import Git, GitError, clean_first_line
from forgekeeper.targets.sentinel import SENTINEL_NAME

_MAX_COMPONENT_BYTES, _MAX_PATH_BYTES = 255, 4_096
"""Linux's limits in bytes: a component of a path, and a whole path with its final NUL."""
_MISSING_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)

MAX_REF_CHARACTERS = 1_024
"""Maximum characters of a ref's name, the limit of the column that stores names."""
MAX_NAMES_PER_LISTING = 200
"""Maximum names per listing: git compares each ref with every name, and names have to fit on a command line."""
MAX_SMALL_PACKED_BYTES = 256 * 1024
"""Size of `packed-refs`, some 4,000 refs, up to which reading it takes less time than starting git."""
OID_LENGTHS = {b"sha1": 40, b"sha256": 64}
_PACKED_BLOCK_BYTES = 16_384
"""Bytes of `packed-refs` that are searched at once; a name that is missing costs a search of one block."""

# The rules of `git check-ref-format`, in its order: a component begins with a dot or ends with ".lock", two dots,
# characters that are special to a shell, a revision or a pattern, an empty component, a dot at the end.
# Halves of characters are refused too: they lack bytes.
_INVALID_IN_REF = re.compile(r"/\.|\.lock(?:/|\Z)|\.\.|[\x00-\x20\x7f~^:?*\[\\]|//|/\Z|\.\Z|@\{|[\ud800-\udfff]")
_PLAIN_HEAD = re.compile(rb"(?:ref: refs/[^\s\0]+|[0-9a-f]{40}|[0-9a-f]{64})\n")
_BROKEN_REF_WARNING = re.compile(rb"^warning: ignoring (?:broken ref|ref with broken name) (.+)$", re.MULTILINE)

_WRITTEN_PATHS = {b"packed-refs", b"reftable", b"logs", b"logs/HEAD", b"refs", b"logs/refs"}
"""Paths that git writes for a deletion, beside the folders of refs and of their logs."""
_REPLACED_FILES = "packed-refs", "reftable/tables.list", "."
"""Files that git replaces for a deletion; if none of them exists, new files have to match the folder."""
# Git 2.53 and later can have the refs in a folder that is named there; includes do not count for it.
_REFS_ELSEWHERE = re.compile(rb"refstorage\s*=(?:\\\r?\n|[^\n#;])*[:/]", re.IGNORECASE)


GIT_SERVER_FILES = (".gitaly-metadata", "+gitaly")
"""Names that Gitaly, a Git server, keeps at the root of each of its storages."""
GIT_SERVER_REASON = (
    "a Git server (Gitaly) manages the repositories below {}, which has {}: its locks, write-ahead log and replicas"
    " would not notice refs that git deletes directly; on a single server without transactions set"
    " FORGEKEEPER_GIT_SERVER=bypass, otherwise leave the deletion to the forge"
)


def why_left_to_git_server(root: Path) -> str | None:
    """Return why nothing is deleted below *root*, if a Git server keeps it; else None."""
    sign = next((name for name in GIT_SERVER_FILES if (root / name).exists()), None)
    return sign and GIT_SERVER_REASON.format(root, sign)


class RootUnavailable(GitError):
    """The sentinel cannot be read, so no repository counts as missing."""


class RepositoryMissing(GitError):
    """The sentinel can be read, and nothing exists at the repository's path."""


class RepositoryFailed(GitError):
    """Git cannot work in this repository, or another process holds its lock.

    The message is a short sentence.
    """


@dataclass(frozen=True)
class Repository:
    """A directory below the root, with its identity when it was opened."""

    root: Path
    git_dir: Path
    identity: tuple[int, int]

    def confirm_identity(self) -> None:
        """Raise, as `open_repository` does, unless root and repository are still the opened ones."""
        _read_sentinel(self.root)
        if _read_identity(self.git_dir, self.root) != self.identity:
            raise RepositoryFailed("another directory has replaced the repository")

    def git_for_writing(self, until: float, grace: float = 5.0) -> Git:
        """Return a git whose files keep their owner, group and mode: the forge has to read them.

        A deletion replaces `packed-refs`.  As root, git runs as the file's owner; otherwise raises `RepositoryFailed`
        if the file would get another owner or group.
        """
        folder = self.git_dir.stat()
        name, file = ".", folder
        for name in _REPLACED_FILES:
            with suppress(OSError):
                file = (self.git_dir / name).stat()
                break
        group = folder.st_gid if folder.st_mode & stat.S_ISGID else os.getegid()
        # The folder's execute bits follow the file's read bits; git has to write to both.
        umask = 0o077 & ~(file.st_mode | (file.st_mode & 0o444) >> 2)
        if (file.st_uid, file.st_gid) == (os.geteuid(), group):
            return Git(self.git_dir, until, grace, umask)
        if os.geteuid() == 0:
            return Git(self.git_dir, until, grace, umask, user=(file.st_uid, file.st_gid))
        owner, ours = _account_name(file.st_uid, file.st_gid), _account_name(os.geteuid(), group)
        raise RepositoryFailed(
            f"{name} belongs to {owner}, but this worker runs as {ours}: git would replace the file by one that the"
            f" forge may not be able to read; run the worker of the queue git as {owner}"
        )

    def require_enclosed(self, names: Iterable[bytes] = ()) -> None:
        """Raise `RepositoryFailed` if deleting these refs would leave the repository's folder."""
        try:
            said = self._why_not_enclosed(names)
        except OSError as error:
            said = f"cannot check the paths that git would write: {error.strerror}"
        if said is not None:
            raise RepositoryFailed(said)

    def _why_not_enclosed(self, names: Iterable[bytes]) -> str | None:
        if self._file_type(b"commondir") is not None:
            return "the file commondir points git to another folder: remove the file, or correct disk_path"
        with suppress(FileNotFoundError, NotADirectoryError), (self.git_dir / "config").open("rb") as config:
            if _REFS_ELSEWHERE.search(config.read(1_000_000)):
                return (
                    "extensions.refStorage in the repository's config names another folder:"
                    " the refs must be in the repository itself"
                )
        written = set(_WRITTEN_PATHS)
        for name in names:
            folder = name.rpartition(b"/")[0]
            while folder and folder not in written:
                written |= {folder, b"logs/" + folder}
                folder = folder.rpartition(b"/")[0]
        missing = set[bytes]()
        for path in sorted(written):
            kind = None if path.rpartition(b"/")[0] in missing else self._file_type(path)
            if kind is None:
                missing.add(path)
            elif kind == stat.S_IFLNK:
                shown = path.decode(errors="backslashreplace")
                return (
                    f"{shown} is a symbolic link, and git would delete files at its target: replace it by a real file"
                )
        return None

    def can_lock(self, name: bytes) -> bool:
        """Return whether git can create a lock for the ref; always True if refs are not files."""
        lock = self._path_of(name) + b".lock"
        fits = len(lock) < _MAX_PATH_BYTES and max(map(len, lock.split(b"/"))) <= _MAX_COMPONENT_BYTES
        return fits or self.has_reftable()

    def has_reftable(self) -> bool:
        """Return whether refs were kept in tables, not in files, when this was first asked."""
        return self._has_reftable

    @cached_property
    def _has_reftable(self) -> bool:
        return (self.git_dir / "reftable").is_dir()

    def has_file(self, name: bytes) -> bool:
        """Return whether a file exists at the loose ref's path; may raise OSError."""
        return self._file_type(name) not in (None, stat.S_IFDIR)

    def find_blocking_file(self, name: bytes) -> bytes | None:
        """Return a file in the place of one of the ref's folders; git cannot lock below a file."""
        with suppress(OSError):
            try:
                os.lstat(self._path_of(name))
            except NotADirectoryError:
                parts = name.split(b"/")
                return next(filter(self.has_file, (b"/".join(parts[:end]) for end in range(1, len(parts)))), None)
        return None

    def find_fileless(self, names: Sequence[bytes]) -> set[bytes]:
        """Return names without a file at their paths or in the place of a folder.

        Each folder is listed once.  A name that is alone in its folder, or in an unreadable folder, is not returned.
        """
        fileless, folders = set[bytes](), {b"refs": names}
        while folders:
            folder, inside = folders.popitem()
            begin = len(folder) + 1
            wanted = {name[begin:].partition(b"/")[0] for name in inside}
            used, below = set[bytes](), defaultdict[bytes, list[bytes]](list)
            try:
                with suppress(FileNotFoundError), os.scandir(self._path_of(folder)) as entries:
                    used = {entry.name for entry in entries if entry.name in wanted}
            except OSError:
                continue
            for name in inside:
                part, is_below, _ = name[begin:].partition(b"/")
                if part not in used:
                    fileless.add(name)
                elif is_below:
                    below[folder + b"/" + part].append(name)
            folders |= {path: those for path, those in below.items() if len(those) > 1}
        return fileless

    def read_loose_ref(self, name: bytes) -> bytes:
        """Return the beginning of a loose ref's file; empty if no such file can be read."""
        with suppress(OSError):
            handle = os.open(self._path_of(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                return os.read(handle, _MAX_PATH_BYTES)
            finally:
                os.close(handle)
        return b""

    def has_plain_head(self) -> bool:
        """Return whether `HEAD` is a file that names a ref or an oid as git writes it; else git has to be asked."""
        return not self.has_reftable() and _PLAIN_HEAD.fullmatch(self.read_loose_ref(b"HEAD")) is not None

    def links_from(self, git: Git, name: bytes) -> set[bytes]:
        """Return every name to which the symbolic ref *name* leads, hop by hop.

        The names need not exist.
        """
        found = set[bytes]()
        while (target := self._link_of(git, name)) and target not in found:
            found.add(target)
            name = target
        return found

    def _link_of(self, git: Git, name: bytes) -> bytes:
        if self.has_reftable() or self._file_type(name) == stat.S_IFLNK:
            # Versions of git up to 2.38 lack the option.
            answer = git.run("symbolic-ref", "--quiet", "--no-recurse", name)
            return answer.out.strip() if answer.code == 0 else b""
        content = self.read_loose_ref(name)
        return content.removeprefix(b"ref:").strip() if content.startswith(b"ref:") else b""

    def read_packed_lines(self, names: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return the lines of the file `packed-refs` that have these names; may raise OSError.

        Git finds a name by binary search, and so misses names in a file with damaged order or line ends.
        """
        wanted = set(names)
        if wanted:
            with suppress(FileNotFoundError), (self.git_dir / "packed-refs").open("rb") as lines:
                return {name: line for line in lines if (name := line.rstrip().partition(b" ")[2]) in wanted}
        return {}

    def has_small_packed_refs(self) -> bool:
        """Return whether `packed-refs` is missing or small enough to be read whole."""
        with suppress(OSError):
            try:
                return os.lstat(self._path_of(b"packed-refs")).st_size <= MAX_SMALL_PACKED_BYTES
            except FileNotFoundError:
                return True
        return False

    def lacks_extensions(self) -> bool:
        """Return whether the configuration lacks the section `extensions`: refs are then files with SHA-1 values.

        Git reads this section from the file alone, not from files that the file includes.
        """
        with suppress(OSError):
            return b"extensions" not in (self.git_dir / "config").read_bytes().lower()
        return False

    def find_packed_lines(self, names: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield these sorted names with their lines in `packed-refs`; may raise OSError.

        Names in a damaged file may be missed.
        """
        place, rest = 0, b""
        with suppress(FileNotFoundError), (self.git_dir / "packed-refs").open("rb", buffering=0) as file:
            while place < len(names) and (read := file.read(_PACKED_BLOCK_BYTES)):
                lines, newline, rest = (rest + read).rpartition(b"\n")
                block = lines + newline
                last_name = block[block.rfind(b" refs/") + 1 :].partition(b"\n")[0]
                after = 0
                while place < len(names) and (name := names[place]) <= last_name:
                    if (end := block.find(b" %s\n" % name, after)) >= 0:
                        yield name, block[block.rfind(b"\n", 0, end) + 1 : end + len(name) + 2]
                        after = end
                    place += 1

    def find_locked(self, names: Iterable[bytes]) -> list[bytes]:
        """Return the *names* whose locks exist now."""
        return [name for name in names if os.path.lexists(self._path_of(name) + b".lock")]

    def read_file_age(self, path: str) -> timedelta | None:
        """Return a file's age by its file system's clock; None if it is missing or unreadable."""
        with suppress(OSError):
            written = (self.git_dir / path).lstat().st_mtime  # first: a missing file needs no temporary file
            with TemporaryFile(dir=self.git_dir) as new:
                return timedelta(seconds=max(0, round(os.fstat(new.fileno()).st_mtime - written)))
        return None

    def _file_type(self, path: bytes) -> int | None:
        """Return the file type at *path* as in `stat`; None if nothing can exist there."""
        try:
            return stat.S_IFMT(os.lstat(self._path_of(path)).st_mode)
        except OSError as error:
            if error.errno in _MISSING_ERRNOS:
                return None
            raise

    @cached_property
    def _path_prefix(self) -> bytes:
        return os.fsencode(self.git_dir) + b"/"

    def _path_of(self, name: bytes) -> bytes:
        return self._path_prefix + name


def open_repository(root: Path, disk_path: str) -> Repository:
    """Return the repository at *disk_path*, relative to *root*.

    Raises `RootUnavailable`, `RepositoryMissing`, and `RepositoryFailed` for a path that leads out or to no directory.
    """
    _read_sentinel(root)
    if disk_path.startswith("/") or "\0" in disk_path or ".." in disk_path.split("/"):
        raise RepositoryFailed("the path of the repository must be relative and without '..': correct disk_path")
    try:
        git_dir = (root / disk_path).resolve()
        if root.resolve() not in git_dir.parents:
            raise RepositoryFailed("the path of the repository leads out of the root")
        if (root / disk_path).is_symlink() and not git_dir.exists():
            raise RepositoryFailed("the path of the repository is a symbolic link without a target")
    except (OSError, RuntimeError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise RepositoryFailed(f"cannot resolve the path of the repository: {why}") from None
    return Repository(root, git_dir, _read_identity(git_dir, root))


def _account_name(user: int, group: int) -> str:
    """Name a user and group as people do, by numbers if the machine does not know them."""
    names = [str(user), str(group)]
    with suppress(KeyError):
        names[0] = getpwuid(user).pw_name
    with suppress(KeyError):
        names[1] = getgrgid(group).gr_name
    return ":".join(names)


def _read_identity(git_dir: Path, root: Path) -> tuple[int, int]:
    try:
        found = git_dir.stat()
    except OSError as error:
        _read_sentinel(root)
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise RepositoryMissing("the repository does not exist at its path") from None
        raise RepositoryFailed(f"cannot read the repository: {error.strerror}") from None
    # Git would follow the path inside a file.
    if not stat.S_ISDIR(found.st_mode):
        raise RepositoryFailed("the path of the repository is a file, not a directory")
    return found.st_dev, found.st_ino


def _read_sentinel(root: Path) -> None:
    try:
        with (root / SENTINEL_NAME).open("rb") as sentinel:
            sentinel.read(1)
    except OSError as error:
        raise RootUnavailable(f"cannot read {root / SENTINEL_NAME}: {error.strerror}") from None


def why_ref_refused(name: str) -> Literal["not_under_refs", "too_long", "invalid_name"] | None:
    """Return why git must not get *name*; None if it may.

    `HEAD` and similar names are not under `refs/`: git would delete the file, and with it the repository.
    """
    if not name.startswith("refs/"):
        return "not_under_refs"
    if len(name) > MAX_REF_CHARACTERS:
        return "too_long"
    return "invalid_name" if _INVALID_IN_REF.search(name) else None


@dataclass
class RefValues:
    """The oids of existing refs, the targets of symbolic refs, and the broken refs.

    *fileless* refs have no file at their paths, and none in the place of a folder; other refs may be fileless, too.
    """

    oids: dict[bytes, bytes] = field(default_factory=dict)
    links: dict[bytes, bytes] = field(default_factory=dict)
    broken: set[bytes] = field(default_factory=set)
    fileless: set[bytes] = field(default_factory=set, compare=False)

    def format_value(self, name: bytes, repository: Repository) -> str:
        """Return the ref's value: an oid, `ref: NAME` for a symbolic ref, or "" if it is unknown."""
        value = b"ref: " + self.links[name] if name in self.links else self.oids.get(name)
        if value is None:
            # Git lists no symbolic ref that leads nowhere.
            content = repository.read_loose_ref(name)
            value = content if content.startswith(b"ref: ") else b""
        return value.strip().replace(b"\0", b"").decode(errors="backslashreplace")


def read_refs(git: Git, repository: Repository, names: list[bytes]) -> RefValues:
    """Read the refs of these names.

    Raises `RepositoryFailed`, and the errors of `Repository.confirm_identity`.
    """
    values, all_names = RefValues(), names
    if (len(names) > MAX_NAMES_PER_LISTING or repository.has_small_packed_refs()) and not repository.has_reftable():
        # Each listing reads all files beside its refs: half a million reads for ten thousand refs in one folder.  To
        # read a few files costs less than to start git.
        values.fileless = repository.find_fileless(names)
        values.oids = _read_plain_oids(git, repository, names, values.fileless)
        names = [name for name in names if name not in values.oids]
    for start in range(0, len(names), MAX_NAMES_PER_LISTING):
        wanted = set(names[start : start + MAX_NAMES_PER_LISTING])
        form = "--format=%(objectname) %(refname) %(symref)"
        answer = git.run("for-each-ref", form, *sorted(wanted), keep_line=partial(_names_wanted_ref, wanted))
        if answer.code != 0:
            repository.confirm_identity()
            raise RepositoryFailed(clean_first_line(answer.error_output()))
        for line in answer.out.splitlines():
            oid, name, target = line.split(b" ", 2)
            values.oids[name] = oid
            if target:
                values.links[name] = target
        values.broken.update(_BROKEN_REF_WARNING.findall(answer.err))
    try:
        values.broken |= repository.read_packed_lines(name for name in all_names if name not in values.oids).keys()
    except OSError as error:
        raise RepositoryFailed(f"cannot read packed-refs: {error.strerror}") from None
    return values


def _names_wanted_ref(wanted: set[bytes], line: bytes) -> bool:
    """Return whether a line names a *wanted* ref: git lists all refs in a directory."""
    return not wanted.isdisjoint(line.split(b" ", 2)[1:2])


def _read_plain_oids(git: Git, repository: Repository, names: list[bytes], fileless: set[bytes]) -> dict[bytes, bytes]:
    """Return the oids that loose refs' files, or else `packed-refs`, state plainly.

    Git has to read all other refs.  Git verifies each oid before it deletes the ref.
    """
    length = OID_LENGTHS.get(_find_object_format(git, repository))
    if length is None:
        # The git is too old for the option or failed, or the format is unknown.
        return {}
    loose = {name: repository.read_loose_ref(name) for name in names if name not in fileless}
    oids = _match_oids(rb"(?!0+\n)([0-9a-f]{%d})\n" % length, loose.items())
    with suppress(OSError):
        lines = repository.find_packed_lines(
            [name for name in names if name in fileless or (not loose[name] and not repository.has_file(name))]
        )
        oids |= _match_oids(rb"(?!0+ )([0-9a-f]{%d}) [^\r\n]+\n" % length, lines)
    return oids


def _find_object_format(git: Git, repository: Repository) -> bytes:
    """Return the repository's hash; ask git unless its configuration lacks the section with formats."""
    return b"sha1" if repository.lacks_extensions() else git.run("rev-parse", "--show-object-format").out.strip()


def _match_oids(pattern: bytes, lines: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    plain = re.compile(pattern)
    found = ((name, plain.fullmatch(line)) for name, line in lines)
    return {name: oid[1] for name, oid in found if oid}


def read_existing_refs(root: Path, disk_path: str, refs: Iterable[str], *, until: float) -> dict[str, str]:
    """Return the values of the *refs* that exist; "" for an unknown value.

    Git is ended at *until*, an instant of the monotonic clock.  Raises `GitError`.
    """
    repository = open_repository(root, disk_path)
    names = sorted({ref.encode() for ref in refs if why_ref_refused(ref) is None})
    values = read_refs(Git(repository.git_dir, until), repository, names)
    try:
        seen = values.oids.keys() | values.broken
        there = {name for name in names if name in seen or repository.has_file(name)}
    except OSError as error:
        raise RepositoryFailed(f"cannot read a ref: {error.strerror}") from None
    # A ref that was not found may only have been out of sight: this check makes the answer certain.
    repository.confirm_identity()
    return {name.decode(): values.format_value(name, repository) for name in there}
