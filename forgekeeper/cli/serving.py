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

from forgekeeper.api.batches import queues as declared_queues
from forgekeeper.cli.connection import STATES, configured, require_redis, sentence
from forgekeeper.cli.terminal import FAILED, wrong_use
from forgekeeper.delivery.queues import types
from forgekeeper.platform import lifetime, migrations, shutdown
from forgekeeper.platform.connections import Limits, client, connect
from forgekeeper.platform.coordination.values import DECLARED, misfits
from forgekeeper.platform.database import database, release
from forgekeeper.platform.installation import Installation, claim_by_writing, objection
from forgekeeper.platform.settings import PREFIX, Settings
from forgekeeper.platform.settings.addresses import of_database, of_redis
from metrics.endpoint import FOLDER, Endpoint, begin, listen
from metrics.threads import Thread, ended_itself

SHORTEST, LONGEST = 1.0, 30.0
"""First and longest pause between two checks for missing servers, in seconds."""
LISTEN = 0.1
"""Maximum delay of a signal during a check, in seconds."""

log = structlog.get_logger(__name__)


def scheduler() -> None:
    """Keep the timetable: claim each batch's ticks and send them to the workers.

    Any number may run at once.  It waits for its servers.  SIGTERM and Ctrl-C end it.
    """
    import scheduler as timetable
    from forgekeeper.ledger.reconcile import COUNT

    settings, asked, ready = configured(), shutdown.requests(), threading.Event()
    connect(settings, Limits.of_scheduler(settings), name="scheduler", connections=None)
    unready = lambda: None if ready.is_set() else "the timetable is not kept yet"  # noqa: E731
    endpoint = _serve_probes(settings, settings.metrics_port_scheduler, COUNT.registry, unready=unready)
    Wait(asked, said="scheduler").until_there(lambda: server_missing(settings, types(declared_queues())))
    if endpoint is not None:
        endpoint.is_open = True
    raise typer.Exit(timetable.serve(settings, asked=asked, ready=ready.set))


def worker(
    processes: Annotated[int | None, typer.Option(min=1, help="How many; by default the setting.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each; by default the setting.")] = None,
    queues: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[,NAME…]", help="Only these queues; may be given several times."),
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Where its metrics are; by default the setting.")
    ] = None,
) -> None:
    """Work through the messages of the queues.

    Where children take long, `cron` and `objects` need a worker of their own: a process with no thread free may have
    fetched a run.
    It waits for its servers.  SIGTERM and Ctrl-C let the runs end at their next safe point first.
    """
    queues = _read_queues(queues or ())
    settings, asked = configured(), shutdown.requests()
    port = settings.metrics_port_worker if metrics_port is None else metrics_port
    wait = Wait(asked, said="worker")
    connect(settings, Limits.of_worker(settings), name="worker", connections=3)
    # exec ends this endpoint's thread and closes its port.
    _serve_probes(settings, port, CollectorRegistry())
    wait.until_there(lambda: server_missing(settings, DECLARED | types(declared_queues())))
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
    os.execv(sys.executable, python("forgekeeper.process", *arguments))  # noqa: S606, our own program


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
    os.environ[PREFIX + "WORKER_THREADS"] = str(threads)
    os.environ[PREFIX + "LOG_FORMAT"] = settings.log_format or ("console" if sys.stderr.isatty() else "json")


def python(module: str, *arguments: str) -> list[str]:
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
) -> Endpoint | None:
    """Serve an endpoint at *port* that is not open yet; return None if *port* is 0.

    Raises `PortTaken`: a busy port ends the start, not only the endpoint.
    """
    if not port:
        return None
    endpoint = Endpoint(listen(settings.metrics_host, port), registry, unready=unready, is_open=False)
    endpoint.start()
    return endpoint


def _count_in_files(port: int) -> None:
    """Keep this worker's counters in files for the endpoint at *port*, unless *port* is 0."""
    os.environ.pop(FOLDER, None)
    os.environ[PREFIX + "METRICS_PORT_WORKER"] = str(port)
    if port:
        os.environ[FOLDER] = str(begin())


