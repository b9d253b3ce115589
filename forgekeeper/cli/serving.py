"""The commands `scheduler`, `worker` and `exporter`, and the wait for their servers."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from pathlib import Path
from queue import Empty, SimpleQueue
from sysconfig import get_path
from typing import Annotated, NamedTuple

import peewee as pw
import redis
import structlog
import typer
from prometheus_client import CollectorRegistry

from forgekeeper.api.batches import list_queues as declared_queues
from forgekeeper.cli.connection import (
    SQLSTATE_REMEDIES,
    describe_with_remedy,
    load_and_configure_logging,
    require_redis,
)
from forgekeeper.cli.terminal import FAILED_STATUS, wrong_use
from forgekeeper.delivery.queues import required_key_types
from forgekeeper.ledger.event_watch import EventWatch
from forgekeeper.platform import migrations, shutdown
from forgekeeper.platform.connections import ServerTimeouts, client, configure_clients
from forgekeeper.platform.coordination.redis_values import KEY_TYPES, find_wrong_types
from forgekeeper.platform.database import database, release_connection
from forgekeeper.platform.installation import Installation, claim_by_writing, why_misplaced
from forgekeeper.platform.settings import PREFIX, Settings
from forgekeeper.platform.settings.addresses import show_database_url, show_redis_url
from forgekeeper.platform.webhook import Webhook
from metrics.endpoint import MULTIPROC_DIR_VARIABLE, MetricsEndpoint, create_metrics_folder, open_listening_socket
from metrics.supervisor import start_watchdog, tell_supervisor
from metrics.threads import DaemonThread, ended_itself

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 30.0
"""First and longest pause between two checks for missing servers, in seconds."""
SIGNAL_POLL_SECONDS = 0.1
"""Maximum delay of a signal during a check, in seconds."""

log = structlog.get_logger(__name__)


def scheduler() -> None:
    """Claim the ticks of each batch's schedule, and send runs to the workers.

    Any number of schedulers may run at the same time.  A scheduler waits for its servers.  SIGTERM and Ctrl-C end it.
    """
    import scheduler as timetable
    from forgekeeper.ledger.reconcile import SCHEDULER_COUNTERS

    settings = load_and_configure_logging(reports_errors=True)
    asked, ready = shutdown.open_request_queue(), threading.Event()
    configure_clients(settings, ServerTimeouts.for_scheduler(settings), name="scheduler", connections=None)
    unready = lambda: None if ready.is_set() else "the scheduler is not ready yet"  # noqa: E731
    endpoint = _serve_probes(settings, settings.metrics_port_scheduler, SCHEDULER_COUNTERS.registry, unready=unready)
    ServerWait(asked, process_name="scheduler").until_available(
        lambda: find_missing_server(settings, required_key_types(declared_queues()))
    )
    if endpoint is not None:
        endpoint.is_open = True
    raise typer.Exit(timetable.keep_timetable(settings, stop_requests=asked, on_ready=ready.set))


def worker(
    processes: Annotated[int | None, typer.Option(min=1, help="Number of processes; by default the setting.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each process; by default the setting.")] = None,
    queues: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[,NAME…]", help="Only these queues; may be given several times."),
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of its metrics; by default the setting.")
    ] = None,
) -> None:
    """Execute the messages of the queues.

    If children take long, `cron` and `objects` need a worker of their own: a process without a free thread may have
    fetched a run.  A worker waits for its servers.  After SIGTERM and Ctrl-C its runs end at their next safe point.
    """
    queues = _read_queues(queues or ())
    settings, asked = load_and_configure_logging(reports_errors=True), shutdown.open_request_queue()
    port = settings.metrics_port_worker if metrics_port is None else metrics_port
    wait = ServerWait(asked, process_name="worker")
    configure_clients(settings, ServerTimeouts.for_worker(settings), name="worker", connections=3)
    # exec ends this endpoint's thread and closes its port.
    _serve_probes(settings, port, CollectorRegistry())
    wait.until_available(lambda: find_missing_server(settings, KEY_TYPES | required_key_types(declared_queues())))
    threads = threads or settings.worker_threads
    _set_environment(settings, threads)
    arguments = ["--processes", str(processes or settings.worker_processes), "--threads", str(threads)]
    if queues:
        arguments += ["--queues", *queues]
    sys.stdout.flush()
    # Until Dramatiq has installed its handlers, a signal would end its imports with a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    wait.end_if_asked()
    _count_in_files(port)
    os.execv(sys.executable, python_command("forgekeeper.process", *arguments))  # noqa: S606, our own program


def _read_queues(given: Iterable[str]) -> list[str]:
    """Parse names of queues, separated by commas; raise `Problem` for an unknown queue."""
    queues = [name.strip() for names in given for name in names.split(",")]
    for queue in queues:
        if queue not in declared_queues():
            wrong_use(f"there is no queue {queue!r}; there are: {', '.join(declared_queues())}")
    return queues


def _set_environment(settings: Settings, threads: int) -> None:
    """Set the variables that the worker's processes need before their Python starts."""
    os.environ["PYTHONPATH"] = python_path()
    # glibc would keep the freed memory of each thread for this thread: 5 MB after two large children.
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")
    os.environ[PREFIX + "WORKER_THREADS"] = str(threads)
    os.environ[PREFIX + "LOG_FORMAT"] = settings.log_format or ("console" if sys.stderr.isatty() else "json")


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a module of ours.

    Without `-P`, Python would import modules from the current folder.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def python_path() -> str:
    """Return a PYTHONPATH for child processes that does not depend on the current folder."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    given = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(part).is_absolute()]
    # Children search site-packages anyway, after the standard library.
    installed = {get_path("purelib"), get_path("platlib")}
    return os.pathsep.join([*([] if root in installed else [root]), *given])


def _serve_probes(
    settings: Settings, port: int, registry: CollectorRegistry, *, unready: Callable[[], str | None] = lambda: None
) -> MetricsEndpoint | None:
    """Serve an endpoint at *port* that is not open yet; return None if *port* is 0.

    Raises `PortTaken`: a busy port ends the start, not only the endpoint.
    """
    if not port:
        return None
    endpoint = MetricsEndpoint(
        open_listening_socket(settings.metrics_host, port), registry, find_unready_reason=unready, is_open=False
    )
    endpoint.start()
    return endpoint


def _count_in_files(port: int) -> None:
    """Keep this worker's counters in files for the endpoint at *port*, unless *port* is 0."""
    os.environ.pop(MULTIPROC_DIR_VARIABLE, None)
    os.environ[PREFIX + "METRICS_PORT_WORKER"] = str(port)
    if port:
        os.environ[MULTIPROC_DIR_VARIABLE] = str(create_metrics_folder())


