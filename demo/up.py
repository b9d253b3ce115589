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
from demo.servers import run_servers
from demo.tables import make_tables
from demo.traffic import TRAFFIC_INTERVAL_SECONDS, add_traffic
from forgekeeper.api.batches import BATCHES, list_queues
from forgekeeper.cli.connection import connect_command, load_and_configure_logging
from forgekeeper.cli.migrate import apply_pending
from forgekeeper.cli.serving import ServerWait, find_missing_database, python_command, python_path
from forgekeeper.cli.terminal import FAILED_STATUS, Problem, err, wrong_use
from forgekeeper.delivery.boot import load_settings
from forgekeeper.platform import shutdown, worker_shutdown
from forgekeeper.platform.connections import ServerTimeouts, configure_clients
from forgekeeper.platform.database import database
from forgekeeper.platform.settings import PREFIX, Settings

EMBEDDED_FOLDER, SAMPLE_FOLDER = Path(".forgekeeper"), "sample"
OBJECT_GRACE_SECONDS = 60
"""Seconds until a deleted sample artifact can no longer be restored with its object."""
PROCESS_POLL_SECONDS = 0.2
CONSOLE_START_SECONDS = 30.0
"""Seconds to wait for the console to accept connections before its address is printed."""
TURNS_PER_TRAFFIC = round(TRAFFIC_INTERVAL_SECONDS / PROCESS_POLL_SECONDS)
SECOND_WORKER_PORT_OFFSET = 3
"""Distance between the ports of both workers: the second is 9194 by default.

That is the port after the exporter's.
"""
STOP_MARGIN_SECONDS = 5.0
"""Seconds that a command may exceed the shutdown timeout, within which all promise to end."""


class CommandProcesses:
    """A context in which `forgekeeper` commands run beside this one.

    At its end, the commands get SIGTERM, the last started first, and SIGKILL a little after *shutdown_timeout*. If this
    process dies, even if killed, the kernel sends them SIGTERM.
    """

    def __init__(self, shutdown_timeout: timedelta, output: IO[bytes] | None = None) -> None:
        self._timeout = shutdown_timeout.total_seconds() + STOP_MARGIN_SECONDS
        self._output = output
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def start(self, *arguments: str) -> None:
        """Start ``forgekeeper <arguments>``."""
        self._children[" ".join(arguments)] = subprocess.Popen(
            python_command("forgekeeper.cli", *arguments),
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            # Ctrl-C is for us alone: we end the commands in order.
            start_new_session=True,
            preexec_fn=worker_shutdown.end_with_parent,  # noqa: PLW1509, one system call, no thread of ours holds a lock
        )

    def find_ended(self) -> str | None:
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
    stop_requests = shutdown.open_request_queue()
    with ExitStack() as stack:
        own = _start_missing_servers(stack, load_settings(), sample=sample)
        settings = load_and_configure_logging()
        if own and not sample:
            _leave_out_what_cannot_run(settings)
        _migrate_database(settings, stop_requests, example=own)
        if sample:
            with connect_command("up"):
                prepare_sample(EMBEDDED_FOLDER / SAMPLE_FOLDER, settings)
        running = stack.enter_context(CommandProcesses(settings.shutdown_timeout))
        _start_all(running, settings)
        err.print("forgekeeper is up; Ctrl-C ends it")
        err.print(_next_step(own=own, sample=sample))
        turns = count(1)
        while stop_requests.empty():
            if name := running.find_ended():
                raise Problem(f"`forgekeeper {name}` has ended, so all processes end; see its log", FAILED_STATUS)
            time.sleep(PROCESS_POLL_SECONDS)
            if sample and next(turns) % TURNS_PER_TRAFFIC == 0:
                with connect_command("up"):
                    add_traffic(settings)
        err.print("stopping: runs finish their chunk first")


def _wait_until_listening(running: CommandProcesses, settings: Settings) -> None:
    """Wait until the console accepts connections, a process ends, or the time is up.

    A slow machine gets the console's address all the same.
    """
    end = time.monotonic() + CONSOLE_START_SECONDS
    while time.monotonic() < end and not running.find_ended():
        with suppress(OSError), socket.create_connection((settings.console_host, settings.console_port), timeout=1):
            return
        time.sleep(PROCESS_POLL_SECONDS)


def _next_step(*, own: bool, sample: bool) -> str:
    if sample:
        return (
            "next: open the console, or try `forgekeeper status` in another terminal with the settings above;"
            " more records expire each minute"
        )
    if own:
        return (
            "next: `forgekeeper up --sample` shows it at work, `forgekeeper peek URL` what it would delete from a forge"
        )
    return "next: `forgekeeper status` in another terminal shows held, late and due batches"


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


def _start_missing_servers(stack: ExitStack, settings: Settings, *, sample: bool) -> bool:
    """Start servers if the settings name neither, and set their URLs; return whether it did."""
    missing = [settings.database_url, settings.redis_url].count(None)
    if sample and missing < 2:
        wrong_use(f"--sample needs embedded servers: unset {PREFIX}DATABASE_URL and {PREFIX}REDIS_URL")
    if missing == 0:
        return False
    if missing == 1:
        wrong_use(f"set both {PREFIX}DATABASE_URL and {PREFIX}REDIS_URL, or neither, to use embedded servers")
    own = stack.enter_context(run_servers(folder=EMBEDDED_FOLDER))
    err.print(f"no URLs are set: using embedded PostgreSQL and Redis in {EMBEDDED_FOLDER}/; for other terminals:")
    err.print(f"export {PREFIX}DATABASE_URL='{own.database_url}' {PREFIX}REDIS_URL='{own.redis_url}'")
    if own.warning:
        err.print(own.warning)
    os.environ.update({PREFIX + "DATABASE_URL": own.database_url, PREFIX + "REDIS_URL": own.redis_url})
    if sample:
        os.environ.update(sample_settings(EMBEDDED_FOLDER / SAMPLE_FOLDER, grace_seconds=OBJECT_GRACE_SECONDS))
    return True


def _migrate_database(settings: Settings, stop_requests: SimpleQueue[None], *, example: bool) -> None:
    configure_clients(settings, ServerTimeouts.for_worker(settings), name="up", connections=3)
    ServerWait(stop_requests, process_name="up").until_available(lambda: find_missing_database(settings))
    with connect_command("up", migrated=False):
        apply_pending()
        if example:
            make_tables(database.obj)


def _start_all(running: CommandProcesses, settings: Settings) -> None:
    running.start("scheduler")
    # A batch that is due each minute must not wait for a child or another batch: each has a thread.
    of_batches = {batch.queue for batch in BATCHES.values()}
    running.start("worker", "--queues", ",".join(of_batches), "--processes", "1", "--threads", str(len(BATCHES)))
    port = settings.metrics_port_worker and settings.metrics_port_worker + SECOND_WORKER_PORT_OFFSET
    running.start("worker", "--queues", ",".join(set(list_queues()) - of_batches), "--metrics-port", str(port))
    if settings.metrics_port_exporter:
        running.start("exporter")
    if settings.console_port and find_spec("uvicorn"):
        from forgekeeper.cli.console.command import console_url

        running.start("console")
        _wait_until_listening(running, settings)
        err.print(f"the console is at {console_url(settings)}")
