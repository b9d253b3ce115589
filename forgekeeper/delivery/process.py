"""Process middleware: a worker process from its fork to its end.

It gives each process its clients and each message a database connection, and keeps the rows of the process and of its
runs alive.  What Dramatiq lacks: a thread that has died leaves half a process (end it); a reply that is lost leaves a
message with a process that does not know it (issue 894: give it back); heartbeats stop with the fetching (beat here).
"""

from __future__ import annotations

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

from forgekeeper.api.answers import Enqueued
from forgekeeper.api.batches import Declared
from forgekeeper.delivery import queues
from forgekeeper.delivery.boot import load
from forgekeeper.engine.attempt import Attempt, Runner
from forgekeeper.engine.counting import attempt_ended, harmless
from forgekeeper.ledger.processes import Heartbeat
from forgekeeper.platform import lifetime, shutdown
from forgekeeper.platform.connections import Limits, client, connect
from forgekeeper.platform.database import database, release
from forgekeeper.platform.lifetime import Drain
from metrics import logs
from metrics.counting import WORKER, line_written
from metrics.logs import clean, describe
from metrics.threads import Rounds, end_process

LIMIT_LATE = 60.0
"""Seconds after which a time limit that has not ended its message will not."""

log = structlog.get_logger(__name__)


class NotReady(MiddlewareError):
    """The message cannot be worked on now; Dramatiq swallows other errors of a hook and goes on."""


class Work(NamedTuple):
    """A message that a thread has worked on *since* a moment of the monotonic clock; its attempt, once begun."""

    message: MessageProxy
    since: float
    attempt: Attempt | None = None


