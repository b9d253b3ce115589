"""The broker: Dramatiq's own for Redis, with the middleware of this project in its order.

This is the only module with effects at import: it builds the broker, because Dramatiq registers actors at their
declaration.  Nothing connects before `forgekeeper.platform.connections.connect`.
"""

from __future__ import annotations

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import TimeLimit

from forgekeeper.api.batches import BATCHES, all_declared
from forgekeeper.delivery import boot
from forgekeeper.delivery.children import send_children
from forgekeeper.delivery.messages import ChildMessages, MessageEncoder, RunMessages, send_batch
from forgekeeper.delivery.process import ProcessMiddleware
from forgekeeper.delivery.queues import NAMESPACE
from forgekeeper.engine.attempt import Attempt
from forgekeeper.engine.message_attempt import MessageAttempt
from forgekeeper.platform.connections import client
from forgekeeper.platform.settings import reading
from metrics.catalogue import build_metrics
from metrics.instruments import WORKER_METRICS

dramatiq.set_encoder(MessageEncoder())
process = ProcessMiddleware(send_children)
broker = RedisBroker(
    client=client,
    namespace=NAMESPACE,
    # Workers look after messages of dead workers, with their own `dead_after`: see `Process`.  Producers never do.
    maintenance_chance=0,
    # Outermost first.  The time limit comes last, so that it is disarmed first: raised while a run is being closed
    # it would end the thread.
    middleware=[process, ChildMessages(process), RunMessages(process), TimeLimit()],
)
dramatiq.set_broker(broker)


def _work_on_message(attempt: Attempt | MessageAttempt, *arguments: object) -> None:
    attempt.work_if_allowed(*arguments)


def load_batches() -> None:
    """Import the batches and bind their actors; idempotent; raises `SettingsError`."""
    boot.import_batches(reading.read_modules())
    for one in all_declared():
        if one.name not in broker.actors:
            one.bind_actor(broker, _work_on_message)
    for batch in BATCHES.values():
        batch.sender = send_batch
    WORKER_METRICS.declare_metrics(build_metrics(all_declared()))
    if WORKER_METRICS.uses_files:
        WORKER_METRICS.create_all_series()
