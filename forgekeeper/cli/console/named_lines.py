"""Files of named lines, such as the users of the console: read as a whole, changed under a lock."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Generic, NamedTuple, Protocol, TypeVar

from forgekeeper.cli.terminal import WRONG_USE_STATUS, Problem

MAX_NAME_LENGTH = 100
"""Maximum characters of a name."""
NAME_RULE = f"a name has 1 to {MAX_NAME_LENGTH} printable characters, no colon, and no space around it"


class NamedLine(Protocol):
    """A line of the file: its parts are separated by colons, and the name is the first."""

    @property
    def name(self) -> str:
        """The name, unique in the file."""

    def format_line(self) -> str:
        """Return the line, without its end."""


Line = TypeVar("Line", bound=NamedLine)


class LineFormat(NamedTuple, Generic[Line]):
    """The *noun* and the *form* of a line for sentences, the *command* that adds lines, and the parser.

    The parser returns None if the line is malformed.
    """

    noun: str
    form: str
    command: str
    parse_line: Callable[[str], Line | None]


class LineFile(NamedTuple, Generic[Line]):
    """The lines of a file, in the *expected* format."""

    path: Path
    expected: LineFormat[Line]

    def read_lines(self) -> dict[str, Line]:
        """Read the lines by name; raise `Problem` if the file is unreadable or writable by others."""
        path, noun, command = self.path, self.expected.noun, self.expected.command
        try:
            text, mode = path.read_text(encoding="utf-8"), path.stat().st_mode
        except FileNotFoundError:
            raise Problem(f"there is no {path}: {command} creates it", WRONG_USE_STATUS) from None
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8"
            raise Problem(f"cannot read the {noun}s in {path}: {why}; fix the file", WRONG_USE_STATUS) from None
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Problem(f"others may write {path}: run `chmod 600 {path}`", WRONG_USE_STATUS)
        found: dict[str, Line] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            if (one := self.expected.parse_line(line.strip())) is None or one.name in found:
                # The line may contain a secret, so the error does not repeat it.
                sentence = (
                    f"line {number} of {path} is not a {noun}, or repeats a {noun}: write {self.expected.form}, or run"
                    f" {command}"
                )
                raise Problem(sentence, WRONG_USE_STATUS)
            found[one.name] = one
        return found

    @contextmanager
    def edit_lines(self) -> Iterator[dict[str, Line]]:
        """Change the lines inside the block, under a lock.

        The file is replaced atomically, and only its owner may read it.
        """
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            # Without the lock, the later of two concurrent changes would restore a line that the earlier removed.
            fcntl.flock(folder, fcntl.LOCK_EX)
            lines = self.read_lines() if self.path.exists() else {}
            yield lines
            _replace_file(self.path.resolve(), "".join(f"{one.format_line()}\n" for one in lines.values()))
        finally:
            os.close(folder)

    def remove_line(self, name: str) -> None:
        """Remove the line of that name; raise `Problem` if there is none."""
        with self.edit_lines() as known:
            if known.pop(name, None) is None:
                there = ", ".join(known) or "none"
                raise Problem(f"there is no {self.expected.noun} {name!r} in {self.path}; there are: {there}")


def is_valid_name(name: str) -> bool:
    """Check whether *name* is valid for a line."""
    return 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable() and ":" not in name and name == name.strip()


def _replace_file(path: Path, text: str) -> None:
    with NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    if path.exists() and os.geteuid() == 0:
        os.chown(file.name, path.stat().st_uid, path.stat().st_gid)
    Path(file.name).replace(path)
