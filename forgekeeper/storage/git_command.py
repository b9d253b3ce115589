"""Run git on one repository: without anyone's configuration or hooks, and with an end that leaves no locks.

A killed git leaves `packed-refs.lock` behind, which blocks every push.  Git that gets SIGTERM removes its locks, so it
is given time for that before it is killed.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

# Nothing that a person, the machine or the caller has set reaches git, GIT_* least of all.
_ENVIRONMENT = {
    "PATH": os.defpath,
    "HOME": "/nonexistent",
    "LC_ALL": "C",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_TERMINAL_PROMPT": "0",
}
_CONFIG = (
    "core.hooksPath=/dev/null",
    # Git would look six times whether a ref has the name of the oid that it is given: half its time.
    "core.warnAmbiguousRefs=false",
    "gc.auto=0",
    # Milliseconds to wait for another's lock, as Gitaly has them.
    "core.packedRefsTimeout=10000",
    "core.filesRefLockTimeout=1000",
)
_OPTIONS = [part for setting in _CONFIG for part in ("-c", setting)]

_GLANCE = 0.1
"""Seconds after which an exception that another thread raised in this one is noticed at the latest."""

_COMPLAINT = 65_536
"""Bytes of git's standard error that are read."""


class GitError(Exception):
    """Something that git needs is missing, or stands in its way."""

    error_kind = "gitaly"


class GitUnavailable(GitError):
    """There is no git to run."""


class GitTimedOut(GitError):
    """Git was ended because its time was up; what it has done is unknown."""


@dataclass(frozen=True)
class Answer:
    """What git answered; the files last as long as the context."""

    code: int
    out: IO[bytes]
    err: IO[bytes]

    def complaint(self) -> bytes:
        """Return the end of what git wrote to standard error, from its fatal line on if there is one; never nothing."""
        if self.code < 0:
            return b"git was ended by signal %d" % -self.code
        self.err.seek(max(0, self.err.seek(0, os.SEEK_END) - _COMPLAINT))
        said = self.err.read()
        fatal = re.search(rb"^fatal: ", said, re.MULTILINE)
        return (said[fatal.end() :] if fatal else said) or b"git ended with status %d and without a word" % self.code


@dataclass(frozen=True)
class Git:
    """Git for one repository, until an instant of the monotonic clock."""

    git_dir: Path
    until: float
    grace: float
    user: tuple[int, int] | None = None
    """The user and group that git runs as; None: ours."""

    @contextmanager
    def run(self, *arguments: str | bytes, given: bytes = b"") -> Iterator[Answer]:
        """Run git to its end, with *given* as its standard input.

        Raises `GitUnavailable` and `GitTimedOut`.  Any other exception in this thread ends git before it goes on.
        """
        program = shutil.which("git")
        if program is None:
            raise GitUnavailable("there is no git on the PATH")
        if time.monotonic() >= self.until:
            raise GitTimedOut("the time was up before git was started")
        # Never -C: where the directory is missing, git would take the repository around it.
        command = [program, *_OPTIONS, f"--git-dir={self.git_dir}", *arguments]
        # Files, not pipes: neither side ever waits for the other to read.
        with TemporaryFile() as stdin, TemporaryFile() as out, TemporaryFile() as err:
            stdin.write(given)
            stdin.seek(0)
            code = self._run(command, stdin, out, err)
            out.seek(0)
            err.seek(0)
            yield Answer(code, out, err)

    def _run(self, command: Sequence[str | bytes], stdin: IO[bytes], out: IO[bytes], err: IO[bytes]) -> int:
        try:
            process = subprocess.Popen(
                command,
                env=_ENVIRONMENT,
                cwd="/",
                stdin=stdin,
                stdout=out,
                stderr=err,
                start_new_session=True,  # Ctrl-C at our terminal must not reach git
                user=self.user and self.user[0],
                group=self.user and self.user[1],
                extra_groups=self.user and [],
            )
        except OSError as error:
            raise GitUnavailable(f"git cannot be started: {error.strerror}") from None
        ended = False
        try:
            ended = _wait(process, self.until)
        finally:
            killed = not ended and _end(process, self.grace)
        if not ended:
            raise GitTimedOut(
                "git was killed: its time was up and SIGTERM did not end it; its locks may be left in the repository"
                if killed
                else "its time was up"
            )
        return process.returncode


def legible(said: bytes, limit: int = 200) -> str:
    """Return the first line of what git wrote, without anything that a terminal or a log would obey.

    A line that is too long loses its middle: the reason stands at its end.
    """
    line = said.strip().partition(b"\n")[0].decode(errors="backslashreplace")
    text = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)
    return text if len(text) <= limit else f"{text[: limit // 2 - 1]}…{text[-limit // 2 :]}"


def _end(process: subprocess.Popen[bytes], grace: float) -> bool:
    """End git and all that it has started; return whether it had to be killed."""
    _signal(process, signal.SIGTERM)
    if _wait(process, time.monotonic() + grace):
        return False
    _signal(process, signal.SIGKILL)
    process.wait()
    return True


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # It leads its session, and is not reaped: the number belongs to no other process.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _wait(process: subprocess.Popen[bytes], until: float) -> bool:
    """Return whether *process* has ended by *until*."""
    # Popen.wait() looks every 50 ms, longer than most commands take.
    handle = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        while (left := until - time.monotonic()) > 0:
            if poll.poll(1_000 * min(left, _GLANCE)):
                break
    finally:
        os.close(handle)
    return process.poll() is not None
