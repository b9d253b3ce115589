"""Messages in real worker processes that are killed, told to end, or lose their Redis."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
from dramatiq import Message
from dramatiq.common import current_millis

from forgekeeper.connections import client
from forgekeeper.delivery.deliveries import MAX_DEATHS
from forgekeeper.delivery.enqueue_unique import enqueue_unique
from forgekeeper.delivery.queues import RUN
from forgekeeper.process.broker import broker
from tests.harness.programs import LIMIT, READY, Program, eventually

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "harness" / "worker_with_odd_actors.py"
QUEUE = "objects"
KEY = f"{broker.namespace}:{QUEUE}"
DEAD_AFTER = 1.0
ALIVE_FOR = 3.0
"""The same where nobody is dead: a busy machine must not be taken for it."""
BUSY = 8.0
"""Seconds that a busy machine may add to what is promised."""
WITHOUT_OPENTELEMETRY = """
import sys
sys.modules["opentelemetry"] = None  # what an import finds where it is not installed
from forgekeeper.process.broker import broker
print(sorted(type(one).__name__ for one in broker.middleware))
"""

pytestmark = pytest.mark.usefixtures("database")


class WorkerProcesses(Program):
    """Worker processes under one master."""

    def __init__(self, log, *, processes, threads, settings):
        self._processes = processes
        arguments = ("--processes", processes, "--threads", threads, "--queues", QUEUE)
        super().__init__(log, PROGRAM, *arguments, **settings)

    def environment(self):
        return super().environment() | {"dramatiq_restart_delay": "200"}

    def ready(self):
        eventually(lambda: len(self.said(READY)) == self._processes)
        return self

    @property
    def child(self):
        """The id of the one process that the master has started."""
        (pid,) = self.children
        return pid

    def said(self, message):
        """The lines that begin with that sentence, so far."""
        return [line for line in self.lines() if line["message"].startswith(message)]


@pytest.fixture
def start_worker(database, tmp_path):
    started = []

    def start(*, threads=2, processes=1, **settings):
        log = tmp_path / f"worker-{len(started)}.log"
        usual = {"dead_after": DEAD_AFTER, "worker_threads": threads, "redis_timeout": 1}
        started.append(WorkerProcesses(log, processes=processes, threads=threads, settings=usual | settings))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


@pytest.fixture
def go(tmp_path):
    """The file that those who wait are waiting for."""
    return tmp_path / "go"


def push(actor, *args, message_id=None, run=None):
    message = Message(QUEUE, actor, args, {}, {RUN: run} if run else {})
    assert enqueue_unique(broker, message.copy(message_id=message_id or message.message_id))


def delay(actor, *args, seconds):
    message = Message(QUEUE, actor, args, {}, {})
    options = {"redis_message_id": message.message_id, "eta": current_millis() + round(seconds * 1000)}
    message = message.copy(queue_name=f"{QUEUE}.DQ", options=options)
    broker.do_enqueue(message.queue_name, message.message_id, message.encode())


def done():
    return [key.decode() for key in client.lrange("done", 0, -1)]


def started():
    """The starts of those that tell of theirs: key and process."""
    return [(key, int(pid)) for key, pid in (line.decode().split() for line in client.lrange("started", 0, -1))]


def left():
    """Where messages are left: the lists' lengths, and the ids that have bodies."""
    waiting = {name: client.llen(f"{KEY}{name}") for name in ("", ".DQ")}
    return waiting, {name: client.hlen(f"{KEY}{name}.msgs") for name in ("", ".DQ")}


NOTHING = {"": 0, ".DQ": 0}, {"": 0, ".DQ": 0}


def in_hand():
    """How many messages workers have fetched and not ended."""
    return sum(client.scard(key) for key in client.keys(f"{broker.namespace}:__acks__.*.{QUEUE}"))


def reasons():
    return {key.decode(): text.decode() for key, text in client.hgetall(f"{KEY}.XQ.reasons").items()}


# Processes that are killed


