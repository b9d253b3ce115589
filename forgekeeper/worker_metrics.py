"""Counts messages where they pass: in progress, how long they waited, children's retries, dead letters."""

from __future__ import annotations

from threading import get_ident
from typing import Any

from dramatiq import Broker, Message, MessageProxy
from dramatiq.common import current_millis
from dramatiq.middleware import Middleware, MiddlewareError

from forgekeeper.batches import spec
from forgekeeper.delivery.queues import DUE
from forgekeeper.runs.counting import attempt_ended, harmless
from metrics.counting import WORKER, dead_lettered


class WorkerMetrics(Middleware):
    """Counts messages.  It comes first: around all others, whatever they do with a message."""

    def __init__(self) -> None:
        # By thread: a message may come again while its first copy is still in flight.
        self._began: dict[int, float] = {}

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """Note until when a message is delayed: its delay is no wait."""
        if delay is not None:
            message.options[DUE] = current_millis() + delay

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """Count a child's retry, once: when it is delayed, not when its time has come."""
        if delay is not None and message.options.get("retries") and spec(message.actor_name):
            with harmless():
                WORKER.inc("forgekeeper_run_retries_total", message.actor_name)

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Count a message in progress."""
        if spec(message.actor_name):
            self._began[get_ident()] = current_millis()
            with harmless():
                WORKER.inc("forgekeeper_runs_in_progress", message.actor_name)

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """Count it no longer; a message that could not even begin has failed."""
        began, actor = self._leave(message), message.actor_name
        if began is None:
            return
        with harmless():
            due = message.options.get(DUE) or message.message_timestamp
            WORKER.observe("forgekeeper_run_wait_seconds", actor, seconds=max(0.0, (began - due) / 1000))
            if isinstance(exception, MiddlewareError):
                attempt_ended(actor, (current_millis() - began) / 1000, exception.__cause__ or exception)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """Count it no longer."""
        self._leave(message)

    def after_nack(self, broker: Broker, message: MessageProxy) -> None:
        """Count a dead letter."""
        with harmless():
            dead_lettered(message.actor_name)

    def _leave(self, message: MessageProxy) -> float | None:
        began = self._began.pop(get_ident(), None)
        if began is not None:
            with harmless():
                WORKER.dec("forgekeeper_runs_in_progress", message.actor_name)
        return began
