"""Process middleware: a worker process from its fork to its end.

It gives each process its clients and each message a database connection, and keeps the rows of the process and its runs
alive.  It adds three parts that Dramatiq lacks.  A process with a dead thread is ended.  If a reply is lost, a
message belongs to a process that does not know it; the message is given back (issue 894).  Dramatiq's heartbeats stop
when fetching stops, so this process sends them.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple
from uuid import uuid4

import peewee as pw
import redis
import structlog
from dramatiq import Broker, MessageProxy, Worker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis, q_name
from dramatiq.middleware import Middleware, MiddlewareError, SkipMessage
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper.api.answers import EnqueueCounts
from forgekeeper.api.batches import Declaration
from forgekeeper.delivery import queues
from forgekeeper.delivery.boot import load_settings
from forgekeeper.delivery.children import list_calls
from forgekeeper.delivery.error_reports import ErrorReporter
from forgekeeper.engine.attempt import Attempt, Runner
from forgekeeper.engine.message_attempt import MessageAttempt
from forgekeeper.engine.record_counts import count_duration_and_failure, suppress_count_errors
from forgekeeper.ledger.heartbeats import Heartbeat
from forgekeeper.platform import shutdown, worker_shutdown
from forgekeeper.platform.connections import ServerTimeouts, client, configure_clients
from forgekeeper.platform.database import database, release_connection
from forgekeeper.platform.worker_shutdown import ShutdownWatchdog
from metrics import logs
from metrics.instruments import WORKER_METRICS, count_log_line
from metrics.logs import clean_text, describe_error
from metrics.threads import PeriodicThread, end_process

TIME_LIMIT_GRACE_SECONDS = 60.0
"""Seconds after a message's time limit until the limit counts as ineffective."""

log = structlog.get_logger(__name__)


class MessageNotReady(MiddlewareError):
    """The message cannot be processed now; Dramatiq swallows other errors of a hook."""


class InFlightMessage(NamedTuple):
    """A message in work *since* an instant of the monotonic clock, and its attempt once begun."""

    message: MessageProxy
    since: float
    attempt: Attempt | MessageAttempt | None = None