def test_each_process_of_a_master_is_a_worker_of_its_own(start_worker):
    start_worker(processes=2).ready()

    eventually(lambda: client.zcard(f"{broker.namespace}:__heartbeats__") == 2)


def test_the_garbage_collector_of_a_worker_passes_over_what_was_there_at_its_start(start_worker):
    start_worker().ready()

    push("look_for_the_provider")

    eventually(done)
    assert done() == ["passed over"]


def test_a_producer_is_no_worker():
    push("note", "1")
    broker.enqueue(Message(QUEUE, "note", ("2",), {}, {}), delay=1000)

    assert client.zcard(f"{broker.namespace}:__heartbeats__") == 0


def test_a_message_whose_process_was_killed_runs_again_elsewhere(start_worker, go):
    first = start_worker().ready()
    push("hold", "1", str(go))
    eventually(started)
    second = start_worker().ready()

    os.kill(started()[0][1], signal.SIGKILL)
    killed_at = time.monotonic()

    eventually(lambda: len(started()) == 2)
    assert time.monotonic() - killed_at < DEAD_AFTER + BUSY
    go.touch()
    eventually(lambda: left() == NOTHING)
    first.process.wait(LIMIT)
    assert done() == ["1"]
    eventually(lambda: second.said("messages reclaimed"))


def test_a_message_that_kills_its_process_is_given_up_and_its_neighbours_are_done(start_worker):
    push("kill", "bad", message_id="bad")
    neighbours = [str(number) for number in range(5)]
    for key in neighbours:
        push("note", key)
    worker = None

    def given_up():
        nonlocal worker
        if worker is None or worker.process.poll() is not None:
            # One thread: the neighbours lie prefetched behind it each time.
            worker = start_worker(threads=1)
        return reasons()

    eventually(given_up)

    eventually(lambda: left() == NOTHING)
    assert reasons() == {"bad": "poison"}
    assert Counter(key for key, _pid in started()) == {"bad": MAX_DEATHS}
    assert sorted(done()) == neighbours


# Processes that are told to end


def once_to_the_master(master):
    master.terminate()


def twice_to_all(master):
    os.killpg(master.pid, signal.SIGTERM)
    os.killpg(master.pid, signal.SIGTERM)


@pytest.mark.parametrize("tell", [once_to_the_master, twice_to_all])
def test_what_runs_is_finished_and_what_does_not_runs_elsewhere(start_worker, go, tell):
    first = start_worker(threads=12, dead_after=ALIVE_FOR).ready()
    running = [f"running-{number}" for number in range(12)]
    prefetched = [f"prefetched-{number}" for number in range(6)]
    for key in running:
        push("hold", key, str(go))
    eventually(lambda: len(started()) == 12)
    for key in prefetched:
        push("note", key)
    eventually(lambda: client.llen(KEY) == 0)
    start_worker(dead_after=ALIVE_FOR).ready()

    told_at = time.monotonic()
    tell(first.process)

    eventually(lambda: sorted(done()) == prefetched)
    assert time.monotonic() - told_at < 2 + BUSY
    # Long enough for its messages to be taken from it, if it gave no signs of life.
    eventually(lambda: time.monotonic() - told_at > 1.5 * ALIVE_FOR)
    go.touch()
    assert first.process.wait(LIMIT) == 0, first.text()
    eventually(lambda: left() == NOTHING)
    assert Counter(done()) == Counter(running + prefetched)
    assert len(started()) == 12


def test_a_worker_that_ends_hands_back_what_waits_for_its_time(start_worker):
    worker = start_worker().ready()
    for key in ("1", "2", "3"):
        delay("note", key, seconds=600)
    eventually(lambda: client.llen(f"{KEY}.DQ") == 0)

    status = worker.end()

    assert (status, left()) == (0, ({"": 0, ".DQ": 3}, {"": 0, ".DQ": 3}))