class Process(Middleware):
    """What a worker process owns."""

    def __init__(self, send_children: Callable[..., Enqueued]) -> None:
        self._send_children = send_children
        # What each thread works on, from before the work until its acknowledgement begins.
        self._works: dict[int, Work] = {}
        self._worker: Worker | None = None
        self._stranded: set[tuple[str, str]] = set()
        self._ahead: dict[tuple[bytes, float], float] = {}

    def before_declare_actor(self, broker: Broker, actor: Any) -> None:
        """Take batches and children only."""
        if not isinstance(actor, Declared):
            raise MiddlewareError(f"actor {actor.actor_name} is no batch and no child: declare it as one of them")

    @lifetime.needed()
    def after_process_boot(self, broker: Broker) -> None:
        """Point this process at its servers."""
        assert isinstance(broker, RedisBroker)
        lifetime.follow()
        settings = load()
        # Not what Dramatiq has put in its place: a pipe to the master, in whose death lines would be lost.
        logs.configure(settings.log_format, settings.log_level, sys.__stderr__, on_line=line_written)
        # One connection for each thread, one for each consumer's rejects, one for the heartbeat.
        connect(settings, Limits.of_worker(settings), name="worker", connections=settings.worker_threads + 2)
        # Where the master has imported the broker, all its processes would have one name.
        broker.broker_id = str(uuid4())
        broker.heartbeat_timeout = round(settings.dead_after.total_seconds() * 1000)
        # Of a million fetches so many look for messages of dead workers: in an idle queue one every few seconds.
        broker.maintenance_chance = 200_000
        self._broker = broker
        self.heartbeat = Heartbeat("worker", dead_after=settings.dead_after, facts=self._facts)
        self._rounds = Rounds("rounds", self._turn, interval=settings.dead_after.total_seconds() / 3)
        self.fan_out = partial(self._send_children, broker, limit_depth=settings.queue_limit)
        self.runner = Runner(settings, self.fan_out, self.heartbeat)
        self._drain = Drain(self.at_work, settings.shutdown_timeout)

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Know the consumers before they fetch."""
        self._worker = worker

    @lifetime.needed()
    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Be known as a process that works, and say that it is ready: its consumers fetch."""
        self.heartbeat.start()
        self._rounds.start()
        lifetime.at_last += [self.heartbeat.stop, self._forget_starts]
        self._drain.ready(worker)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Let every run end at its next safe point, and fetch no more: Dramatiq would until the last has ended."""
        shutdown.requested.set()
        for thread in worker.workers:
            thread.stop()
        for consumer in worker.consumers.values():
            consumer.stop()
        log.info("worker draining")
        self.heartbeat.wake()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """End in an orderly way: the row of the process goes."""
        self._rounds.stopped.set()
        self.heartbeat.stop()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Note the message, and connect; raise `NotReady` when the database is away."""
        consumers = {} if self._worker is None else self._worker.consumers
        # A thread that connects has no consumer yet.
        held = {name: getattr(one.consumer, "queued_message_ids", ()) for name, one in consumers.items()}
        mine = [name for name, ids in held.items() if message.message_id in ids] or [*consumers]
        if mine and message.queue_name not in mine:
            # A body that lies in another queue than it names: Dramatiq would acknowledge it there, or its thread die.
            message.queue_name = mine[0]
            message.fail()
            raise SkipMessage
        self._works[get_ident()] = Work(message, time.monotonic())
        with harmless():
            WORKER.inc("forgekeeper_runs_in_progress", message.actor_name)
            waited = max(0.0, (current_millis() - message.message_timestamp) / 1000)
            WORKER.observe("forgekeeper_run_wait_seconds", message.actor_name, seconds=waited)
        try:
            database.connect()
        except (pw.PeeweeException, MaxConnectionsExceeded) as error:
            raise NotReady(f"no connection to the database: {error}") from error

    def begin(self, attempt: Attempt) -> Attempt:
        """Begin the attempt at the message of this thread."""
        self._works[get_ident()] = self._works[get_ident()]._replace(attempt=attempt.__enter__())
        return attempt

    def close(self, message: MessageProxy, error: BaseException | None) -> Attempt | None:
        """Close the attempt at this thread's message with the *error*; return it, None where it could not begin."""
        _, since, attempt = self._works[get_ident()]
        if attempt is not None:
            attempt.close(error)
        elif error is not None:
            log.error("message not begun", actor=message.actor_name, message_id=message.message_id, exc_info=error)
            with harmless():
                attempt_ended(message.actor_name, time.monotonic() - since, error.__cause__ or error)
        return attempt

    def before_ack(self, broker: Broker, message: MessageProxy) -> None:
        """Give the connection back: this thread is idle, the acknowledgement may wait for Redis or be lost."""
        if self._works.pop(get_ident(), None) is not None:
            with harmless():
                WORKER.inc("forgekeeper_runs_in_progress", message.actor_name, by=-1)
            release()

    before_nack = before_ack

    def at_work(self) -> list[dict[str, Any]]:
        """List what the threads work on, the longest first, as the row of the process has it."""
        return [
            {
                "what": message.actor_name,
                "message_id": clean(message.message_id)[:200],  # other programs make up their own
                "run": attempt and attempt.run.number,
                "seconds": round(time.monotonic() - since, 3),
            }
            for message, since, attempt in sorted(self._works.values(), key=lambda work: work.since)
        ]

    def _forget_starts(self) -> None:
        """Forget the starts of what a shutdown cuts off: after three deployments it would be taken for poison."""
        if keys := [work.message.message_id for work in list(self._works.values())]:
            client.hdel(queues.STARTED, *keys)

    def _facts(self) -> dict[str, Any]:
        return {"queues": self._queues(), "draining": shutdown.requested.is_set(), "at_work": self.at_work()}

    def _queues(self) -> list[str]:
        return sorted({q_name(queue) for queue in self._worker.consumers}) if self._worker else []

    def _turn(self) -> None:
        """Look after the threads and the messages."""
        assert self._worker is not None
        if not shutdown.requested.is_set():
            self._look_after_threads(self._worker)
        try:
            # Any command of Dramatiq's is a heartbeat in Redis, and consumers that fetch nothing give none.
            self._broker.do_qsize(next(iter(self._worker.consumers)))
            self._give_back(self._worker)
            self._expire()
        except redis.RedisError as error:
            self._ahead = {}
            log.warning("heartbeat in Redis failed", error=describe(error))

    def _look_after_threads(self, worker: Worker) -> None:
        # Not what each says of itself: one that was made before the fork says for ever that it has stopped.
        dead = {*worker.workers, *worker.consumers.values()} - {*threading.enumerate()}
        if dead:
            end_process("a thread has died", threads=[one.name for one in dead])
        # A thread that waits in C hears of no time limit, and keeps what was fetched for it.
        limit = {name: actor.options["time_limit"] / 1000 + LIMIT_LATE for name, actor in self._broker.actors.items()}
        works, now = list(self._works.values()), time.monotonic()
        stuck = [one.message.message_id for one in works if now > one.since + limit[one.message.actor_name]]
        if stuck:
            end_process("its time limit has not ended a message", messages=stuck)

    def _give_back(self, worker: Worker) -> None:
        """Give back what is this process's by Redis's account alone, two turns in a row."""
        known: list[Any] = [*list(self._works.values()), *list(worker.work_queue.queue)]
        held = {one.message.options["redis_message_id"] for one in known}
        found = {
            (queue, number)
            for queue in self._queues()
            for number in queues.fetched(client, self._broker.broker_id, queue)
            if number not in held
        }
        for queue, number in found & self._stranded:
            log.warning("message given back", queue=queue, message_id=number)
            self._broker.do_requeue(queue, number)
        self._stranded = found - self._stranded

    def _expire(self) -> None:
        """Expire processes that died while their clock was ahead: by their last heartbeat they live until then."""
        instant, timeout = time.monotonic(), self._broker.heartbeat_timeout
        ahead: Any = client.zrangebyscore(queues.HEARTBEATS, current_millis() + timeout, "inf", withscores=True)
        self._ahead = {one: self._ahead.get(one, instant) for one in ahead}
        for (name, _), since in self._ahead.items():
            if instant > since + timeout / 1000:
                client.zadd(queues.HEARTBEATS, {name: 0}, xx=True)
