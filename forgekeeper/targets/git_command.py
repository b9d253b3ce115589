"""Run git on one repository, without foreign configuration, and end it without locks.

No hooks run.  A killed git leaves `packed-refs.lock` behind, which blocks every push.  So git first gets SIGTERM, and
time to remove the lock.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from select import POLLIN, POLLOUT, poll, select
from subprocess import PIPE, Popen, TimeoutExpired
from tempfile import TemporaryFile
from typing import IO, NamedTuple

import structlog

KILL_TIMEOUT_SECONDS = 30.0
"""Seconds to wait for a killed git; it ends at once unless it waits for a disk that does not answer."""

# No setting of a person, the machine or the caller reaches git, in particular no GIT_* variable.
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
    # Git would check six times whether a ref has the name of the given oid: half its time.
    "core.warnAmbiguousRefs=false",
    "gc.auto=0",
    # Milliseconds to wait for the lock of another process; the values are Gitaly's.
    "core.packedRefsTimeout=10000",
    "core.filesRefLockTimeout=1000",
)
_OPTIONS = [part for setting in _CONFIG for part in ("-c", setting)]

# Names never contain ": ".
_LOCKED_REF = re.compile(rb"cannot lock ref '(?P<ref>.+?)': (?P<why>.+)")
_HELD_LOCK = re.compile(rb"[Uu]nable to create (?:file )?'?(?P<path>.+?)'?: File exists")
_REF_CHANGED = re.compile(
    rb"is at \w+ but expected \w+\Z|unable to resolve reference '[^:]+'\Z|'.+' exists; cannot create '"
)
_GENERAL_FAILURE = re.compile(
    rb"No space left on device|Disk quota exceeded|Read-only file system|Input/output error|Too many open files"
)

_UPDATE_REF = ("update-ref", "--stdin", "-z", "--no-deref")
_PREPARED, _COMMITTED = b"prepare: ok\n", b"commit: ok\n"
_COMMANDS_PER_WRITE = 500
_PIPE_BYTES = 65_536
"""Maximum bytes to read or write at once: the capacity of a pipe."""

log = structlog.get_logger(__name__)


class GitError(Exception):
    """Git lacks something that it needs, or something prevents its work."""

    error_kind = "gitaly"


class GitTimedOut(GitError):
    """Git was ended at its time limit; it may have done its work or a part of it."""


class GitComplaint(NamedTuple):
    """Git's error message, parsed: the *ref* that stopped it, and whether that has *changed*.

    *lock* is the path of a held lock, relative to the repository.  *general* means that other refs would fail, too.
    """

    text: str
    ref: bytes | None
    changed: bool
    lock: bytes | None
    general: bool


class GitAnswer(NamedTuple):
    """Git's exit status and output."""

    code: int
    out: bytes
    err: bytes

    @property
    def is_committed(self) -> bool:
        """Whether a transaction was committed.

        The status alone is also 0 if git has read only half of it.
        """
        return self.code == 0 and self.out.endswith(_COMMITTED)

    def error_output(self) -> bytes:
        """Return git's standard error, beginning with its fatal line if it has one; never empty."""
        if self.code < 0:
            return b"git was ended by signal %d" % -self.code
        fatal = re.search(rb"^fatal: ", self.err, re.MULTILINE)
        said = self.err[fatal.end() :] if fatal else self.err
        return said or b"git ended with status %d and without a word" % self.code