class ProcessMiddleware(Middleware):
    """The state of a worker process."""

    def __init__(self, send_children: Callable[..., EnqueueCounts]) -> None:
        self._send_children = send_children
        # The message of each thread, from before its processing until its acknowledgement begins.
        self._in_flight: dict[int, InFlightMessage] = {}
        self._worker: Worker | None = None
        self._stranded: set[tuple[str, str]] = set()
        self._ahead_since: dict[tuple[bytes, float], float] = {}

    def before_declare_actor(self, broker: Broker, actor: Any) -> None:
        """Accept only batches and children."""
        if not isinstance(actor, Declaration):
            raise MiddlewareError(
                f"actor {actor.actor_name} is neither a batch nor a child: declare it with @batch or @child"
            )

    @worker_shutdown.exit_on_error()
    def after_process_boot(self, broker: Broker) -> None:
        """Connect this process to its servers."""
        assert isinstance(broker, RedisBroker)
        worker_shutdown.drain_on_signals()
        settings = load_settings()
        # Not to Dramatiq's replacement: a pipe to the master, whose death would lose lines.
        reporter = ErrorReporter.from_settings(settings)
        on_error = reporter.report_line if reporter else None
        logs.configure(
            settings.log_format, settings.log_level, sys.__stderr__, on_line=count_log_line, on_error=on_error
        )
        self._last_reports = [reporter.close] if reporter else []
        # One connection for each thread, one for the consumers' rejects, one for the heartbeat.
        configure_clients(
            settings, ServerTimeouts.for_worker(settings), name="worker", connections=settings.worker_threads + 2
        )
        # If the master has imported the broker, all its processes would share one id.
        broker.broker_id = str(uuid4())
        broker.heartbeat_timeout = round(settings.dead_after.total_seconds() * 1000)
        # Fetches in a million that look for messages of dead workers: one every few seconds in an idle queue.
        broker.maintenance_chance = 200_000
        self._broker = broker
        self.heartbeat = Heartbeat("worker", dead_after=settings.dead_after, facts=self._collect_facts)
        self._rounds = PeriodicThread("rounds", self._do_round, interval=settings.dead_after.total_seconds() / 3)
        self.fan_out = partial(self._send_children, broker, limit_depth=settings.queue_limit)
        self.runner = Runner(settings, self.fan_out, self.heartbeat)
        self._last_reports += [self.runner.tracing.close] if self.runner.tracing else []
        self._drain = ShutdownWatchdog(self.list_in_flight, settings.shutdown_timeout)
        # Imported objects stay.  Without this, each full garbage collection visits them: 0.1 s in a large child.
        gc.freeze()

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Store the worker, so that its consumers are known before they fetch."""
        self._worker = worker

    @worker_shutdown.exit_on_error()
    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Start the heartbeat and report that the process is ready: its consumers fetch."""
        self.heartbeat.start()
        self._rounds.start()
        worker_shutdown.last_steps += [self.heartbeat.stop, self._forget_starts]
        worker_shutdown.last_steps += self._last_reports
        self._drain.announce_ready(worker)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """End every run at its next safe point, and stop fetching.

        Dramatiq would fetch until the last run ends.
        """
        shutdown.requested.set()
        for thread in worker.workers:
            thread.stop()
        for consumer in worker.consumers.values():
            consumer.stop()
        log.info("worker draining")
        self.heartbeat.send_now()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Stop the heartbeat, which deletes the row of the process, and send the last reports."""
        self._rounds.stopped.set()
        self.heartbeat.stop()
        for close in self._last_reports:
            close()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Note the message and connect; raise `MessageNotReady` if the database is down."""
        mine = self._list_holders(message)
        if mine and message.queue_name not in mine:
            # The body names another queue: Dramatiq would acknowledge it there, or its thread would die.
            message.queue_name = mine[0]
            message.fail()
            raise SkipMessage
        self._in_flight[get_ident()] = InFlightMessage(message, time.monotonic())
        with suppress_count_errors():
            WORKER_METRICS.inc("forgekeeper_runs_in_progress", message.actor_name)
            waited = max(0.0, (current_millis() - message.message_timestamp) / 1000)
            WORKER_METRICS.observe("forgekeeper_run_wait_seconds", message.actor_name, seconds=waited)
        try:
            database.connect()
        except (pw.PeeweeException, MaxConnectionsExceeded) as error:
            raise MessageNotReady(f"no connection to the database: {error}") from error

    def _list_holders(self, message: MessageProxy) -> list[str]:
        """List the queues whose consumer has fetched the message; all queues if none has."""
        consumers, number = {} if self._worker is None else self._worker.consumers, message.message_id
        # First the queue that the body names, which is almost always the right one.
        for names in ([message.queue_name], [*consumers]):
            # A consumer whose thread is still connecting does not exist yet.
            held = {
                name: getattr(consumers[name].consumer, "queued_message_ids", ()) for name in names if name in consumers
            }
            if mine := [name for name, ids in held.items() if number in ids]:
                return mine
        return [*consumers]

    def note_attempt(self, attempt: Attempt | MessageAttempt) -> None:
        """Note the attempt at the message of this thread."""
        self._in_flight[get_ident()] = self._in_flight[get_ident()]._replace(attempt=attempt)

    def close_attempt(self, message: MessageProxy, error: BaseException | None) -> Attempt | MessageAttempt | None:
        """Close the attempt at this thread's message; return it, None if it did not begin."""
        _, since, attempt = self._in_flight[get_ident()]
        if attempt is not None:
            attempt.close(error)
        elif error is not None:
            log.error("message not started", actor=message.actor_name, message_id=message.message_id, exc_info=error)
            with suppress_count_errors():
                count_duration_and_failure(message.actor_name, time.monotonic() - since, error.__cause__ or error)
        return attempt

    def before_ack(self, broker: Broker, message: MessageProxy) -> None:
        """Release the connection, because this thread is idle.

        The acknowledgement may wait for Redis or get lost.
        """
        if self._in_flight.pop(get_ident(), None) is not None:
            with suppress_count_errors():
                WORKER_METRICS.inc("forgekeeper_runs_in_progress", message.actor_name, by=-1)
            release_connection()

    before_nack = before_ack

    def list_in_flight(self) -> list[dict[str, Any]]:
        """List the messages in work, the longest first, for the row of the process."""
        return [
            {
                "what": message.actor_name,
                # Other programs make up their own.
                "message_id": clean_text(message.message_id if attempt is None else attempt.message_id)[:200],
                "run": attempt and attempt.run_number,
                "seconds": round(time.monotonic() - since, 3),
            }
            for message, since, attempt in sorted(self._in_flight.values(), key=lambda work: work.since)
        ]

    def _forget_starts(self) -> None:
        """Forget the starts of interrupted work: three deployments would make it poison."""
        if keys := [key for work in list(self._in_flight.values()) for key, _ in list_calls(work.message)]:
            client.hdel(queues.STARTED_CHILDREN_KEY, *keys)

    def _collect_facts(self) -> dict[str, Any]:
        return {
            "queues": self._list_queues(),
            "draining": shutdown.requested.is_set(),
            "at_work": self.list_in_flight(),
        }

    def _list_queues(self) -> list[str]:
        return sorted({q_name(queue) for queue in self._worker.consumers}) if self._worker else []

    def _do_round(self) -> None:
        """Check the threads, send the heartbeat, and return stranded messages."""
        assert self._worker is not None
        if not shutdown.requested.is_set():
            self._check_threads(self._worker)
        try:
            ahead = self._send_heartbeat()
            self._requeue_stranded(self._worker)
            self._expire_dead_workers(ahead)
        except redis.RedisError as error:
            self._ahead_since = {}
            log.warning("heartbeat in Redis failed", error=describe_error(error))

    def _send_heartbeat(self) -> list[tuple[bytes, float]]:
        """Send the heartbeat that any command of Dramatiq's sends; return the heartbeats ahead of our clock.

        Consumers that do not fetch send none.
        """
        instant = current_millis()
        with client.pipeline(transaction=False) as pipe:
            pipe.zadd(queues.HEARTBEATS_KEY, {self._broker.broker_id: instant})
            pipe.zrangebyscore(queues.HEARTBEATS_KEY, instant + self._broker.heartbeat_timeout, "inf", withscores=True)
            _, ahead = pipe.execute()
        return [(name, score) for name, score in ahead]

    def _check_threads(self, worker: Worker) -> None:
        # Check the list of threads: a thread made before the fork always reports that it has stopped.
        dead = {*worker.workers, *worker.consumers.values()} - {*threading.enumerate()}
        if dead:
            end_process("a thread has died", threads=[one.name for one in dead])
        # A thread that waits in C ignores its time limit, and keeps the messages that were fetched for it.
        limit = {
            name: actor.options["time_limit"] / 1000 + TIME_LIMIT_GRACE_SECONDS
            for name, actor in self._broker.actors.items()
        }
        works, now = list(self._in_flight.values()), time.monotonic()
        stuck = [one.message.message_id for one in works if now > one.since + limit[one.message.actor_name]]
        if stuck:
            end_process("a message exceeded its time limit", messages=stuck)

    def _requeue_stranded(self, worker: Worker) -> None:
        """Give back messages that only Redis assigns to this process, in two turns in a row."""
        known: list[Any] = [*list(self._in_flight.values()), *list(worker.work_queue.queue)]
        held = {one.message.options["redis_message_id"] for one in known}
        found = {
            (queue, number)
            for queue, number in queues.list_fetched(client, self._broker.broker_id, self._list_queues())
            if number not in held
        }
        for queue, number in found & self._stranded:
            log.warning("message requeued", queue=queue, message_id=number)
            self._broker.do_requeue(queue, number)
        self._stranded = found - self._stranded

    def _expire_dead_workers(self, ahead: list[tuple[bytes, float]]) -> None:
        """Expire processes that died while their clock was *ahead*.

        Their last heartbeat would count until then.
        """
        instant, timeout = time.monotonic(), self._broker.heartbeat_timeout
        self._ahead_since = {one: self._ahead_since.get(one, instant) for one in ahead}
        for (name, _), since in self._ahead_since.items():
            if instant > since + timeout / 1000:
                client.zadd(queues.HEARTBEATS_KEY, {name: 0}, xx=True)
