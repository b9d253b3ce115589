"""The processes that serve: `scheduler`, `worker`, and `up`, which is both with servers of its own."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

import migrations
import scheduler as timetable
from cli.connection import connected, require_redis
from cli.console import FAILED, Problem, err, wrong_use
from cli.processes import Processes
from models import database
from settings import PREFIX, Settings
from settings.reading import load
from workers import QUEUES
from workers.clients import Limits, connect

FOLDER = Path(".forgekeeper")


def scheduler() -> None:
    """Keep the timetable: claim each batch's ticks and send them to the workers.

    Any number may run at once.  SIGTERM and Ctrl-C end it.
    """
    with connected("scheduler") as settings:
        require_redis()
    connect(settings, Limits.of_scheduler(settings), name="scheduler", connections=None)
    raise typer.Exit(timetable.serve(settings))


def worker(
    processes: Annotated[int | None, typer.Option(min=1, help="How many; by default the setting.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each; by default the setting.")] = None,
    queues: Annotated[list[str] | None, typer.Option(help="Only this queue; may be given several times.")] = None,
) -> None:
    """Work through the messages of the queues.

    SIGTERM and Ctrl-C let the runs end at their next safe point first.
    """
    for queue in queues or ():
        if queue not in QUEUES:
            wrong_use(f"there is no queue {queue!r}; there are: {', '.join(QUEUES)}")
    with connected("worker") as settings:
        require_redis()
    threads = threads or settings.worker_threads
    # What a process needs in its environment must be there before its Python starts.
    os.environ[PREFIX + "WORKER_THREADS"] = str(threads)
    os.environ[PREFIX + "LOG_FORMAT"] = settings.log_format or ("console" if sys.stderr.isatty() else "json")
    arguments = ["--processes", str(processes or settings.worker_processes), "--threads", str(threads)]
    if queues:
        arguments += ["--queues", *queues]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "workers", *arguments])  # noqa: S606, our own program


def up() -> None:
    """Run everything in this terminal: a scheduler, a worker for `cron`, one for all other queues.

    Where no URLs are set, PostgreSQL and Redis are embedded and keep their data in
    `.forgekeeper/`.  Ctrl-C ends it all, the runs first.
    """
    ending = threading.Event()

    def received(_signal: int, _frame: FrameType | None) -> None:
        ending.set()

    signal.signal(signal.SIGTERM, received)
    signal.signal(signal.SIGINT, received)
    with ExitStack() as stack:
        environment = stack.enter_context(_servers(load()))
        os.environ.update(environment)
        _migrate_all(example=bool(environment))
        running = stack.enter_context(Processes(environment))
        running.start("scheduler")
        # A minute's batch never waits behind somebody's five-minute child.
        running.start("worker", "--queues", "cron", "--processes", "1", "--threads", "4")
        running.start("worker", *(part for queue in QUEUES if queue != "cron" for part in ("--queues", queue)))
        err.print("forgekeeper is up; Ctrl-C ends it")
        while not ending.wait(0.5):
            if name := running.ended():
                raise Problem(f"`forgekeeper {name}` has ended, so everything ends; its log says why", FAILED)
        err.print("ending: runs finish their chunk first")


@contextmanager
def _servers(settings: Settings) -> Iterator[dict[str, str]]:
    """Provide what the settings lack; yield the environment that leads there."""
    given = (settings.database_url is not None, settings.redis_url is not None)
    if all(given):
        yield {}
        return
    if any(given):
        wrong_use(f"set both {PREFIX}DATABASE_URL and {PREFIX}REDIS_URL, or neither to use embedded servers")
    from embedded import EmbeddedError, servers  # an extra that production does not have

    try:
        with servers(folder=FOLDER) as own:
            err.print(f"no URLs are set: using embedded PostgreSQL and Redis in {FOLDER}/; for other terminals:")
            err.print(f"export {PREFIX}DATABASE_URL='{own.database_url}' {PREFIX}REDIS_URL='{own.redis_url}'")
            yield {PREFIX + "DATABASE_URL": own.database_url, PREFIX + "REDIS_URL": own.redis_url}
    except EmbeddedError as error:
        raise Problem(str(error)) from error


def _migrate_all(*, example: bool) -> None:
    with connected("up", migrated=False):
        migrations.migrate(database.obj)
        if example:
            migrations.migrate(database.obj, "example")
