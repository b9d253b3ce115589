"""Messages in real worker processes that are killed, told to end, or lose their Redis."""

import os
import signal
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

from forgekeeper.delivery import queues
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform.connections import client
from tests.harness.programs import LIMIT, eventually
from tests.harness.thorough import whole_only
from tests.harness.waiting import scale_timeout
from tests.system.proxy import redis_through

QUEUE = "objects"
GOOD = Message(QUEUE, "note", ("1",), {}, {"redis_message_id": "good"}).asdict()


def quarantined():
    return {(row.key, row.reason) for row in Quarantined.select()}


def restart_until_quarantined(start_worker):
    """Start a worker again each time that it is killed, until the quarantine has a row."""
    worker = None

    def given_up():
        nonlocal worker
        if worker is None or worker.ended():
            # One thread: other messages wait prefetched behind the killer each time.
            worker = start_worker(threads=1)
        return quarantined()

    eventually(given_up)


# Processes that are killed


def test_a_message_whose_process_was_killed_runs_again_elsewhere(start_worker, sent, go):
    first = start_worker().ready()
    sent.push("hold", "1", str(go))
    eventually(sent.started)
    start_worker().ready()

    os.kill(sent.started()[0][1], signal.SIGKILL)

    # More often where one that lives has been taken for dead: delivery is at least once.
    eventually(lambda: {pid for _key, pid in sent.started()} - {sent.started()[0][1]})
    go.touch()
    eventually(lambda: sent.left() == 0)
    first.process.wait(LIMIT)
    assert set(sent.done()) == {"1"}


def test_a_child_that_kills_its_process_three_times_is_quarantined_and_its_neighbours_are_done(start_worker, sent):
    sent.push("kill", "bad", key="bad")
    neighbours = [str(number) for number in range(5)]
    for key in neighbours:
        sent.push("note", key)
    restart_until_quarantined(start_worker)

    eventually(lambda: sent.left() == 0)
    assert quarantined() == {("bad", "worker_lost")}
    assert Counter(key for key, _pid in sent.started()) == {"bad": 3}
    assert sorted(sent.done()) == neighbours
    assert client.hlen(queues.STARTED_CHILDREN_KEY) == 0


def test_the_child_of_a_message_that_kills_its_process_is_quarantined_and_the_others_are_done(start_worker, sent):
    others = ["1", "2", "3"]
    sent.push_children("kill_if_bad", "1", "bad", "2", "3")
    restart_until_quarantined(start_worker)

    eventually(lambda: sent.left() == 0)
    assert quarantined() == {("bad", "worker_lost")}
    assert Counter(key for key, _pid in sent.started()) == {"bad": 3}
    assert sorted(set(sent.done())) == others
    assert client.hlen(queues.STARTED_CHILDREN_KEY) == client.hlen(queues.QUEUED_CHILDREN_KEY) == 0


def test_a_child_that_has_a_later_message_is_not_sent_again_when_its_message_is_divided(start_worker, sent):
    sent.push_children("kill_if_bad", "1", "2")
    client.hset(queues.QUEUED_CHILDREN_KEY, "2", "of a later run")
    # A process died while it worked on the message.
    client.hset(queues.STARTED_CHILDREN_KEY, "1", 1)

    start_worker()

    eventually(lambda: sent.left() == 0)
    assert sent.done() == ["1"]
    assert client.hkeys(queues.QUEUED_CHILDREN_KEY) == [b"2"]


@pytest.mark.parametrize("children", [7, [], [["1"]], [["1", "no list"]], [[1, ["1"]]]], ids=str)
def test_a_message_whose_children_cannot_be_read_is_done_as_its_first_child(start_worker, sent, children):
    sent.push("note", "1", children=children)

    start_worker()

    eventually(lambda: sent.left() == 0)
    assert sent.done() == ["1"]


@pytest.mark.parametrize(
    ("failed", "earlier_starts"), [(True, 0), (False, 1), (None, 0)], ids=["sent", "begun elsewhere", "unknown"]
)
def test_a_child_that_ends_well_leaves_the_quarantine(start_worker, sent, failed, earlier_starts):
    quarantine.record_failure("odd", "note", "1", "it failed", reason="child_failed")
    client.hset(queues.STARTED_CHILDREN_KEY, "1", earlier_starts)
    start_worker()

    sent.push("note", "1", key="1", failed=failed)

    eventually(lambda: (sent.done(), sent.left()) == (["1"], 0))
    assert quarantined() == set()


