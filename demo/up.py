"""The command `up`: every process in one terminal; without URLs, with embedded servers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Self

from demo.sample import prepare_sample, sample_settings
from demo.servers import servers
from demo.tables import make_tables
from demo.traffic import INTERVAL_SECONDS, add_traffic
from forgekeeper.api.batches import BATCHES, queues
from forgekeeper.cli.connection import configured, connected
from forgekeeper.cli.migrate import apply_pending
from forgekeeper.cli.serving import Wait, database_missing, python, python_path
from forgekeeper.cli.terminal import FAILED, Problem, err, wrong_use
from forgekeeper.delivery.boot import load
from forgekeeper.platform import lifetime, shutdown
from forgekeeper.platform.connections import Limits, connect
from forgekeeper.platform.database import database
from forgekeeper.platform.settings import PREFIX, Settings

FOLDER, SAMPLE_FOLDER = Path(".forgekeeper"), "sample"
OBJECT_GRACE_SECONDS = 60
"""Seconds until a deleted sample artifact can no longer be restored with its object."""
PAUSE_SECONDS = 0.2
LISTENING_SECONDS = 30.0
"""Seconds to wait for the console to accept connections before its address is printed."""
TURNS_PER_TRAFFIC = round(INTERVAL_SECONDS / PAUSE_SECONDS)
SECOND_WORKER = 3
"""Distance between the ports of both workers: the second is 9194 by default.

