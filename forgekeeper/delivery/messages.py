"""The messages of runs and children, and the guarantees that Dramatiq does not give them.

A run's message only says that a run can be started; the run's row decides.  Dramatiq loses messages: a message that
fails while Redis is down is acknowledged, and the message of a dead worker returns by chance.  So a run's message has
the number and token of a row of `job_runs`.  If that row cannot be started, the message is a duplicate and is
acknowledged.  The schedulers send a run again if it does not start (`forgekeeper.ledger.reconcile`).

A child works on a share of the due records:

* A child has a key.  `forgekeeper:queued` maps the key to Dramatiq's id of its last message.  The entry counts until
  the acknowledgement, while Dramatiq keeps the body: a message that vanished frees its key.
* Dramatiq gives the message of a dead process to another process, without a limit (its issue 213).  Here each start is
  counted until it ends.  A child that has killed three processes is put into quarantine.
* A rejected message (unknown actor, unreadable, wrong queue) is put into quarantine with all that is known about it.

Nothing is retried inside Redis: a failed child waits in quarantine, and the next run sends it again.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import peewee as pw
import redis
import structlog
from dramatiq import Broker, Message, MessageProxy
from dramatiq.brokers.redis import RedisBroker
from dramatiq.encoder import JSONEncoder
from dramatiq.errors import DecodeError
from dramatiq.middleware import Middleware, SkipMessage
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper.api.batches import BATCHES, CHILDREN, BatchSpec, ChildSpec
from forgekeeper.delivery.children import (
    FAILED_OPTION,
    RUN_OPTION,
    count_starts,
    enqueue_children,
    forget_children,
    list_calls,
)
from forgekeeper.delivery.process import MessageNotReady, ProcessMiddleware
from forgekeeper.delivery.queues import QUEUED_CHILDREN_KEY, bodies_key, list_fetched
from forgekeeper.engine import record_counts
from forgekeeper.engine.message_attempt import MessageAttempt
from forgekeeper.engine.record_counts import suppress_count_errors
from forgekeeper.ledger import manual_runs, quarantine
from forgekeeper.ledger.holds import Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform import shutdown
from forgekeeper.platform.connections import client, process_identity
from forgekeeper.platform.database import database
from metrics.catalogue import NO_BATCH
from metrics.instruments import count_dead_letter
from metrics.logs import clean_text

TOKEN_OPTION = "forgekeeper_token"  # noqa: S105, it is no secret
"""The option with the token of the run's row: a number alone may name another run after a restore."""
DIVIDED_OPTION = "forgekeeper_divided"
"""The option of a message whose children have messages of their own now."""
UNREADABLE_ACTOR = "unreadable"
"""The actor of a body that is not a message, and the option with that body."""
TEXT_FIELDS = dict.fromkeys(("queue_name", "actor_name", "message_id"), str)
MESSAGE_FIELD_TYPES = TEXT_FIELDS | {"args": list, "kwargs": dict, "options": dict, "message_timestamp": int}

log = structlog.get_logger(__name__)


class MessageEncoder(JSONEncoder):
    """Dramatiq's JSON, which reads every body.

    A body that is not a message gets an unknown actor.  Dramatiq rejects that actor's message.  Otherwise its consumer
    would restart at an undecodable body and forget the other messages that it has fetched.
    """

    def decode(self, data: bytes) -> dict[str, Any]:
        """Return the fields of a message."""
        try:
            found: dict[str, Any] = super().decode(data)
            types = {name: type(value) for name, value in found.items()}
        except (DecodeError, ValueError, RecursionError, AttributeError):
            types = {}
        if types == MESSAGE_FIELD_TYPES and isinstance(found["options"].get("redis_message_id"), str):
            return found
        return Message(
            UNREADABLE_ACTOR, UNREADABLE_ACTOR, (), {}, {UNREADABLE_ACTOR: data}, UNREADABLE_ACTOR, 0
        ).asdict()


class RunMessages(Middleware):
    """Middleware that starts a message's run and closes it before the acknowledgement.

    The actor gets the attempt.
    """

    def __init__(self, process: ProcessMiddleware) -> None:
        self._process = process

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Begin the attempt; skip a message whose row cannot be started."""
        batch = BATCHES.get(message.actor_name)
        if batch is None:
            return
        number, token = message.message_id, message.options.get(TOKEN_OPTION)
        try:
            started = JobRun.start(batch.name, int(number), token=UUID(token), by=process_identity())
            reason = Hold.find_state(batch.name) if started is None else None
        except (pw.PeeweeException, AttributeError, TypeError, ValueError) as error:
            raise MessageNotReady(f"run {number} cannot be started: {error}") from error
        if started is None:
            # The row of a batch with a hold stays open; its message is sent again after the hold.
            record_counts.count_skipped_run(batch.name, reason or "duplicate")
            log.info("run skipped", batch=batch.name, run=int(number), reason=reason or "duplicate")
            raise SkipMessage
        record_counts.count_late_start(batch.name, started)
        attempt = self._process.runner.create_attempt(batch, started)
        self._process.note_attempt(attempt.__enter__())
        message.args = (attempt,)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """Close the attempt; if it could not begin, its run is sent again."""
        if message.actor_name in BATCHES:
            self._process.close_attempt(message, exception)


def build_run_message(batch: BatchSpec, run: JobRun) -> Message[Any]:
    """Return the message that starts *run*, and no other run with its number before a restore."""
    return Message(batch.queue, batch.name, (), {}, {TOKEN_OPTION: str(run.token)}, str(run.id))


def enqueue_run(run: JobRun) -> None:
    """Send the run's message; raise `redis.RedisError`."""
    batch = BATCHES[run.batch]
    batch.broker.enqueue(build_run_message(batch, run))