@whole_only
def test_a_message_whose_process_died_while_its_clock_was_ahead_runs_again(start_worker, sent):
    dead = RedisBroker(client=client, namespace=queues.NAMESPACE)
    sent.push("note", "1")
    assert dead.do_fetch(QUEUE, 1)
    client.zadd(queues.HEARTBEATS_KEY, {dead.broker_id: (time.time() + 3600) * 1000})
    start_worker()
    # Looks for dead processes with each command; a worker does so every few seconds.
    looks = {"maintenance_chance": 1_000_000, "heartbeat_timeout": 60_000}
    another = RedisBroker(client=client, namespace=queues.NAMESPACE, **looks)

    def done():
        another.do_qsize(QUEUE)
        return sent.done()

    eventually(done)

    assert set(sent.done()) == {"1"}


# Processes that are told to end, or that are not whole


def once_to_the_master(master):
    master.terminate()


def twice_to_all(master):
    os.killpg(master.pid, signal.SIGTERM)
    os.killpg(master.pid, signal.SIGTERM)


@whole_only
@pytest.mark.parametrize("tell", [once_to_the_master, twice_to_all])
def test_what_runs_is_finished_and_what_does_not_is_given_back(start_worker, sent, go, tell):
    worker = start_worker(threads=4, dead_after=3, log_level="DEBUG").ready()
    for number in range(4):
        sent.push("hold", f"running-{number}", str(go))
    eventually(lambda: len(sent.started()) == 4)
    for number in range(3):
        sent.push("note", f"prefetched-{number}")
    # Dramatiq does not give back what it has fetched and not put there.
    eventually(lambda: worker.text().count("onto work queue") == 7)

    tell(worker.process)

    eventually(lambda: worker.said("worker draining"))
    go.touch()
    assert worker.process.wait(LIMIT) == 0, worker.text()
    assert (len(sent.done()), client.llen(queues.ready_key(QUEUE)), sent.left()) == (4, 3, 3)


def test_a_worker_whose_thread_hangs_ends_in_time_and_is_no_poison(start_worker, sent, go):
    worker = start_worker(shutdown_timeout=6).ready()
    sent.push("hold", "1", str(go), key="hangs")
    eventually(sent.started)

    worker.process.terminate()
    asked_at = time.monotonic()

    assert worker.process.wait(LIMIT) != 0
    assert time.monotonic() - asked_at < scale_timeout(10)
    assert worker.said("shutdown timed out")
    assert client.hlen(queues.STARTED_CHILDREN_KEY) == 0
    go.touch()
    start_worker()
    eventually(lambda: (sent.done(), sent.left()) == (["1"], 0))


@whole_only
def test_a_worker_whose_redis_takes_no_acknowledgement_ends_in_time_and_another_rescues_its_message(
    start_worker, sent, go, urls
):
    proxy, through = redis_through(urls.redis)
    with proxy:
        worker = start_worker(shutdown_timeout=4, redis_url=through).ready()
        sent.push("fail_once_there", str(go), key="1")
        eventually(Path(f"{go}.started").exists)
        proxy.refuse()
        proxy.cut()
        go.touch()
        eventually(lambda: worker.said("child failed"))

        worker.process.terminate()
        asked_at = time.monotonic()
        worker.process.wait(LIMIT)

        assert time.monotonic() - asked_at < scale_timeout(5)
    assert sent.left() == 1
    start_worker()
    eventually(lambda: sent.left() == 0)


@whole_only
def test_a_process_that_is_stopped_is_killed_with_its_master(start_worker):
    worker = start_worker(shutdown_timeout=2).ready()
    (process,) = worker.children
    os.kill(process, signal.SIGSTOP)

    worker.process.terminate()

    worker.process.wait(LIMIT)
    assert worker.said("worker killed processes that did not end")
    assert not Path(f"/proc/{process}").exists()


@whole_only
@pytest.mark.parametrize(
    ("actor", "reason"),
    [
        ("end_the_thread", "a thread has died"),
        ("be_deaf", "a message exceeded its time limit"),
    ],
)
def test_a_process_that_is_not_whole_ends(start_worker, sent, actor, reason):
    worker = start_worker(threads=1, shutdown_timeout=2).ready()
    sent.push(actor)

    worker.process.wait(LIMIT)

    # Once more where it has not yet heard of it at its next heartbeat.
    assert {line["reason"] for line in worker.said("process ends itself")} == {reason}