That is the port after the exporter's.
"""
MARGIN = 5.0
"""Seconds that a command may exceed the shutdown timeout, within which all promise to end."""


class Processes:
    """A context in which `forgekeeper` commands run beside this one.

    At its end, the commands get SIGTERM, the last started first, and SIGKILL a little after *shutdown_timeout*. If this
    process dies, even if killed, the kernel sends them SIGTERM.
    """

    def __init__(self, shutdown_timeout: timedelta, output: IO[bytes] | None = None) -> None:
        self._timeout = shutdown_timeout.total_seconds() + MARGIN
        self._output = output
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def start(self, *arguments: str) -> None:
        """Start ``forgekeeper <arguments>``."""
        self._children[" ".join(arguments)] = subprocess.Popen(
            python("forgekeeper.cli", *arguments),
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            # Ctrl-C is for us alone: we end the commands in order.
            start_new_session=True,
            preexec_fn=lifetime.end_with_parent,  # noqa: PLW1509, one system call, no thread of ours holds a lock
        )

    def ended(self) -> str | None:
        """Return a command that has ended by itself; None if all run."""
        return next((name for name, child in self._children.items() if child.poll() is not None), None)

    def __exit__(self, *_error: object) -> None:
        for child in reversed(self._children.values()):
            child.send_signal(signal.SIGTERM)
        ends = time.monotonic() + self._timeout
        for child in reversed(self._children.values()):
            try:
                child.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                # The whole process group: each command leads a session of its own.
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def run_everything(*, sample: bool) -> None:
    """Implement the command `up`."""
    asked = shutdown.requests()
    with ExitStack() as stack:
        own = _servers(stack, load(), sample=sample)
        settings = configured()
        if own and not sample:
            _leave_out_what_cannot_run(settings)
        _migrate(settings, asked, example=own)
        if sample:
            with connected("up"):
                prepare_sample(FOLDER / SAMPLE_FOLDER, settings)
        running = stack.enter_context(Processes(settings.shutdown_timeout))
        _start_all(running, settings)
        err.print("forgekeeper is up; Ctrl-C ends it")
        err.print(_next_step(own=own, sample=sample))
        turns = count(1)
        while asked.empty():
            if name := running.ended():
                raise Problem(f"`forgekeeper {name}` has ended, so everything ends; its log says why", FAILED)
            time.sleep(PAUSE_SECONDS)
            if sample and next(turns) % TURNS_PER_TRAFFIC == 0:
                with connected("up"):
                    add_traffic(settings)
        err.print("ending: runs finish their chunk first")


def _wait_until_listening(running: Processes, settings: Settings) -> None:
    """Wait until the console accepts connections, a process ends, or the time is up.

    A slow machine gets the console's address all the same.
    """
    end = time.monotonic() + LISTENING_SECONDS
    while time.monotonic() < end and not running.ended():
        with suppress(OSError), socket.create_connection((settings.console_host, settings.console_port), timeout=1):
            return
        time.sleep(PAUSE_SECONDS)


def _next_step(*, own: bool, sample: bool) -> str:
    if sample:
        return (
            "next: open the console, or try `forgekeeper status` in another terminal with the settings above;"
            " each minute more expires"
        )
    if own:
        return (
            "next: `forgekeeper up --sample` shows it at work, `forgekeeper peek URL` what it would delete of a forge"
        )
    return "next: `forgekeeper status` in another terminal says what is held, late or due"


def _leave_out_what_cannot_run(settings: Settings) -> None:
    """Switch off batches without their places: on embedded servers they would only be blocked."""
    lacking = {}
    if settings.repositories_root is None:
        lacking["REPOSITORIES_ROOT"] = [one.name for one in BATCHES.values() if one.known_repositories]
    if not settings.object_stores:
        lacking["OBJECT_STORES"] = [one.name for one in BATCHES.values() if one.deletes_from in {"artifacts", "stores"}]
    for setting, names in lacking.items():
        for name in names:
            os.environ.setdefault(f"{PREFIX}CRON_{name.upper()}", "off")
        err.print(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} off: {PREFIX}{setting} is not set")


def _servers(stack: ExitStack, settings: Settings, *, sample: bool) -> bool:
    """Start servers if the settings name neither, and set their URLs; return whether it did."""
    missing = [settings.database_url, settings.redis_url].count(None)
    if sample and missing < 2:
        wrong_use(f"--sample works on embedded servers alone: unset {PREFIX}DATABASE_URL and {PREFIX}REDIS_URL")
    if missing == 0:
        return False
    if missing == 1:
        wrong_use(f"set both {PREFIX}DATABASE_URL and {PREFIX}REDIS_URL, or neither to use embedded servers")
    own = stack.enter_context(servers(folder=FOLDER))
    err.print(f"no URLs are set: using embedded PostgreSQL and Redis in {FOLDER}/; for other terminals:")
    err.print(f"export {PREFIX}DATABASE_URL='{own.database_url}' {PREFIX}REDIS_URL='{own.redis_url}'")
    if own.warning:
        err.print(own.warning)
    os.environ.update({PREFIX + "DATABASE_URL": own.database_url, PREFIX + "REDIS_URL": own.redis_url})
    if sample:
        os.environ.update(sample_settings(FOLDER / SAMPLE_FOLDER, grace_seconds=OBJECT_GRACE_SECONDS))
    return True


def _migrate(settings: Settings, asked: SimpleQueue[None], *, example: bool) -> None:
    connect(settings, Limits.of_worker(settings), name="up", connections=3)
    Wait(asked, said="up").until_there(lambda: database_missing(settings))
    with connected("up", migrated=False):
        apply_pending()
        if example:
            make_tables(database.obj)


def _start_all(running: Processes, settings: Settings) -> None:
    running.start("scheduler")
    # A batch that is due each minute must not wait for a child or another batch: each has a thread.
    of_batches = {batch.queue for batch in BATCHES.values()}
    running.start("worker", "--queues", ",".join(of_batches), "--processes", "1", "--threads", str(len(BATCHES)))
    port = settings.metrics_port_worker and settings.metrics_port_worker + SECOND_WORKER
    running.start("worker", "--queues", ",".join(set(queues()) - of_batches), "--metrics-port", str(port))
    if settings.metrics_port_exporter:
        running.start("exporter")
    if settings.console_port and find_spec("uvicorn"):
        from forgekeeper.cli.console.command import url

        running.start("console")
        _wait_until_listening(running, settings)
        err.print(f"the console is at {url(settings)}")
