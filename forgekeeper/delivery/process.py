"""Process middleware: a worker process from its fork to its end.

It gives each process its clients and each message a database connection, keeps the row of the process and the rows of
its runs alive, and ends a process that is not whole.  What Dramatiq lacks, by its issues and the faults that were
reproduced: a thread that has died leaves half a process (end it); a reply that is lost, or a time-out of an
acknowledgement, leaves a message with a process that does not know it any more (894: give it back); heartbeats stop
with the fetching (beat here, too).
"""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec
from uuid import uuid4

import peewee as pw
import redis
import structlog
from dramatiq import Broker, MessageProxy, Worker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import q_name
from dramatiq.middleware import Middleware, MiddlewareError, SkipMessage, TimeLimit
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper import shutdown
from forgekeeper.batches import BATCHES, ChildSpec, Declared
from forgekeeper.boot import load
from forgekeeper.connections import Limits, client, connect
from forgekeeper.database import database, release
from forgekeeper.declaring.children import Enqueued, Keyed
from forgekeeper.delivery import queues
from forgekeeper.delivery.fan_out import send_children
from forgekeeper.delivery.in_flight import InFlight
from forgekeeper.process import signals
from forgekeeper.process.drain import Drain
from forgekeeper.runs.processes import Heartbeat
from forgekeeper.runs.runner import Runner
from metrics import logs
from metrics.counting import line_written
from metrics.redaction import describe
from metrics.threads import end_process

MAINTENANCE = 200_000
"""Of a million fetches so many look for messages of dead workers: an idle queue is looked after every few seconds."""
RUN_ID = re.compile("[1-9][0-9]{0,17}")
"""How a row's number is written; one digit more might be beyond PostgreSQL's bigint."""
LIMIT_LATE = 60.0
"""Seconds after which a time limit that has not ended its message will not."""

Given = ParamSpec("Given")

log = structlog.get_logger(__name__)


class NotReady(MiddlewareError):
    """The message cannot be worked on now; Dramatiq swallows other errors of a hook and goes on."""


class Undeclared(MiddlewareError):
    """An actor that no run and no child is behind: nobody would hear of its failures."""


def needed(hook: Callable[Given, None]) -> Callable[Given, None]:
    """Let the process end where *hook* fails: Dramatiq would swallow that, and go on with half a process."""

    @wraps(hook)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> None:
        try:
            hook(*args, **kwargs)
        except Exception as error:
            log.critical("process ends itself", reason="it cannot start", exc_info=error)
            raise SystemExit(1) from error

    return called