@dataclass(frozen=True)
class Git:
    """Git for one repository, until an instant of the monotonic clock."""

    git_dir: Path
    until: float
    grace: float = 5.0
    umask: int = -1
    """Permissions that git's files and folders must not have; -1: the umask of this process."""
    user: tuple[int, int] | None = None
    """The user and group of the git process; None: those of this process."""

    def run(
        self, *arguments: str | bytes, input_bytes: bytes = b"", keep_line: Callable[[bytes], object] = bool
    ) -> GitAnswer:
        """Run git to its end, with *input_bytes* as standard input.

        The answer has the output lines to *keep_line*.  Raises `GitTimedOut`, and `GitError` if git is missing.  Any
        other exception in this thread ends git first.
        """
        # Files, not pipes: neither side ever waits for the other to read.
        with TemporaryFile() as stdin, TemporaryFile() as out, TemporaryFile() as err:
            stdin.write(input_bytes)
            stdin.seek(0)
            code = self._wait_for_end(self._start_process(arguments, stdin=stdin, stdout=out, stderr=err))
            out.seek(0)
            err.seek(0)
            return GitAnswer(code, b"".join(line for line in out if keep_line(line)), err.read())

    def update_refs(
        self, commands: Iterable[bytes], *, confirm: Callable[[], bool], meanwhile: Callable[[], object] = bool
    ) -> GitAnswer:
        """Change refs in one transaction of `git update-ref`; return git's answer.

        Git checks the old values and locks the refs first; *meanwhile* is called at the same time.  *confirm* is called
        while git holds these locks: no push can change a ref between that call and the commit, however long this
        process is suspended.  If *confirm* returns False, or one of the two raises, git changes nothing and removes its
        locks.

        Raises the errors of *confirm*, of *meanwhile* and of `run`.
        """
        with TemporaryFile() as err:
            process = self._start_process(_UPDATE_REF, stdin=PIPE, stdout=PIPE, stderr=err)
            assert process.stdin is not None
            assert process.stdout is not None
            with process.stdin, process.stdout:
                try:
                    self._write_commands(process.stdin, chain([b"start"], commands, [b"prepare"]))
                    meanwhile()
                    out = self._read_answer(process.stdout, _PREPARED)
                    if out.endswith(_PREPARED) and confirm():
                        self._write_commands(process.stdin, iter([b"commit"]))
                        out += self._read_answer(process.stdout, _COMMITTED)
                except BaseException:
                    self._end_process(process)
                    raise
                # Without a commit git rolls back its preparations.
                process.stdin.close()
                code = self._wait_for_end(process)
            err.seek(0)
            return GitAnswer(code, out, err.read())

    def _start_process(
        self, arguments: Iterable[str | bytes], *, stdin: IO[bytes] | int, stdout: IO[bytes] | int, stderr: IO[bytes]
    ) -> Popen[bytes]:
        program = shutil.which("git")
        if program is None:
            raise GitError("git is not on the PATH: install it, or correct PATH")
        if time.monotonic() >= self.until:
            raise GitTimedOut("the time limit was reached before git started")
        try:
            return Popen(
                # Never -C: if the directory is missing, git would use the repository around it.
                [program, *_OPTIONS, f"--git-dir={self.git_dir}", *arguments],
                env=_ENVIRONMENT,
                cwd="/",
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                bufsize=0,
                start_new_session=True,  # Ctrl-C at our terminal must not reach git
                umask=self.umask,
                user=self.user and self.user[0],
                group=self.user and self.user[1],
                extra_groups=self.user and [],
            )
        except OSError as error:
            raise GitError(f"cannot start git: {error.strerror}") from None

    def _write_commands(self, stdin: IO[bytes], commands: Iterator[bytes]) -> None:
        """Write *commands* to git, up to their end or the time limit."""
        os.set_blocking(stdin.fileno(), False)
        while some := [*islice(commands, _COMMANDS_PER_WRITE)]:
            left = memoryview(b"\0".join([*some, b""]))
            while left:
                if not self._wait_for(stdin, POLLOUT):
                    return
                left = left[_write_available(stdin, left) :]

    def _read_answer(self, stdout: IO[bytes], expected: bytes) -> bytes:
        """Return git's answer up to *expected*, its end, or the time limit."""
        answer = b""
        while not answer.endswith(expected) and self._wait_for(stdout, POLLIN):
            if not (some := stdout.read(_PIPE_BYTES)):
                break
            answer += some
        return answer

    def _wait_for(self, stream: IO[bytes], event: int) -> bool:
        """Wait for an event of a stream; return False at the time limit."""
        waiting = poll()
        waiting.register(stream, event)
        while (seconds := self.until - time.monotonic()) > 0:
            # An exception that is set in this thread is noticed within a second.
            if waiting.poll(min(seconds, 1.0) * 1000):
                return True
        return False

    def _wait_for_end(self, process: Popen[bytes]) -> int:
        """Return git's status; at the time limit or an interruption, end git and all its children."""
        try:
            # Popen.wait polls only every 50 ms.  An exception that is set in this thread is noticed within a second.
            with suppress(OSError, ValueError), os.fdopen(os.pidfd_open(process.pid), "rb", buffering=0) as handle:
                while (left := self.until - time.monotonic()) > 0 and not select([handle], [], [], min(left, 1.0))[0]:
                    pass
            return process.wait(max(0.0, self.until - time.monotonic()))
        except TimeoutExpired:
            raise self._end_process(process) from None
        except BaseException:
            if process.returncode is None:
                self._end_process(process)
            raise

    def _end_process(self, process: Popen[bytes]) -> GitError:
        """End git; return the error to raise.

        A killed git that does not end is left alone, and its child of the batch fails and waits in quarantine, longer
        each time.  The child's lease expires with its budget, which is over.  The locks that this git still holds keep
        the next git out.
        """
        killed = "git exceeded its time limit, ignored SIGTERM and was killed; it may have left locks behind"
        ways = (
            (signal.SIGTERM, self.grace, "git exceeded its time limit"),
            (signal.SIGKILL, KILL_TIMEOUT_SECONDS, killed),
        )
        for number, patience, said in ways:
            # Git leads its session and is not reaped yet, so the number belongs to no other process.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(TimeoutExpired):
                process.wait(patience)
                return GitTimedOut(said)
        log.error("git survived SIGKILL", pid=process.pid, git_dir=str(self.git_dir))
        return GitError(f"git survived SIGKILL (process {process.pid}): check that its disk answers")


def _write_available(stream: IO[bytes], data: memoryview) -> int:
    """Write the bytes that fit into the pipe; return how many need not be written again."""
    try:
        return stream.write(data[:_PIPE_BYTES]) or 0
    except BrokenPipeError:
        return len(data)  # git has ended, and its answer says why


def parse_complaint(message: bytes, git_dir: Path) -> GitComplaint:
    """Parse git's message about a failed transaction, in the language of LC_ALL=C."""
    ref, lock = _LOCKED_REF.search(message), _HELD_LOCK.search(message)
    return GitComplaint(
        text=clean_first_line(ref["why"] if ref else message),
        ref=ref["ref"] if ref else None,
        changed=bool(ref and _REF_CHANGED.match(ref["why"])),
        lock=os.path.relpath(lock["path"], os.fsencode(git_dir)) if lock else None,
        general=bool(_GENERAL_FAILURE.search(message)),
    )


def clean_first_line(output: bytes) -> str:
    """Return git's first line of output, without characters that control a terminal or a log.

    A line of more than 200 characters loses its middle: the reason is at its end.
    """
    line = output.strip().partition(b"\n")[0].decode(errors="backslashreplace")
    text = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)
    return text if len(text) <= 200 else f"{text[:99]}…{text[-100:]}"
