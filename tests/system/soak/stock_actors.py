"""The same actors for Dramatiq's own command, on a broker with all its defaults unless a test says otherwise."""

import os

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from .actors import ACTORS, QUEUE

URL, OPTIONS = "STOCK_REDIS_URL", "STOCK_BROKER_"
"""Options such as STOCK_BROKER_HEARTBEAT_TIMEOUT are the broker's, whole numbers."""

if URL in os.environ:
    options = {
        name.removeprefix(OPTIONS).lower(): int(value) for name, value in os.environ.items() if name.startswith(OPTIONS)
    }
    broker = RedisBroker(url=os.environ[URL], **options)
    dramatiq.set_broker(broker)
    for work in ACTORS:
        dramatiq.actor(work, broker=broker, queue_name=QUEUE)
