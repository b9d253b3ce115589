"""Start Python programs quickly: as forks of one process that has already imported the product.

Each fork has its own session, environment, folder, streams and exit status, like a new program.  With NO_FORKS in the
environment programs are started without forks, as coverage requires.
"""

import contextlib
import gc
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.harness.waiting import scale_timeout

ROOT = Path(__file__).parents[2]
MODULES = (
    "forgekeeper.cli.commands",
    "forgekeeper.cli.running",
    "dramatiq.cli",
    "forgekeeper.exporter",
    "scheduler",
    "forgekeeper.process",
)
"""Modules that the forked process imports in advance."""
MAX_REQUEST_BYTES = 200_000
NUMBER = 20
"""Bytes of each number in the pipe, id and status: both may be written before anybody reads."""


class Fork:
    """A forked process with the interface of `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], told: int) -> None:
        self.args = ["python", *words]
        self.returncode: int | None = None
        self._told = told
        self._waiting = threading.Lock()
        self.pid = int(os.read(told, NUMBER))

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        # Two threads may wait: only one may read the status and close the pipe.
        with self._waiting:
            if self.returncode is None:
                if not select.select([self._told], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                self.returncode = int(os.read(self._told, NUMBER))
                os.close(self._told)
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # The process may have ended before its status has arrived.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """The process that forks; it starts with the first request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asking: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def start(self, words: Sequence[str], *, env: dict[str, str], cwd: Path | str, streams: Sequence[int]) -> Fork:
        """Start `python <words>`: `-m` and a module, or the path of a file.  *streams* are its three standard streams."""
        with self._lock:
            if self._asking is None:
                self._begin()
            assert self._asking is not None
            told, tells = os.pipe()
            request = json.dumps({"words": list(words), "env": env, "cwd": str(cwd)}).encode()
            socket.send_fds(self._asking, [request], [*streams, tells])
            os.close(tells)
        return Fork(words, told)

    def _begin(self) -> None:
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.forks", str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        """End the process; the caller has ended all forks."""
        if self._asking is not None and self._server is not None:
            self._asking.close()
            self._server.wait()
            self._asking = None


FORKS = Forks()


def start(
    words: Sequence[Any],
    *,
    env: dict[str, str],
    cwd: Path | str | None = None,
    stdout: Any = subprocess.DEVNULL,
    stderr: Any = subprocess.DEVNULL,
) -> Any:
    """Start `python <words>` in a session of its own, with empty standard input; *stdout* and *stderr* are open files."""
    said = [str(word) for word in words]
    if "NO_FORKS" in os.environ:
        streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
        return subprocess.Popen([sys.executable, *said], env=env, cwd=cwd, **streams, start_new_session=True)
    with Path(os.devnull).open("r+b") as nothing:
        files = [nothing if file == subprocess.DEVNULL else file for file in (nothing, stdout, stderr)]
        return FORKS.start(said, env=env, cwd=cwd or Path.cwd(), streams=[file.fileno() for file in files])


def run(
    words: Sequence[Any], *, env: dict[str, str], cwd: Path | str | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run `python <words>` to its end; return its status and output."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start(words, env=env, cwd=cwd, stdout=out, stderr=err)
        try:
            status = process.wait(scale_timeout(timeout))
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(words), status, out.read().decode(), err.read().decode())


def serve(asked: socket.socket) -> list[str] | None:
    """Fork for each request until the socket is closed.

    Returns the words of its program in each fork, and None in the process that forks.
    """
    selector = selectors.DefaultSelector()
    selector.register(asked, selectors.EVENT_READ)
    while True:
        for key, _events in selector.select():
            if key.fileobj is asked:
                request, files, _flags, _address = socket.recv_fds(asked, MAX_REQUEST_BYTES, 4)
                if not request:
                    return None
                pid = os.fork()
                if pid == 0:
                    # If they were garbage-collected later, they would close files that have reused their numbers.
                    selector.close()
                    asked.close()
                    return _become(json.loads(request), files)
                tells = files.pop()
                os.write(tells, f"{pid:{NUMBER}}".encode())
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, tells))
                for file in files:
                    os.close(file)
            else:
                pid, tells = key.data
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                selector.unregister(key.fileobj)
                with contextlib.suppress(BrokenPipeError):  # nobody reads the status
                    os.write(tells, f"{status:{NUMBER}}".encode())
                os.close(tells)
                os.close(key.fd)


def _become(request: dict[str, Any], files: list[int]) -> list[str]:
    os.setsid()
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    os.closerange(3, MAX_REQUEST_BYTES)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path += [
        folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", *sys.path)
    ]
    words: list[str] = request["words"]
    return words


def become_program(words: list[str]) -> None:
    """Run the program that `python <words>` runs."""
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    for module in MODULES:
        __import__(module)
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    told_to = serve(socket.socket(fileno=int(sys.argv[1])))
    if told_to is not None:
        become_program(told_to)