def exporter() -> None:
    """Serve metrics of the current state, read on each scrape: backlogs, queues, leases, last runs.

    It also runs without PostgreSQL and Redis, and sends events to the webhook of the settings.  SIGTERM and Ctrl-C
    end it.
    """
    from forgekeeper import exporter as exporting

    settings = load_and_configure_logging(reports_errors=True)
    configure_clients(settings, exporting.EXPORTER_LIMITS, name="exporter", connections=None)
    if not settings.metrics_port_exporter:
        wrong_use(f"{PREFIX}METRICS_PORT_EXPORTER is 0: set it to the port of the metrics")
    page = MetricsEndpoint(
        open_listening_socket(settings.metrics_host, settings.metrics_port_exporter),
        exporting.create_registry(settings),
    )
    asked = shutdown.open_request_queue()
    page.start()
    if (webhook := Webhook.from_settings(settings)) is not None:
        EventWatch(settings, webhook).start()
    start_watchdog()
    tell_supervisor("READY=1", f"STATUS=serves {page.url}")
    log.info("exporter started", url=page.url)
    asked.get()
    log.info("exporter stopped")
    if ended_itself():
        raise typer.Exit(FAILED_STATUS)


class MissingServer(NamedTuple):
    """A missing server or schema, its address, and the reason with a remedy."""

    name: str
    address: str
    reason: str


