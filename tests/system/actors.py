"""`forgekeeper worker` with the actors of the tests that break Redis: a program that tests start."""

import os
import sys
from datetime import timedelta

import dramatiq

from forgekeeper.connections import client
from forgekeeper.delivery.broker import broker
from forgekeeper.locks import lease
from forgekeeper.process.__main__ import run

from .told_work import QUEUE, declare

NOTES = "NOTES"


def with_lease(key):
    """Be done while holding the lease of that name."""
    with lease(client, key, ttl=timedelta(minutes=5), holder="a test"):
        tell("done", key)


if __name__ == "__main__":
    tell = declare(broker, os.environ[NOTES], child=True)
    dramatiq.actor(with_lease, broker=broker, queue_name=QUEUE, child=True)
    sys.exit(run(sys.argv[1:]))