class Process(Middleware):
    """What a worker process owns."""

    def __init__(self) -> None:
        self.in_flight = InFlight()
        self._worker: Worker | None = None
        self._stranded: set[tuple[str, str]] = set()

    def before_declare_actor(self, broker: Broker, actor: Any) -> None:
        """Take batches and children only."""
        if not isinstance(actor, Declared):
            raise Undeclared(f"actor {actor.actor_name} is neither a batch nor a child: declare it by @batch or @child")

    @needed
    def after_process_boot(self, broker: Broker) -> None:
        """Point this process at its servers."""
        assert isinstance(broker, RedisBroker)
        signals.follow()
        settings = load()
        # Not what Dramatiq has put in its place: a pipe to the master, in whose death lines would be lost.
        logs.configure(settings.log_format, settings.log_level, sys.__stderr__, on_line=line_written)
        # One connection for each thread, one for each consumer's rejects, one for the heartbeat.
        connect(settings, Limits.of_worker(settings), name="worker", connections=settings.worker_threads + 2)
        # Where the master has imported the broker, all its processes would have one name.
        broker.broker_id = str(uuid4())
        broker.heartbeat_timeout = round(settings.dead_after.total_seconds() * 1000)
        broker.maintenance_chance = MAINTENANCE
        self._broker, self._settings = broker, settings
        self.heartbeat = Heartbeat("worker", dead_after=settings.dead_after, facts=self._facts, then=self._turn)
        self.runner = Runner(settings, self.fan_out, self.heartbeat)
        self._drain = Drain(self.in_flight.facts, settings.shutdown_timeout)
        # What was imported stays; a collection need not look at it.
        gc.freeze()

    @needed
    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Be known as a process that works, and say that it is ready: its consumers fetch."""
        self._worker = worker
        limits = (actor.options.get("time_limit") for actor in broker.actors.values())
        self._limits = {
            name: limit / 1000 + LIMIT_LATE
            for name, limit in zip(broker.actors, limits, strict=True)
            if limit is not None
        }
        self.heartbeat.start()
        signals.at_last += [self.heartbeat.stop, self._forget_starts]
        self._drain.ready(worker)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Let every run end at its next safe point, and fetch no more: Dramatiq would until the last has ended."""
        log.info("worker draining")
        shutdown.requested.set()
        for consumer in worker.consumers.values():
            consumer.stop()
        self.heartbeat.wake()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """End in an orderly way: the row of the process goes."""
        self.heartbeat.stop()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Note the message, and connect; raise `NotReady` when the database is away."""
        if self._worker is not None and message.queue_name not in self._worker.consumers:
            # A body that lies in another queue than it names; Dramatiq's thread would die of it.
            message.queue_name = next(iter(self._worker.consumers))
            raise SkipMessage
        number = message.message_id if message.actor_name in BATCHES else message.options.get(queues.RUN)
        run = int(str(number)) if RUN_ID.fullmatch(str(number)) else None
        sent_as = message.options["redis_message_id"]
        self.in_flight.begin(message.actor_name, message.message_id, run=run, sent_as=sent_as)
        try:
            database.connect()
        except (pw.PeeweeException, MaxConnectionsExceeded) as error:
            raise NotReady(f"no connection to the database: {error}") from error

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """Give the connection back, whatever happened, and clean."""
        release()

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """Give the connection back."""
        release()

    def before_ack(self, broker: Broker, message: MessageProxy) -> None:
        """Note that this thread is idle; the acknowledgement may wait for Redis, and may be lost without harm."""
        self.in_flight.end()

    before_nack = before_ack

    def fan_out(self, run: int | None, child: ChildSpec, keyed_args: Sequence[Keyed]) -> Enqueued:
        """Send a child's messages."""
        return send_children(self._broker, run, child, keyed_args, limit_depth=self._settings.queue_limit)

    def _forget_starts(self) -> None:
        """Forget the starts of what a shutdown cuts off: after three deployments it would be taken for poison."""
        if keys := [work.message_id for work in self.in_flight.works()]:
            client.hdel(queues.STARTED, *keys)

    def _facts(self) -> dict[str, Any]:
        consumers = self._worker.consumers if self._worker else {}
        names = sorted({q_name(queue) for queue in consumers})
        return {"queues": names, "draining": shutdown.requested.is_set(), "at_work": self.in_flight.facts()}

    def _turn(self) -> None:
        """Look after the threads and the messages, with each heartbeat."""
        assert self._worker is not None
        if not shutdown.requested.is_set():
            self._look_after_threads(self._worker)
        try:
            # Any command of Dramatiq's is a heartbeat in Redis, and consumers that fetch nothing give none.
            self._broker.do_qsize(next(iter(self._worker.consumers)))
            self._give_back(self._worker)
        except redis.RedisError as error:
            log.warning("heartbeat in Redis failed", error=describe(error))

    def _look_after_threads(self, worker: Worker) -> None:
        # One of Dramatiq's own, without which a run that hangs does so for ever.
        limits = [one.manager for one in self._broker.middleware if isinstance(one, TimeLimit)]
        threads = [*worker.workers, *worker.consumers.values(), *limits]
        # Not what each says of itself: one that was made before the fork says for ever that it has stopped.
        alive = set(threading.enumerate())
        dead = [one.name for one in threads if isinstance(one, threading.Thread) and one not in alive]
        if dead:
            end_process("a thread has died", threads=dead)
        elif stuck := self.in_flight.overdue(self._limits):
            # A thread that waits in C hears of no time limit, and keeps what was fetched for it.
            end_process("its time limit has not ended a message", messages=stuck)

    def _give_back(self, worker: Worker) -> None:
        """Give back what is this process's by Redis's account alone, two heartbeats in a row."""
        held = {work.sent_as for work in self.in_flight.works()}
        if not shutdown.requested.is_set():
            # Whoever drains does not begin what it has fetched.
            held |= {item.message.options["redis_message_id"] for item in list(worker.work_queue.queue)}
        found = {
            (queue, message)
            for queue in worker.consumers
            if queue == q_name(queue)
            for message in queues.fetched(client, self._broker.broker_id, queue)
            if message not in held
        }
        for queue, message in found & self._stranded:
            log.warning("message given back", queue=queue, message_id=message)
            self._broker.do_requeue(queue, message)
        self._stranded = found - self._stranded
