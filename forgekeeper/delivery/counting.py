"""Counts messages where they pass: in progress, how long they waited, those that were rejected."""

from __future__ import annotations

from threading import get_ident
from typing import Any

from dramatiq import Broker, MessageProxy
from dramatiq.common import current_millis
from dramatiq.middleware import Middleware, MiddlewareError

from forgekeeper.batches import spec
from forgekeeper.runs.counting import attempt_ended, harmless
from metrics.counting import WORKER, dead_lettered


class WorkerMetrics(Middleware):
    """Counts messages.  It comes first: around all others, whatever they do with a message."""

    def __init__(self) -> None:
        # By thread: a message may come again while its first copy is still in flight.
        self._began: dict[int, float] = {}

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
            waited = max(0.0, (began - message.message_timestamp) / 1000)
            WORKER.observe("forgekeeper_run_wait_seconds", actor, seconds=waited)
            if isinstance(exception, MiddlewareError):
                attempt_ended(actor, (current_millis() - began) / 1000, exception.__cause__ or exception)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """Count it no longer."""
        self._leave(message)

    def after_nack(self, broker: Broker, message: MessageProxy) -> None:
        """Count a message that was rejected."""
        with harmless():
            dead_lettered(message.actor_name)

    def _leave(self, message: MessageProxy) -> float | None:
        began = self._began.pop(get_ident(), None)
        if began is not None:
            with harmless():
                WORKER.dec("forgekeeper_runs_in_progress", message.actor_name)
        return began
