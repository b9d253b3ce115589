"""A real PostgreSQL and a real Redis, for the demo, development, tests and benchmarks.

Both come from wheels, listen on unix sockets only, and end with the process that started them, by whatever signal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from demo.servers import postgres, redis_server
from demo.servers.folder import opened
from demo.servers.machine import EmbeddedError, EmbeddedUnavailable, Programs

__all__ = ["EmbeddedError", "EmbeddedUnavailable", "Servers", "servers"]


@dataclass(frozen=True)
class Servers:
    """Where the running servers are."""

    folder: Path
    database_url: str
    redis_url: str
    postgres_pid: int
    redis_pid: int


@contextmanager
def servers(folder: Path | None = None, *, postgres_options: Mapping[str, str] | None = None) -> Iterator[Servers]:
    """Run PostgreSQL, with an empty database `forgekeeper`, and Redis while the context lasts.

    Without *folder* everything is in a temporary one that is removed in the end, and durability is traded for speed.
    With *folder* the data stays for the next start; a folder that is in use is refused.  *postgres_options* are server
    settings such as `fsync`.
    """
    programs = Programs.found()
    with ExitStack() as stack:
        yield _started(stack, folder, programs, postgres_options or {})


def _started(stack: ExitStack, folder: Path | None, programs: Programs, options: Mapping[str, str]) -> Servers:
    try:
        site = stack.enter_context(opened(folder))
        redis = redis_server.start(site, programs.redis)
        stack.callback(redis.stop)
        database = postgres.start(site, programs, options)
        stack.callback(database.stop)
        redis.wait_until_ready()
        database.wait_until_ready()
    except OSError as error:
        raise EmbeddedError(str(error)) from error
    # The servers hold it; a process that we fork must not.
    site.lock.close()
    return Servers(site.folder, postgres.url(site), redis_server.url(site), database.process.pid, redis.process.pid)