class ServerWait:
    """Waits until nothing is missing, or until the process is asked to end."""

    def __init__(self, asked: SimpleQueue[None], *, process_name: str) -> None:
        self._asked, self._process_name = asked, process_name

    def until_available(self, find_missing: Callable[[], MissingServer | None]) -> None:
        """Return when *find_missing* finds nothing missing.

        Raises `typer.Exit` with status 0 if the process is asked to end meanwhile, and errors that waiting does not
        cure.
        """
        pause, before = MIN_PAUSE_SECONDS, ""
        while (missing := self._call_in_thread(find_missing)) is not None:
            pause = MIN_PAUSE_SECONDS if missing.name != before else min(pause * 2, MAX_PAUSE_SECONDS)
            before = missing.name
            # Random, because many processes may wait for one server.
            seconds = round(pause * random.uniform(0.75, 1.0), 3)  # noqa: S311, no secret
            facts = {
                "missing": missing.name,
                "where": missing.address,
                "reason": missing.reason,
                "next_try_in": seconds,
            }
            log.warning("not ready, waiting", process=self._process_name, **facts)
            tell_supervisor(f"STATUS=waiting for {missing.name} at {missing.address}: {missing.reason}")
            self._sleep_or_end(seconds)
        self.end_if_asked()

    def _call_in_thread(self, find_missing: Callable[[], MissingServer | None]) -> MissingServer | None:
        """Call *find_missing* in a thread and wait for its answer.

        The main thread gets no signal while libpq waits for a server that hangs.
        """
        answer: futures.Future[MissingServer | None] = futures.Future()

        def set_answer() -> None:
            try:
                answer.set_result(find_missing())
            except BaseException as error:  # noqa: BLE001, the thread that waits raises it
                answer.set_exception(error)
            finally:
                release_connection()

        DaemonThread(set_answer, "look").start()
        while not futures.wait([answer], SIGNAL_POLL_SECONDS).done:
            self.end_if_asked()
        return answer.result()

    def end_if_asked(self) -> None:
        """Raise `typer.Exit` if a signal has arrived."""
        self._sleep_or_end(0)

    def _sleep_or_end(self, seconds: float) -> None:
        try:
            self._asked.get(block=seconds > 0, timeout=seconds)
        except Empty:
            return
        log.info("process stopped before it was ready", process=self._process_name)
        raise typer.Exit(0)


def find_missing_database(settings: Settings) -> MissingServer | None:
    """Return why PostgreSQL is not usable; None if it accepts writes."""
    where = show_database_url(settings.require_database())
    try:
        database.connect(reuse_if_open=True)
        (read_only,) = database.execute_sql("select current_setting('transaction_read_only')::bool").fetchone()
    except pw.PeeweeException as error:
        return _describe_missing("PostgreSQL", where, error)
    return MissingServer("PostgreSQL", where, f"it is read-only; {SQLSTATE_REMEDIES['25006']}") if read_only else None


def find_missing_server(settings: Settings, keys: Mapping[str, str]) -> MissingServer | None:
    """Return why PostgreSQL, its schema or Redis is not usable; None if all are.

    Redis must accept writes, and its *keys* must have the given types.
    """
    if (missing := find_missing_database(settings)) is not None:
        return missing
    what, where = "the schema", show_database_url(settings.require_database())
    try:
        if pending := migrations.list_pending(database.obj):
            return MissingServer(
                what, where, f"the database lacks {len(pending)} migration(s): run `forgekeeper migrate`"
            )
        what, where = "Redis", show_redis_url(settings.require_redis())
        require_redis()
        if why_misplaced() is None:
            claim_by_writing(client, Installation.ensure_id())
        misfit = next(find_wrong_types(client, keys), None)
    except (redis.RedisError, pw.PeeweeException) as error:
        return _describe_missing(what, where, error)
    return None if misfit is None else MissingServer(what, where, misfit)


def _describe_missing(what: str, where: str, error: Exception) -> MissingServer:
    said = describe_with_remedy(error)
    if said is None:
        raise error
    return MissingServer(what, where, said)