def test_a_process_one_of_whose_threads_has_died_ends_and_its_messages_run_elsewhere(start_worker):
    worker = start_worker(threads=1).ready()
    push("end_the_thread")
    push("note", "1")

    worker.process.wait(LIMIT)

    assert [line["reason"] for line in worker.said("process ends itself")] == ["a thread has died"]
    assert client.lrange(KEY, 0, -1)
    successors = [start_worker(threads=1)]

    def done_by_a_successor():
        # What ended the first may be the first that they get, too: then they end as well, and a supervisor goes on.
        if successors[-1].process.poll() is not None:
            successors.append(start_worker(threads=1))
        return done() == ["1"]

    eventually(done_by_a_successor)


def test_a_process_without_a_thread_that_looks_after_time_limits_ends(start_worker):
    worker = start_worker()
    push("end_the_time_limit")

    worker.process.wait(LIMIT)

    assert [line["reason"] for line in worker.said("process ends itself")] == ["a thread has died"]


def test_a_process_whose_thread_is_deaf_to_its_time_limit_ends_so_that_others_have_what_it_kept(start_worker):
    worker = start_worker(threads=1, shutdown_timeout=2)
    push("be_deaf")

    worker.process.wait(LIMIT)

    (line,) = worker.said("process ends itself")
    assert line["reason"] == "its time limit has not ended a message"


# A process that is short of something


@contextmanager
def no_file_can_be_opened(pid):
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_messages_that_end_while_no_file_can_be_opened_are_ended_then_or_afterwards(start_worker, go):
    # Nothing has been ended here before, so that nothing could have been learnt from files by that.
    worker = start_worker(threads=8).ready()
    for _ in range(16):
        push("wait", str(go))
    eventually(lambda: (client.hlen(f"{KEY}.starts"), client.llen(KEY)) == (8, 0))

    with no_file_can_be_opened(worker.child):
        go.touch()
        # A connection that has to be made anew cannot be: then Redis is away, and nothing more is fetched.
        eventually(lambda: in_hand() == 0 or failed_ends(worker))

    eventually(lambda: left() == NOTHING)
    # Those that failed for want of a file wait for their retry, and a consumer that has no connection forgets them.
    assert QUEUE not in [line["queue"] for line in worker.said("lost messages requeued")]
    assert worker.process.poll() is None


def test_a_message_whose_end_fails_for_want_of_memory_is_ended_afterwards(start_worker):
    worker = start_worker()
    push("fail_to_end", "1", 3)

    eventually(lambda: left() == NOTHING)

    assert (done(), len(failed_ends(worker))) == (["1"], 3)


def test_a_message_that_cannot_be_ended_is_ended_by_another_process(start_worker):
    worker = start_worker()
    push("fail_to_end", "1", 10**6)

    worker.process.wait(LIMIT)

    assert worker.said("message cannot be ended")
    assert [line["reason"] for line in worker.said("process ends itself")] == ["a thread has died"]
    start_worker()
    eventually(lambda: left() == NOTHING)
    # As often as it was begun; a thread of the first that is still there may have begun it again.
    assert set(done()) == {"1"}


def test_a_message_that_dramatiq_loses_on_its_way_to_a_thread_is_worked_on(start_worker):
    worker = start_worker().ready()
    push("lose_the_next")
    eventually(lambda: left() == NOTHING)

    push("note", "1")

    eventually(lambda: left() == NOTHING)
    assert done() == ["1"]
    assert worker.said("lost messages requeued")


# A Redis that fails


@contextmanager
def read_only():
    client.replicaof("127.0.0.1", "1")
    try:
        yield
    finally:
        client.replicaof("no", "one")


@contextmanager
def unresponsive():
    client.execute_command("client", "pause", 60_000, "write")
    try:
        yield
    finally:
        client.execute_command("client", "unpause")


faults = pytest.mark.parametrize("fault", [read_only, unresponsive])


def failed_ends(worker):
    return worker.said("Failed to post_process_message")


@faults
def test_a_message_that_ends_while_redis_fails_is_ended_afterwards(start_worker, go, fault):
    worker = start_worker().ready()
    push("wait", str(go))
    eventually(Path(f"{go}.started").exists)

    with fault():
        go.touch()
        eventually(lambda: failed_ends(worker))

    eventually(lambda: left() == NOTHING)
    assert not worker.said("lost messages requeued")
    assert not worker.said("Consumer encountered an unexpected error")