# Messages that Dramatiq loses


def stopped(pid):
    """Have all threads of the process stopped? Their state follows the name, which may hold a parenthesis."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads)


def test_a_message_that_its_process_does_not_know_is_given_back_and_done(start_worker, sent):
    worker = start_worker().ready()
    eventually(lambda: client.zcard(queues.HEARTBEATS_KEY) == 1)
    # What a reply leaves that is lost after Redis has handed the message out.
    thief = RedisBroker(client=client, namespace=queues.NAMESPACE)
    (name,) = client.zrange(queues.HEARTBEATS_KEY, 0, -1)
    thief.broker_id = name.decode()
    processes = [worker.process.pid, *worker.children]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    # The kernel stops one thread after another: until the last has stopped, a message is fetched.
    eventually(lambda: all(stopped(pid) for pid in processes))
    sent.push("note", "1")
    assert thief.do_fetch(QUEUE, 1)

    for pid in processes:
        os.kill(pid, signal.SIGCONT)

    eventually(lambda: set(sent.done()) == {"1"})
    eventually(lambda: sent.left() == 0)


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


@pytest.mark.parametrize("fault", [read_only, unresponsive])
def test_a_child_that_fails_while_redis_fails_is_in_quarantine_and_leaves_nothing(start_worker, sent, go, fault):
    worker = start_worker().ready()
    sent.push("fail_once_there", str(go), key="1", run=3)
    eventually(Path(f"{go}.started").exists)

    with fault():
        go.touch()
        eventually(lambda: worker.said("child failed"))

    eventually(lambda: sent.left() == 0)
    row = Quarantined.get()
    assert (row.batch, row.record, row.key, row.reason) == ("odd", "fail_once_there", "1", "child_failed")
    # Of how many failures: where Redis refuses the acknowledgement the message comes once more, and fails again.
    assert (row.error, row.run) == ("ValueError: there", 3)


# Messages that cannot be worked on


def test_a_message_of_an_unknown_actor_is_quarantined(start_worker, sent):
    start_worker()
    sent.push("nobody", key="7")

    eventually(lambda: quarantined() == {("7", "unreadable")})

    eventually(lambda: sent.left() == 0)


@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b"\xff", b"null", b"{}", b"[" * 50_000, b"9" * 5_000),
        *(
            orjson.dumps(GOOD | wrong)
            for wrong in ({"surprise": 1}, {"options": []}, {"args": None}, {"actor_name": ["note"]})
        ),
    ],
    ids=range(10),
)
def test_a_body_that_is_no_message_is_quarantined_and_keeps_no_message_beside_it(start_worker, sent, body):
    client.hset(queues.bodies_key(QUEUE), "bad", body)
    client.rpush(queues.ready_key(QUEUE), "bad")
    sent.push("note", "1")

    worker = start_worker()

    # Twice where it is given back while the process is still at the bad one, which it has fetched with it.
    eventually(lambda: set(sent.done()) == {"1"} and sent.left() == 0)
    assert quarantined() == {("bad", "unreadable")}
    assert not worker.ended()


@pytest.mark.parametrize("served", [(QUEUE,), (QUEUE, "cron")], ids=["alone", "both"])
def test_a_message_in_another_queue_than_it_names_is_quarantined(start_worker, sent, served):
    client.hset(queues.bodies_key(QUEUE), "good", orjson.dumps(GOOD | {"message_id": "good", "queue_name": "cron"}))
    client.rpush(queues.ready_key(QUEUE), "good")

    worker = start_worker(queues=served)

    eventually(lambda: quarantined() == {("good", "unreadable")} and sent.left() == 0)
    assert not worker.ended()


# Children


def test_a_child_and_its_successor_name_the_run_that_sent_them(start_worker, sent, go):
    message = sent.push("go_on", str(go), key="child", run=7)
    # As a run leaves it, which sends no child that is on its way.
    client.hset(queues.QUEUED_CHILDREN_KEY, "child", message.options["redis_message_id"])
    worker = start_worker()

    # The successor is sent before the child is acknowledged.
    eventually(lambda: sent.left() == 0)

    assert [(line["message_id"], line["run"]) for line in worker.said("child finished")] == [("child", 7)] * 2
    assert client.hlen(queues.QUEUED_CHILDREN_KEY) == 0