def send_batch(batch: BatchSpec) -> Message[Any]:
    """Send a new run of the batch, or its open run; return the message, or raise `NotSent`."""
    return build_run_message(batch, manual_runs.send_run(batch, enqueue_run))


class ChildMessages(Middleware):
    """Middleware that begins a child's attempt and closes it before the acknowledgement."""

    def __init__(self, process: ProcessMiddleware) -> None:
        self._process = process

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Begin the attempt; skip a child that has killed too many processes.

        If a process died while it worked on a message with several children, each gets a message of its own: only the
        child that kills processes is put into quarantine.
        """
        child, sender_run = CHILDREN.get(message.actor_name), message.options.get(RUN_OPTION)
        if child is None:
            return
        run, calls = sender_run if isinstance(sender_run, int) else None, list_calls(message)
        try:
            starts = count_starts([key for key, _ in calls])
            if len(calls) > 1 and max(starts) > 1:
                self._send_one_by_one(broker, message, child, run)
                raise SkipMessage
            if quarantine.quarantine_poison(child.batch.name, child.name, calls[0][0], starts=starts[0], run=run):
                log.error("child quarantined", child=child.name, message_id=calls[0][0], reason="worker_lost")
                with suppress_count_errors():
                    count_dead_letter(child.name)
                raise SkipMessage
        except (redis.RedisError, pw.PeeweeException) as error:
            raise MessageNotReady(f"child {message.message_id} cannot be started: {error}") from error
        # A child that was begun before may have failed elsewhere since its message was sent.
        may_have_failed = starts[0] > 1 or message.options.get(FAILED_OPTION) is not False
        attempt = MessageAttempt(self._process.runner, child, calls, run, may_have_failed=may_have_failed)
        self._process.note_attempt(attempt)
        message.args = (attempt, *message.args)

    def _send_one_by_one(self, broker: Broker, message: MessageProxy, child: ChildSpec, run: int | None) -> None:
        """Send a message of its own to each child whose last message is this one."""
        assert isinstance(broker, RedisBroker)
        calls = list_calls(message)
        sent: Any = client.hmget(QUEUED_CHILDREN_KEY, [key for key, _ in calls])
        number = message.options["redis_message_id"].encode()
        ours = [call for call, sent_as in zip(calls, sent, strict=True) if sent_as == number]
        count_starts([key for key, _ in calls], by=-1)
        # The process that died may have recorded a failure.
        enqueue_children(broker, child, [[one] for one in ours], run, failed=[key for key, _ in ours])
        log.warning("children sent one by one", child=child.name, message_id=message.message_id, children=len(ours))
        message.options[DIVIDED_OPTION] = True

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """Close the attempt, forget the message, and send the successors of children that left work."""
        child = CHILDREN.get(message.actor_name)
        if child is None:
            return
        attempt = self._process.close_attempt(message, exception)
        # The earlier starts of a child that did not begin still count.
        forget_children(message, starts=attempt is not None)
        if isinstance(attempt, MessageAttempt) and attempt.successors and not shutdown.requested.is_set():
            self._process.fan_out(attempt.run_number, child, attempt.successors)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """Forget the message and its starts, unless its children have messages of their own."""
        if message.actor_name in CHILDREN and DIVIDED_OPTION not in message.options:
            forget_children(message, starts=True)

    def before_nack(self, broker: Broker, message: MessageProxy) -> None:
        """Put an unreadable message into quarantine; Dramatiq keeps it for some days to look at."""
        assert isinstance(broker, RedisBroker)
        known = message.actor_name in broker.actors
        why = "its body names another queue" if known else f"there is no actor {clean_text(message.actor_name)}"
        queue, number = clean_text(message.queue_name), message.message_id
        try:
            if UNREADABLE_ACTOR in message.options:
                # Dramatiq passes neither its queue nor its id: this process has fetched it, so look there.
                mine = list_fetched(client, broker.broker_id, broker.queues)
                bad = (
                    one for one in mine if client.hget(bodies_key(one[0]), one[1]) == message.options[UNREADABLE_ACTOR]
                )
                queue, number = next(bad, ("", ""))
                message.options["redis_message_id"], why = number, "its body is not a message"
            with database.connection_context():
                quarantine.record_failure(NO_BATCH, queue, number, why, reason="unreadable")
        except (redis.RedisError, pw.PeeweeException, MaxConnectionsExceeded) as error:
            # The message stays fetched and is given back: a message rejected now would be lost from view.
            raise MessageNotReady(f"message {number} cannot be rejected: {error}") from error
        log.error("message rejected", queue=queue, message_id=number, reason=why)
        with suppress_count_errors():
            count_dead_letter(message.actor_name)
