"""The process that owns the servers: it stops them when its parent, or a SIGTERM, ends it.

It is run as `python -m forgekeeper.embedded.keeper PLAN` and answers with one line of JSON.  The parent's
death is seen through a pidfd, because the writing end of a pipe would live on in every child
the parent forked.  Should the keeper itself be killed, the kernel stops the servers,
and the parent, if it still lives, removes the temporary folder.
"""

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from forgekeeper.embedded import folder, redis
from forgekeeper.embedded.errors import EmbeddedError
from forgekeeper.embedded.plan import Plan
from forgekeeper.embedded.postgres import Postgres
from forgekeeper.embedded.report import Report


def main() -> None:
    """Run the servers of the plan in the first argument until the end."""
    plan = Plan(**json.loads(sys.argv[1]))
    os.umask(0o077)
    stop_requests = _stop_requests()
    parent = _open_parent(plan.parent_pid)
    if parent is None:
        return
    try:
        with _running(plan) as report:
            _answer(asdict(report))
            _wait_for_either(parent, stop_requests.fileno())
    except (EmbeddedError, OSError) as error:
        _answer({"error": str(error)})


def _stop_requests() -> socket.socket:
    """Turn the signals that end us into something to wait for, so that they interrupt nothing."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    # Detached, because the descriptor has to stay open for as long as we live.
    signal.set_wakeup_fd(writer.detach())
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return reader


def _open_parent(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the parent dies, or None if it has died already."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # Asked after opening: while *pid* is our parent the number cannot be another process's.
    return descriptor if os.getppid() == pid else None


@contextmanager
def _running(plan: Plan) -> Iterator[Report]:
    with ExitStack() as stack:
        site = stack.enter_context(folder.opened(Path(plan.folder) if plan.folder else None))
        redis_server = redis.start(site, Path(plan.redis_binary))
        stack.callback(redis_server.stop)
        binaries = Path(plan.postgres_binaries)
        postgres = Postgres(site, binaries, plan.postgres_prefix, plan.postgres_owner)
        postgres_server = postgres.start(plan.postgres_options)
        stack.callback(postgres_server.stop)
        redis_server.wait_until_ready(redis.answers(site))
        postgres_server.wait_until_ready(postgres.answers(postgres_server))
        yield Report(
            folder=str(site.folder),
            database_url=postgres.url(),
            redis_url=redis.url(site),
            postgres_pid=postgres_server.process.pid,
            redis_pid=redis_server.process.pid,
            temporary_folders=[str(path) for path in site.temporary_folders],
        )


def _answer(answer: dict[str, object]) -> None:
    # A parent that died meanwhile is noticed right after.
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


def _wait_for_either(*descriptors: int) -> None:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll()


if __name__ == "__main__":
    main()
