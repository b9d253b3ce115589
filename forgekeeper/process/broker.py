"""The broker.

This is the one module that does something when imported: it builds the broker, because
Dramatiq registers actors where they are declared.  Nothing connects before
`forgekeeper.connections.connect`.
"""

from __future__ import annotations

import dramatiq
from dramatiq.middleware import TimeLimit

from forgekeeper.connections import client
from forgekeeper.delivery.keys import NAMESPACE
from forgekeeper.process.attempts import Attempts, ChildRetries, Connections
from forgekeeper.process.drain import Drain
from forgekeeper.process.middleware import Attendance, Clients, Holding, HookingBroker
from forgekeeper.process.presence import AtWork
from forgekeeper.process.tracing import tracing
from forgekeeper.runs.retry import MAX_RETRIES
from forgekeeper.worker_metrics import WorkerMetrics

at_work = AtWork()
"""What the threads of this process are at."""
broker = HookingBroker(
    client=client,
    namespace=NAMESPACE,
    # Outermost first.  The time limit comes last, so that it is disarmed first: raised
    # while a run is being closed it would end the thread and lose the message.
    middleware=[
        *tracing(),
        WorkerMetrics(),
        Clients(),
        Holding(at_work),
        Drain(),
        Attendance(at_work),
        ChildRetries(max_retries=MAX_RETRIES, min_backoff=15_000, max_backoff=600_000),
        Connections(),
        Attempts(),
        TimeLimit(),
    ],
)
dramatiq.set_broker(broker)
