"""`forgekeeper worker` with actors that hold, fail and kill: a program that tests start, with Dramatiq's arguments."""

import gc
import os
import signal
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import PriorityQueue

import dramatiq
import dramatiq.worker
from dramatiq.middleware import TimeLimit
from dramatiq.middleware.threading import raise_thread_exception
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from forgekeeper import batch, child
from forgekeeper.connections import client
from forgekeeper.delivery import consumer
from forgekeeper.delivery.deliveries import Deliveries
from forgekeeper.delivery.enqueue_unique import enqueue_unique
from forgekeeper.process import middleware
from forgekeeper.process.__main__ import run
from forgekeeper.process.broker import broker
from forgekeeper.runs.attempt import Attempt

QUEUE = "objects"
dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS = 0.2  # five seconds are long for a test
consumer.END_WITHIN = consumer.LOOK_FOR_LOST_EVERY = timedelta(seconds=1)  # and so is a minute
middleware.LIMIT_LATE = 1.0


@dataclass
class Outcome:
    """Nothing to tell."""

    enqueued: int = 0


@batch(cron="off", budget=timedelta(minutes=1), outcome=Outcome, writes="its children note what they did")
def odd(_now):
    """Have children."""
    return []


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True)
def note(key):
    """Be done at once."""
    client.rpush("done", key)


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True)
def nothing():
    """Do nothing at all."""


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True)
def look_for_the_provider():
    """Say whether the garbage collector looks at what the master has made for all its processes."""
    provider = trace.get_tracer_provider()
    client.rpush("done", "looked at" if any(one is provider for one in gc.get_objects()) else "passed over")


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True)
def hold(key, path):
    """Be at it until the file *path* is there."""
    client.rpush("started", f"{key} {os.getpid()}")
    _wait_for(path)
    client.rpush("done", key)


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True, min_backoff=1_000, max_backoff=2_000)
def wait(path):
    """Be at it until the file *path* is there, and never ask Redis for anything."""
    Path(f"{path}.started").touch()
    _wait_for(path)


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True)
def kill(key):
    """Take the process down."""
    client.rpush("started", f"{key} {os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)


def declared(work, **options):
    """Declare *work* as a child, and make its actor with these options."""
    times = {"budget": timedelta(minutes=1), "time_limit": timedelta(minutes=10)}
    child(odd, queue=QUEUE, outcome=Outcome, records=[], enqueued_as="enqueued", **times)(work)
    name = work.__name__
    return dramatiq.actor(Attempt.work, actor_name=name, broker=broker, queue_name=QUEUE, child=True, **options)


@partial(declared, min_backoff=100, max_backoff=200)
def fail_first(_now, key, path):
    """Fail as soon as the file *path* is there; succeed the next time."""
    tries = Path(f"{path}.tries")
    with tries.open("a") as file:
        file.write("x")
    _wait_for(path)
    if tries.read_text() == "x":
        raise ValueError(key)
    client.rpush("done", key)
    return []


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True, max_retries=0)
def fail(key):
    """Fail for good."""
    raise ValueError(key)


@declared
def go_on(_now, path):
    """Leave the rest to a successor, once."""
    more = not Path(path).exists()
    Path(path).touch()
    yield from ()
    return "deadline" if more else None


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True)
def hand_on(path):
    """Send somebody who leaves the rest to a successor."""
    enqueue_unique(broker, go_on.message(path))


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True)
def end_the_thread():
    """Make Dramatiq's thread run into an error that nobody catches."""
    threading.current_thread().consumers = {}


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True)
def fail_to_end(key, times):
    """Be done; when the process learns of it for the first time, let messages be ended *times* times without memory."""
    client.rpush("done", key)
    if client.setnx("fails to end", key):
        _spoil(Deliveries, "ack", times)


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True)
def lose_the_next():
    """Let there be no memory for putting the next message into the queue of Dramatiq's threads."""
    _spoil(PriorityQueue, "put", 1)


def _spoil(kind, name, times):
    left, in_order = iter(range(times)), getattr(kind, name)

    def spoilt(*arguments, **options):
        for _ in left:
            raise MemoryError
        return in_order(*arguments, **options)

    setattr(kind, name, spoilt)


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True)
def end_the_time_limit():
    """Let the thread end that ends what takes too long."""
    (manager,) = [one.manager for one in broker.middleware if isinstance(one, TimeLimit)]
    raise_thread_exception(manager.ident, SystemExit)


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True, time_limit=100)
def be_deaf():
    """Wait in C, where no time limit is heard of."""
    nobody = threading.Lock()
    with nobody:
        nobody.acquire()


def _wait_for(path):
    nobody = threading.Event()
    while not Path(path).exists():
        nobody.wait(0.01)


def _write_spans(file):
    """Do what an operator's configuration of OpenTelemetry does: say where spans go."""
    provider = TracerProvider()
    exporter = ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


if __name__ == "__main__":
    with Path(os.environ.get("SPANS", os.devnull)).open("a") as spans:
        _write_spans(spans)
        sys.exit(run(sys.argv[1:]))
