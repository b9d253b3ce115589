"""Workers with children that wait, fail or kill, and messages for them."""

import pytest
from dramatiq import Message

from forgekeeper.delivery import queues
from forgekeeper.delivery.broker import broker
from forgekeeper.delivery.children import CALLS_OPTION, FAILED_OPTION, RUN_OPTION
from forgekeeper.platform.connections import client
from tests.harness.programs import READY, ROOT, Program, eventually

PROGRAM = ROOT / "tests" / "harness" / "worker_with_odd_actors.py"
QUEUE = "objects"
DEAD_AFTER = 1.0


class WorkerProcesses(Program):
    """Worker processes of one master."""

    def __init__(self, log, *, processes, threads, queues, settings):
        self._processes = processes
        arguments = ("--processes", processes, "--threads", threads, "--queues", *queues)
        super().__init__(log, PROGRAM, *arguments, **settings)

    def environment(self):
        return super().environment() | {"dramatiq_restart_delay": "200"}

    def ready(self):
        eventually(lambda: len(self.said(READY)) == self._processes)
        return self

    def ended(self):
        return self.process.poll() is not None


class Sent:
    """Sends the messages of a test, and reads which are started and done."""

    def push(self, actor, *args, key=None, run=None, failed=None, children=None):
        options = {RUN_OPTION: run, FAILED_OPTION: failed, CALLS_OPTION: children}
        message = Message(QUEUE, actor, args, {}, {name: value for name, value in options.items() if value is not None})
        return broker.enqueue(message.copy(message_id=key or message.message_id))

    def push_children(self, actor, *keys):
        """Send one message with a child for each key, as a run does."""
        message = self.push(actor, keys[0], key=keys[0], children=[(key, (key,)) for key in keys])
        client.hset(queues.QUEUED_CHILDREN_KEY, mapping=dict.fromkeys(keys, message.options["redis_message_id"]))

    def done(self):
        return [key.decode() for key in client.lrange("done", 0, -1)]

    def started(self):
        """Key and process id of each start that an actor has recorded."""
        return [(key, int(pid)) for key, pid in (line.decode().split() for line in client.lrange("started", 0, -1))]

    def left(self):
        """Count messages that are not acknowledged."""
        return client.hlen(queues.bodies_key(QUEUE))


@pytest.fixture
def sent(database):
    return Sent()


@pytest.fixture
def start_worker(database, tmp_path):
    started = []

    def start(*, threads=2, processes=1, queues=(QUEUE,), **settings):
        log = tmp_path / f"worker-{len(started)}.log"
        usual = {"dead_after": DEAD_AFTER, "worker_threads": threads, "redis_timeout": 1}
        options = {"processes": processes, "threads": threads, "queues": queues}
        started.append(WorkerProcesses(log, **options, settings=usual | settings))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


@pytest.fixture
def go(tmp_path):
    """Path of the file for which the actor `hold` waits."""
    return tmp_path / "go"