@faults
def test_a_child_that_fails_while_redis_fails_is_retried_afterwards(start_worker, go, fault):
    worker = start_worker().ready()
    push("fail_first", "1", str(go))
    eventually(Path(f"{go}.tries").exists)

    with fault():
        go.touch()
        eventually(lambda: failed_ends(worker))

    eventually(lambda: left() == NOTHING)
    assert (done(), reasons(), Path(f"{go}.tries").read_text()) == (["1"], {}, "xx")


def test_workers_that_all_lost_their_redis_do_not_take_each_others_messages(start_worker, go):
    workers = [start_worker(threads=1, dead_after=ALIVE_FOR).ready() for _ in range(2)]
    # One of them may hold two, one at work and one prefetched.
    for number in range(3):
        push("hold", str(number), str(go))
    eventually(lambda: len({pid for _key, pid in started()}) == 2)

    with read_only():
        failing_since = time.monotonic()
        eventually(lambda: time.monotonic() - failing_since > 1.5 * ALIVE_FOR)
    back_since = time.monotonic()
    eventually(lambda: time.monotonic() - back_since > 1.5 * ALIVE_FOR)

    assert [worker.said("messages reclaimed") for worker in workers] == [[], []]
    assert len(started()) == 2
    go.touch()
    eventually(lambda: left() == NOTHING)
    assert Counter(done()) == Counter(["0", "1", "2"])


def test_delayed_messages_survive_a_failing_redis(start_worker):
    worker = start_worker().ready()
    keys = [str(number) for number in range(20)]
    for key in keys:
        delay("note", key, seconds=3)
    due = time.monotonic() + 3
    eventually(lambda: client.llen(f"{KEY}.DQ") == 0)

    with read_only():
        eventually(lambda: len(worker.said("worker heartbeat failed")) >= 2 and time.monotonic() > due + 1)

    eventually(lambda: left() == NOTHING)
    assert Counter(done()) == Counter(keys)


# Messages that cannot be worked on


def test_a_message_of_an_unknown_actor_waits_for_another_worker(start_worker):
    worker = start_worker()
    for _ in range(3):
        push("nobody")

    eventually(lambda: client.hlen(f"{KEY}.DQ.msgs") == 3)

    assert (client.hlen(f"{KEY}.msgs"), reasons()) == (0, {})
    assert [(line["level"], line["actor"]) for line in worker.said("unknown actor")] == [("warning", "nobody")]
    bodies = client.hvals(f"{KEY}.DQ.msgs")
    assert all(30_000 < Message.decode(body).options["eta"] - current_millis() <= 60_000 for body in bodies)


GOOD = Message(QUEUE, "note", ("1",), {}, {}).asdict()


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff",
        b"null",
        b"{}",
        orjson.dumps(GOOD | {"surprise": 1}),
        orjson.dumps(GOOD | {"options": []}),
        orjson.dumps(GOOD | {"args": None}),
        orjson.dumps(GOOD | {"actor_name": ["note"]}),
        orjson.dumps(GOOD | {"queue_name": "cron"}),
    ],
)
def test_a_body_that_is_no_message_is_a_dead_letter(body):
    broker.do_enqueue(QUEUE, "bad", body)
    push("note", "1")
    consumer = broker.consume(QUEUE, prefetch=5, timeout=1)
    broker.declare_actor(type("Note", (), {"queue_name": QUEUE, "actor_name": "note", "options": {"child": True}}))
    try:
        delivery = next(consumer)
    finally:
        broker.actors.pop("note")

    assert (delivery.args, reasons()) == (("1",), {"bad": "malformed"})
    assert client.hget(f"{KEY}.XQ.msgs", "bad") == body
    consumer.ack(delivery)
    assert left() == NOTHING