def exporter() -> None:
    """Serve metrics of the present state: backlogs, queues, leases, the last runs, asked for when scraped.

    PostgreSQL and Redis may be away.  SIGTERM and Ctrl-C end it.
    """
    from forgekeeper import exporter as exporting

    settings = configured()
    connect(settings, exporting.LIMITS, name="exporter", connections=None)
    if not settings.metrics_port_exporter:
        wrong_use(f"{PREFIX}METRICS_PORT_EXPORTER is 0: an exporter without a metrics endpoint has nothing to do")
    page = Endpoint(listen(settings.metrics_host, settings.metrics_port_exporter), exporting.registry(settings))
    asked = shutdown.requests()
    page.start()
    lifetime.tell_supervisor("READY=1", f"STATUS=serves {page.url}")
    log.info("exporter started", url=page.url)
    asked.get()
    log.info("exporter stopped")
    if ended_itself():
        raise typer.Exit(FAILED)


class Missing(NamedTuple):
    """A missing server or schema, its address, and the reason with a remedy."""

    what: str
    where: str
    why: str


class Wait:
    """Waits until nothing is missing, or until the process is asked to end."""

    def __init__(self, asked: SimpleQueue[None], *, said: str) -> None:
        self._asked, self._said = asked, said

    def until_there(self, look: Callable[[], Missing | None]) -> None:
        """Return when *look* finds nothing missing.

        Raises `typer.Exit` with status 0 if the process is asked to end meanwhile, and errors that waiting does not
        cure.
        """
        pause, before = SHORTEST, ""
        while (missing := self._answer(look)) is not None:
            pause = SHORTEST if missing.what != before else min(pause * 2, LONGEST)
            before = missing.what
            # Random, because many processes may wait for one server.
            seconds = round(pause * random.uniform(0.75, 1.0), 3)  # noqa: S311, no secret
            facts = {"missing": missing.what, "where": missing.where, "reason": missing.why, "next_try_in": seconds}
            log.warning("not ready, waiting", process=self._said, **facts)
            lifetime.tell_supervisor(f"STATUS=waiting for {missing.what} at {missing.where}: {missing.why}")
            self._sleep(seconds)
        self.end_if_asked()

    def _answer(self, look: Callable[[], Missing | None]) -> Missing | None:
        """Call *look* in a thread and wait for its answer.

        The main thread gets no signal while libpq waits for a server that hangs.
        """
        answer: futures.Future[Missing | None] = futures.Future()

        def ask() -> None:
            try:
                answer.set_result(look())
            except BaseException as error:  # noqa: BLE001, the thread that waits raises it
                answer.set_exception(error)
            finally:
                release()

        Thread(ask, "look").start()
        while not futures.wait([answer], LISTEN).done:
            self.end_if_asked()
        return answer.result()

    def end_if_asked(self) -> None:
        """Raise `typer.Exit` if a signal has arrived."""
        self._sleep(0)

    def _sleep(self, seconds: float) -> None:
        try:
            self._asked.get(block=seconds > 0, timeout=seconds)
        except Empty:
            return
        log.info("asked to end before it was ready", process=self._said)
        raise typer.Exit(0)


def database_missing(settings: Settings) -> Missing | None:
    """Return why PostgreSQL is not usable; None if it accepts writes."""
    where = of_database(settings.require_database())
    try:
        database.connect(reuse_if_open=True)
        (read_only,) = database.execute_sql("select current_setting('transaction_read_only')::bool").fetchone()
    except pw.PeeweeException as error:
        return _refused("PostgreSQL", where, error)
    return Missing("PostgreSQL", where, f"it takes no writes; {STATES['25006']}") if read_only else None


def server_missing(settings: Settings, keys: Mapping[str, str]) -> Missing | None:
    """Return why PostgreSQL, its schema or Redis is not usable; None if all are.

    Redis must accept writes, and its *keys* must have the given types.
    """
    if (missing := database_missing(settings)) is not None:
        return missing
    what, where = "the schema", of_database(settings.require_database())
    try:
        if pending := migrations.pending(database.obj):
            return Missing(what, where, f"the database lacks {len(pending)} migration(s): run `forgekeeper migrate`")
        what, where = "Redis", of_redis(settings.require_redis())
        require_redis()
        if objection() is None:
            claim_by_writing(client, Installation.ensure())
        misfit = next(misfits(client, keys), None)
    except (redis.RedisError, pw.PeeweeException) as error:
        return _refused(what, where, error)
    return None if misfit is None else Missing(what, where, misfit)


def _refused(what: str, where: str, error: Exception) -> Missing:
    said = sentence(error)
    if said is None:
        raise error
    return Missing(what, where, said)
