"""Keep git inside the repository's own folder: what of a repository would let a deletion write or delete elsewhere.

Git follows a symbolic link in the path of a ref, of its log and of `packed-refs`, and `commondir`
names the folder in which the refs are.  A bare repository of a forge has none of these.  What git
only reads may lead elsewhere: `HEAD` as a link, as old gits made it, `objects` and its alternates,
as pools of forks have them.  A loose ref that is itself a link is deleted as a link.

We look right before git does.  A link that is put in place in between is followed, and a bind
mount or a hard link looks like what it leads to.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from errno import ENAMETOOLONG

_WRITTEN = (b"packed-refs", b"reftable", b"logs/HEAD")
"""What git writes for a deletion, beside the refs and their logs."""

# Git 2.53 and later can have the refs in a folder that is named there; includes do not count for it.
_REFS_ELSEWHERE = re.compile(rb"refstorage\s*=(?:\\\r?\n|[^\n#;])*[:/]", re.IGNORECASE)


def way_out(git_dir: bytes, refs: Iterable[bytes] = ()) -> str | None:
    """Return what would lead git out of *git_dir* when it deletes any of *refs*; None if nothing would.

    May raise OSError.
    """
    if os.path.lexists(git_dir + b"/commondir"):
        return "commondir sends git to another folder: remove it, or correct disk_path"
    if _has_refs_elsewhere(git_dir):
        return "extensions.refStorage in its config names another folder: git must keep the refs in the repository"
    for path in (*_WRITTEN, *_folders_of(refs)):
        if _kind(git_dir + b"/" + path) == stat.S_IFLNK:
            shown = path.decode(errors="backslashreplace")
            return f"{shown} is a symbolic link, and git would delete where it leads: put the real thing in its place"
    return None


def _folders_of(refs: Iterable[bytes]) -> Iterator[bytes]:
    """List the folders in which the refs and their logs lie, the outer ones first."""
    folders = {b"refs"}
    for ref in refs:
        folder = ref.rpartition(b"/")[0]
        while folder not in folders and folder:
            folders.add(folder)
            folder = folder.rpartition(b"/")[0]
    yield b"logs"
    for folder in sorted(folders):
        yield folder
        yield b"logs/" + folder


def _kind(path: bytes) -> int | None:
    """Return what lies at *path*, by the name of `stat`; None where nothing can."""
    try:
        return stat.S_IFMT(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == ENAMETOOLONG:
            return None
        raise


def _has_refs_elsewhere(git_dir: bytes) -> bool:
    try:
        with open(git_dir + b"/config", "rb") as config:  # noqa: PTH123, its path is bytes
            return bool(_REFS_ELSEWHERE.search(config.read(1_000_000)))
    except (FileNotFoundError, NotADirectoryError):
        return False
