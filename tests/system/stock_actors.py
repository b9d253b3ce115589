"""The actors of the tests that break Redis, on a bare Dramatiq broker with all its defaults."""

import os

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from .told_work import declare

URL, NOTES = "STOCK_REDIS_URL", "NOTES"

if URL in os.environ:
    broker = RedisBroker(url=os.environ[URL])
    dramatiq.set_broker(broker)
    declare(broker, os.environ[NOTES])
