"""Bare Dramatiq and APScheduler as usually combined: jobs send messages, actors do nothing.

`python -m benchmarks.bare schedule URL TIMETABLE`, with a document of cron expressions by actor, and `… work URL` with
Dramatiq's arguments. The number of consumed queues is equal to ours.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

import dramatiq
import redis
from apscheduler.schedulers.blocking import BlockingScheduler
from dramatiq.brokers.redis import RedisBroker
from dramatiq.cli import main, make_argument_parser

from forgekeeper.platform.settings.cron import Cron

QUEUES = ("cron", "objects", "git", "artifacts")
DELAYS = "delays"
"""List with the delay of each message that has a due time, in seconds."""


def declare(url: str) -> dramatiq.Actor[..., Any]:
    """Declare an actor in each queue; return the actor of the first."""
    broker = RedisBroker(url=url)
    dramatiq.set_broker(broker)
    client = redis.Redis.from_url(url)

    def work(due: float) -> None:
        """Record the delay."""
        client.rpush(DELAYS, time.time() - due)

    for queue in QUEUES:
        dramatiq.actor(actor_name=f"work_{queue}", queue_name=queue, broker=broker, max_retries=0)(work)
    return broker.get_actor(f"work_{QUEUES[0]}")


def schedule(url: str, timetable: dict[str, str]) -> None:
    """Send a message when a job is due."""
    actor, clock = declare(url), BlockingScheduler(timezone="UTC")
    for name, cron in timetable.items():
        # APScheduler does not tell a job its due time: it is rounded to the second, as jobs start within one.
        clock.add_job(partial(_send, actor), Cron(cron), id=name)
    clock.start()


def _send(actor: dramatiq.Actor[..., Any]) -> None:
    actor.send(float(round(time.time())))


if __name__ == "__main__":
    TASK, URL, *REST = sys.argv[1:]
    if TASK == "work":
        declare(URL)
        sys.exit(main(make_argument_parser().parse_args(["benchmarks.bare", "--skip-logging", *REST])))
    schedule(URL, json.loads(REST[0]))