def test_noise_in_redis_ends_no_worker_and_keeps_no_message_from_it(start_worker):
    heartbeats = f"{broker.namespace}:__heartbeats__"
    worker = start_worker().ready()
    client.zadd(heartbeats, {b"\xff\xfe": 1, b"": 1, b"\0": float("-inf"), "dead": 1})
    client.set(f"{broker.namespace}:__acks__.dead.git", "x")
    push("note", "rescued", message_id="rescued")
    for number, options in enumerate(
        [{"retries": "x"}, {RUN: []}, {"traceparent": 5}, {"eta": "x"}, {"time_limit": "x"}, {"max_retries": []}]
    ):
        for actor in ("note", "fail"):
            message = Message(QUEUE, actor, (f"{number}",), {}, options, f"{actor} {number}")
            broker.do_enqueue(QUEUE, message.message_id, message.encode())
    for number, body in enumerate(
        [b"\xff", b"[" * 50_000, b"9" * 5_000, orjson.dumps(GOOD | {"message_timestamp": "x"})]
    ):
        client.hset(f"{KEY}.msgs", b"\xff%d" % number, body)
        client.rpush(KEY, b"\xff%d" % number)

    eventually(lambda: worker.said("messages not reclaimed"))
    push("note", "last")

    eventually(lambda: {"rescued", "last"} <= set(done()))
    eventually(lambda: client.zscore(heartbeats, b"\xff\xfe") is None)
    eventually(lambda: client.llen(KEY) == 0)
    assert worker.said("worker ends itself") == []
    assert worker.process.poll() is None
    assert client.zcount(heartbeats, 2, "+inf") == 1


def test_the_lines_of_a_child_and_of_its_successor_name_the_run_that_sent_them(start_worker, go):
    push("go_on", str(go), message_id="child", run=7)
    worker = start_worker()

    eventually(lambda: len(worker.said("child finished")) == 2)

    assert {(line["message_id"], line["run"]) for line in worker.said("child")} == {("child", 7)}


def test_a_child_that_comes_again_while_its_process_is_at_it_is_ended_as_often_as_it_was_begun(start_worker, go):
    tries = go.with_name("go.tries")
    worker = start_worker()
    push("fail_first", "1", str(go), message_id="child")
    eventually(tries.exists)
    client.flushdb()
    push("fail_first", "1", str(go), message_id="child")
    eventually(lambda: tries.read_text() == "xx")

    go.touch()

    eventually(lambda: len(worker.said("child finished")) == 2)


@pytest.mark.parametrize(
    ("said", "noted"), [("no such thing", "no such thing"), ("\udcff\0", "\\udcff\\x00")], ids=["text", "no text"]
)
def test_a_child_out_of_retries_is_a_dead_letter_with_its_error(start_worker, said, noted):
    start_worker()
    push("fail", said, message_id="7")

    eventually(reasons)

    assert (reasons(), left()) == ({"7": f"ValueError: {noted}"}, NOTHING)


# Traces


@pytest.fixture
def traced(start_worker, tmp_path, monkeypatch):
    """Let a worker hand on a message to a child with a successor; return its spans and the lines of the children."""
    spans = tmp_path / "spans"
    monkeypatch.setenv("SPANS", str(spans))
    push("hand_on", str(tmp_path / "go"))
    worker = start_worker()
    eventually(lambda: spans.exists() and spans.read_text().count("\n") == 3)
    return [orjson.loads(line) for line in spans.read_text().splitlines()], worker.said("child")


def test_what_a_message_sends_and_its_successor_belong_to_its_trace(traced):
    sender, *sent = sorted(traced[0], key=lambda span: span["name"] != "hand_on")

    assert sender["parent_id"] is None
    assert {(span["name"], span["parent_id"]) for span in sent} == {("go_on", sender["context"]["span_id"])}


def test_log_lines_name_the_trace(traced):
    spans, lines = traced

    assert {f"0x{line['trace_id']}" for line in lines} == {spans[0]["context"]["trace_id"]}


def test_workers_need_no_opentelemetry():
    command = [sys.executable, "-c", WITHOUT_OPENTELEMETRY]

    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    assert "Tracing" not in found.stdout
    assert "WorkerMetrics" in found.stdout
