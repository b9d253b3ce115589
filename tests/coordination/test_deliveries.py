"""Messages in the hands of workers, in a real Redis: every message in exactly one place, whatever happens."""

from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread

import pytest
import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forgekeeper.delivery import deliveries
from forgekeeper.delivery.deliveries import CHUNK, MAX_DEATHS, Deliveries, Together
from forgekeeper.scripts import call
from tests.harness.thorough import sequences
from tests.harness.waiting import wait_until

NAMESPACE = "deliveries"
QUEUE, LINE = "q", "q.DQ"
QUEUES = (QUEUE, "other")
DEAD_AFTER = timedelta(minutes=1)
LIMIT = 60.0
HEARTBEATS = f"{NAMESPACE}:__heartbeats__"


@pytest.fixture(scope="module")
def client(urls):
    with redis.Redis.from_url(urls.redis) as client:
        yield client


@pytest.fixture(autouse=True)
def _empty(client):
    client.flushdb()


@pytest.fixture
def hire(client):
    return lambda name: Deliveries(client, NAMESPACE, name)


@pytest.fixture
def worker(hire):
    return hire("worker")


@pytest.fixture
def other(hire):
    return hire("other")


def body(message_id, version=0, queue=QUEUE):
    options = {"redis_message_id": message_id}
    return Message(queue, "actor", (), {}, options, message_id, version).encode()


def enqueue(worker, *message_ids, queue=QUEUE):
    return [worker.enqueue(queue, message_id, body(message_id, queue=queue)) for message_id in message_ids]


def ids(fetched):
    return [one.id.decode() for one in fetched]


def ready(client, queue=QUEUE):
    return [message_id.decode() for message_id in client.lrange(f"{NAMESPACE}:{queue}", 0, -1)]


def steps(worker, *wanted):
    return worker._call("message_steps", worker._ends(QUEUE), *(part for step in wanted for part in step))


class Asked:
    """Answers what is asked together, the first time only when it is let, and notes it."""

    def __init__(self, *errors):
        self.calls, self.begun, self.go = [], Event(), Event()
        self._errors = list(errors)

    def __call__(self, *args):
        self.calls.append(args)
        self.begun.set()
        assert self.go.wait(LIMIT)
        error = self._errors.pop(0) if self._errors else None
        if error is not None:
            raise error
        return "".join("0" if arg == "gone" else "1" for arg in args).encode()

    def by_threads(self, *args):
        """Let a thread ask for the first, and when it is under way others for the rest; return each one's answer."""
        together, answers = Together(self), {}

        def want(arg):
            try:
                (answers[arg],) = together((arg,))
            except BaseException as error:  # noqa: BLE001, it is what is asked about
                answers[arg] = error

        threads = [Thread(target=want, args=[arg]) for arg in args]
        threads[0].start()
        assert self.begun.wait(LIMIT)
        for thread in threads[1:]:
            thread.start()
        assert wait_until(lambda: len(together._waiting) == len(args) - 1, LIMIT)
        self.go.set()
        for thread in threads:
            thread.join(LIMIT)
        return answers


def fall_silent(worker):
    """Let the worker's last sign of life be as old as can be."""
    assert worker.client.zscore(HEARTBEATS, worker.worker) is not None
    worker.client.zadd(HEARTBEATS, {worker.worker: 0})


def die_of(worker, message_id, *, other):
    """Start on the message and never come back; *other* rescues what is left."""
    worker.fetch(QUEUE, limit=10)
    assert worker.start(QUEUE, message_id, counted=True)
    fall_silent(worker)
    return other.reclaim(QUEUES, dead_after=DEAD_AFTER)


def dead_letters(client):
    return {key.decode(): value.decode() for key, value in client.hgetall(f"{NAMESPACE}:{QUEUE}.XQ.reasons").items()}


# What others see


def test_only_those_who_have_something_in_hand_or_beat_are_workers(client, worker, other):
    enqueue(worker, "1")
    assert client.zcard(HEARTBEATS) == 0

    worker.fetch(QUEUE, limit=1)
    other.heartbeat()

    assert set(client.zrange(HEARTBEATS, 0, -1)) == {b"worker", b"other"}


def test_a_sign_of_life_bears_the_time_of_redis(client, worker):
    worker.heartbeat()

    seconds, micros = client.time()
    assert 0 <= seconds * 1000 + micros // 1000 - client.zscore(HEARTBEATS, "worker") < 10_000


def test_a_bare_dramatiq_worker_fetches_and_ends_what_we_put_and_retried(client, worker):
    enqueue(worker, "1", "2")
    (fetched,) = worker.fetch(QUEUE, limit=1)
    worker.retry(QUEUE, fetched, body("1", 1, LINE))
    bare = RedisBroker(client=client, namespace=NAMESPACE, middleware=[])

    found = {queue: Message.decode(bare.do_fetch(queue, 5)[0]).message_id for queue in (QUEUE, LINE)}
    bare.do_ack(QUEUE, "2")
    bare.do_nack(LINE, "1")

    assert found == {QUEUE: "2", LINE: "1"}
    assert client.zrange(f"{NAMESPACE}:{QUEUE}.XQ", 0, -1) == [b"1"]
    assert client.hlen(f"{NAMESPACE}:{QUEUE}.msgs") == 0


def test_what_a_silent_bare_worker_had_in_hand_is_rescued(client, worker):
    enqueue(worker, "1")
    bare = RedisBroker(client=client, namespace=NAMESPACE, middleware=[])
    bare.do_fetch(QUEUE, 1)
    client.zadd(HEARTBEATS, {bare.broker_id: 0})

    worker.reclaim(QUEUES, dead_after=DEAD_AFTER)

    assert (ready(client), client.zrange(HEARTBEATS, 0, -1)) == (["1"], [b"worker"])


# Rescue


def test_a_worker_that_died_while_the_clock_was_ahead_is_found_silent_once_it_is_right(client, worker, other):
    enqueue(worker, "1")
    worker.fetch(QUEUE, limit=1)
    client.zadd(HEARTBEATS, {worker.worker: (client.time()[0] + 86400) * 1000})

    first = other.reclaim(QUEUES, dead_after=DEAD_AFTER)
    reclaimed = wait_until(lambda: other.reclaim(QUEUES, dead_after=timedelta(milliseconds=1)), 10)

    assert (first, reclaimed, ready(client)) == ([], True, ["1"])


def test_the_messages_of_a_silent_worker_are_at_the_head_of_the_queue(client, worker, other):
    enqueue(worker, "1", "2", "3")
    worker.fetch(QUEUE, limit=1)
    fall_silent(worker)

    (reclaimed,) = other.reclaim(QUEUES, dead_after=DEAD_AFTER)

    assert (reclaimed.worker, reclaimed.queue, reclaimed.taken, reclaimed.poison) == ("worker", QUEUE, 1, [])
    assert ready(client) == ["1", "2", "3"]
    assert client.zrange(HEARTBEATS, 0, -1) == [b"other"]


@pytest.mark.parametrize("queue", [QUEUE, LINE, "other", "other.DQ"])
def test_every_queue_is_rescued(client, worker, other, queue):
    enqueue(worker, "1", queue=queue)
    worker.fetch(queue, limit=1)
    fall_silent(worker)

    other.reclaim(QUEUES, dead_after=DEAD_AFTER)

    assert ready(client, queue) == ["1"]


def test_more_than_a_chunk_is_rescued_at_once(client, worker, other):
    many = [str(number) for number in range(2 * CHUNK + 1)]
    enqueue(worker, *many)
    while worker.fetch(QUEUE, limit=CHUNK):
        pass
    fall_silent(worker)

    other.reclaim(QUEUES, dead_after=DEAD_AFTER)

    assert sorted(ready(client)) == sorted(many)


def test_a_worker_that_was_stopped_for_long_does_not_take_its_messages_from_itself(client, worker):
    enqueue(worker, "1")
    worker.fetch(QUEUE, limit=1)
    fall_silent(worker)

    assert worker.reclaim(QUEUES, dead_after=DEAD_AFTER) == []
    assert (ready(client), worker.ack(QUEUE, "1")) == ([], True)


def test_a_worker_that_shows_itself_while_it_is_being_rescued_keeps_the_rest(client, worker, other, monkeypatch):
    enqueue(worker, "1")
    worker.fetch(QUEUE, limit=1)
    fall_silent(worker)

    def call_late(client, script, **arguments):
        if script == "worker_reclaim":
            # Not this very moment: what counts is for how long it may say nothing.
            client.zadd(HEARTBEATS, {"worker": (client.time()[0] - DEAD_AFTER.total_seconds() / 2) * 1000})
        return call(client, script, **arguments)

    monkeypatch.setattr(deliveries, "call", call_late)

    assert other.reclaim(QUEUES, dead_after=DEAD_AFTER) == []
    assert (ready(client), worker.ack(QUEUE, "1")) == ([], True)
    assert client.zscore(HEARTBEATS, "worker") is not None


def test_a_worker_that_comes_back_too_late_changes_nothing(client, worker, other):
    enqueue(worker, "1")
    (fetched,) = worker.fetch(QUEUE, limit=1)
    fall_silent(worker)
    other.reclaim(QUEUES, dead_after=DEAD_AFTER)
    other.fetch(QUEUE, limit=1)

    answers = [
        worker.start(QUEUE, "1", counted=True),
        worker.retry(QUEUE, fetched, b"later"),
        worker.nack(QUEUE, *fetched, reason="late"),
        worker.ack(QUEUE, *fetched),
        bool(worker.requeue(QUEUE, ["1"])),
        bool(worker.requeue_lost(QUEUE, [])),
        bool(worker.requeue_unstarted(QUEUE)),
    ]

    assert answers == [False] * len(answers)
    assert (ready(client), dead_letters(client), other.ack(QUEUE, *fetched)) == ([], {}, True)


def test_a_worker_that_comes_back_and_fetches_is_watched_again(client, worker, other):
    enqueue(worker, "1")
    worker.heartbeat()
    fall_silent(worker)
    other.reclaim(QUEUES, dead_after=DEAD_AFTER)

    worker.fetch(QUEUE, limit=1)

    assert client.zscore(HEARTBEATS, "worker") is not None


def test_nothing_walks_through_all_keys(client, worker, other):
    client.config_resetstat()
    enqueue(worker, "1")
    die_of(worker, "1", other=other)

    assert not {"cmdstat_keys", "cmdstat_scan"} & set(client.info("commandstats"))


# Poison


def test_messages_that_had_not_started_are_innocent_however_often_their_workers_die(client, hire, other):
    enqueue(other, "1")
    for life in range(2 * MAX_DEATHS):
        worker = hire(f"worker-{life}")
        worker.fetch(QUEUE, limit=1)
        fall_silent(worker)
        other.reclaim(QUEUES, dead_after=DEAD_AFTER)

    assert (ready(client), dead_letters(client)) == (["1"], {})


def test_a_message_that_waits_unstarted_where_the_third_death_happens_is_not_given_up(client, hire, other):
    enqueue(other, "bad")
    for life in range(MAX_DEATHS - 1):
        die_of(hire(f"worker-{life}"), "bad", other=other)
    bystander = hire("bystander")
    bystander.fetch(QUEUE, limit=1)
    fall_silent(bystander)

    other.reclaim(QUEUES, dead_after=DEAD_AFTER)

    assert (ready(client), dead_letters(client)) == (["bad"], {})


def test_a_message_with_all_its_deaths_that_waits_unstarted_is_not_given_up(client, worker, other):
    enqueue(other, "1")
    for _ in range(MAX_DEATHS):
        other.fetch(QUEUE, limit=1)
        other.start(QUEUE, "1", counted=True)
        other.requeue_lost(QUEUE, [])
    worker.fetch(QUEUE, limit=1)
    fall_silent(worker)

    other.reclaim(QUEUES, dead_after=DEAD_AFTER)

    assert (ready(client), dead_letters(client)) == (["1"], {})


def test_deaths_of_a_message_that_another_counts_are_not_counted_here(client, hire, other):
    enqueue(other, "run")
    for life in range(2 * MAX_DEATHS):
        worker = hire(f"worker-{life}")
        worker.fetch(QUEUE, limit=1)
        worker.start(QUEUE, "run", counted=False)
        fall_silent(worker)
        other.reclaim(QUEUES, dead_after=DEAD_AFTER)

    assert (ready(client), dead_letters(client)) == (["run"], {})


def ended_by_ack(worker, fetched):
    worker.ack(QUEUE, *fetched)
    enqueue(worker, "1")


def ended_by_nack(worker, fetched):
    worker.nack(QUEUE, *fetched, reason="no")
    enqueue(worker, "1")


def ended_by_retry(worker, fetched):
    worker.retry(QUEUE, fetched, body("1", queue=LINE))
    (waiting,) = worker.fetch(LINE, limit=1)
    worker.due(QUEUE, waiting, body("1"))


def ended_by_requeue(worker, fetched):
    worker.requeue(QUEUE, [fetched.id])


@pytest.mark.parametrize("end", [ended_by_ack, ended_by_nack, ended_by_retry, ended_by_requeue])
def test_every_orderly_end_clears_the_count(client, hire, other, end):
    enqueue(other, "1")
    for life in range(MAX_DEATHS - 1):
        die_of(hire(f"worker-{life}"), "1", other=other)
    (fetched,) = other.fetch(QUEUE, limit=1)
    other.start(QUEUE, "1", counted=True)

    end(other, fetched)

    (reclaimed,) = die_of(hire("another"), "1", other=other)
    assert (reclaimed.poison, ready(client)) == ([], ["1"])


def test_handing_back_a_message_that_has_not_started_does_not_clear_its_deaths(client, hire, other):
    enqueue(other, "bad")
    for life in range(MAX_DEATHS - 1):
        die_of(hire(f"worker-{life}"), "bad", other=other)
    other.fetch(QUEUE, limit=1)
    other.requeue(QUEUE, ["bad"])

    (reclaimed,) = die_of(hire("last"), "bad", other=other)

    assert reclaimed.poison == ["bad"]


# Ends


def acknowledge(worker, fetched):
    return worker.ack(QUEUE, *fetched)


def give_up(worker, fetched):
    return worker.nack(QUEUE, *fetched, reason="failed")


def try_again(worker, fetched):
    return worker.retry(QUEUE, fetched, body("1", 1, LINE))


@pytest.mark.parametrize("end", [acknowledge, give_up, try_again])
def test_an_end_repeated_after_a_lost_reply_does_not_end_the_next_message_of_that_id(worker, end):
    enqueue(worker, "1")
    (first,) = worker.fetch(QUEUE, limit=1)
    end(worker, first)
    for waiting in worker.fetch(LINE, limit=1):
        worker.due(QUEUE, waiting, body("1", 1))
    worker.enqueue(QUEUE, "1", body("1", 1))
    (second,) = worker.fetch(QUEUE, limit=1)

    again = end(worker, first)

    assert (again, worker.ack(QUEUE, *second)) == (False, True)


def test_a_wait_that_is_ended_again_after_a_lost_reply_does_not_end_the_next_one_of_that_id(worker):
    enqueue(worker, "1", queue=LINE)
    (first,) = worker.fetch(LINE, limit=1)
    worker.due(QUEUE, first, body("1"))
    (message,) = worker.fetch(QUEUE, limit=1)
    try_again(worker, message)
    (second,) = worker.fetch(LINE, limit=1)

    again = worker.due(QUEUE, first, body("1"))

    assert (again, worker.due(QUEUE, second, body("1", 1))) == (False, True)


def test_what_was_started_is_not_handed_back(client, worker):
    enqueue(worker, "1", "2")
    worker.fetch(QUEUE, limit=2)
    worker.start(QUEUE, "1", counted=True)

    assert worker.requeue_unstarted(QUEUE) == 1
    assert (ready(client), worker.start(QUEUE, "2", counted=True), worker.ack(QUEUE, "1")) == (["2"], False, True)


def test_what_a_lost_reply_brought_is_reclaimed(client, worker):
    enqueue(worker, "1", "2")
    worker.fetch(QUEUE, limit=2)

    assert worker.requeue_lost(QUEUE, ["1"]) == 1
    assert (ready(client), worker.ack(QUEUE, "1")) == (["2"], True)


def test_an_id_without_a_body_is_dropped(client, worker):
    enqueue(worker, "1", "2")
    client.hdel(f"{NAMESPACE}:{QUEUE}.msgs", "1")

    assert ids(worker.fetch(QUEUE, limit=2)) == ["2"]
    assert client.smembers(f"{NAMESPACE}:__acks__.worker.{QUEUE}") == {b"2"}


def test_a_delayed_message_whose_id_is_queued_already_does_not_double_it(client, worker):
    enqueue(worker, "1", queue=LINE)
    (waiting,) = worker.fetch(LINE, limit=1)
    # As somebody would who does not know our rules.
    client.hset(f"{NAMESPACE}:{QUEUE}.msgs", "1", body("1"))
    client.rpush(f"{NAMESPACE}:{QUEUE}", "1")

    assert worker.due(QUEUE, waiting, body("1", 1))
    assert (ready(client), client.hlen(f"{NAMESPACE}:{LINE}.msgs")) == (["1"], 0)


# A full Redis


@contextmanager
def full(client):
    client.config_set("maxmemory", "1")
    try:
        yield
    finally:
        client.config_set("maxmemory", "0")


def test_a_full_redis_refuses_new_messages_and_lets_the_others_out(client, worker, other):
    enqueue(worker, "done", "retried", "given up")
    enqueue(worker, "waiting", queue=LINE)
    worker.heartbeat()
    with full(client):
        with pytest.raises(redis.ResponseError, match="maxmemory"):
            enqueue(worker, "new")

        fetched = worker.fetch(QUEUE, limit=3)
        started = [worker.start(QUEUE, one.id, counted=True) for one in fetched]
        ended = [
            worker.ack(QUEUE, *fetched[0]),
            worker.retry(QUEUE, fetched[1], body("retried", 1, LINE)),
            worker.nack(QUEUE, *fetched[2], reason="no"),
            worker.due(QUEUE, worker.fetch(LINE, limit=1)[0], body("waiting", 1)),
        ]
        fall_silent_before = client.zscore(HEARTBEATS, "worker")
        worker.heartbeat()

        assert (ids(fetched), started, ended) == (["done", "retried", "given up"], [True] * 3, [True] * 4)
        assert client.zscore(HEARTBEATS, "worker") >= fall_silent_before


def test_a_full_redis_lets_the_messages_of_a_silent_worker_be_rescued(client, worker, other):
    enqueue(worker, "1")
    worker.fetch(QUEUE, limit=1)
    fall_silent(worker)

    with full(client):
        other.reclaim(QUEUES, dead_after=DEAD_AFTER)

    assert ready(client) == ["1"]


# Any order of anything


NAMES = ("a", "b", "c")
picks = st.sampled_from(NAMES)
messages = st.sampled_from(["1", "2", "3", "4"])


class Machine(RuleBasedStateMachine):
    """Workers that fetch, start, end, drain, fall silent and come back, and a model of where each message is.

    *where* has for each message that is on its way the queue it is in and who has it in
    hand, None while it is ready.  What a worker believes to have in hand it may have lost.
    """

    client = None

    @initialize()
    def start(self):
        self.client.flushdb()
        self.workers = {name: Deliveries(self.client, NAMESPACE, name) for name in NAMES}
        self.believes = {name: [] for name in NAMES}
        self.where = {}
        self.bodies = {}
        self.started = set()
        self.deaths = Counter()
        self.dead = set()
        self.silent = set()
        self.version = 0

    def fresh(self, message_id, queue):
        self.version += 1
        return body(message_id, self.version, queue)

    def ours(self, name, queue, fetched, *, exactly=True):
        message_id = fetched.id.decode()
        same = not exactly or self.bodies.get(message_id) == fetched.body
        return same and self.where.get(message_id) == (queue, name)

    def settled(self, name, queue, message_id, where, *, clears=True):
        """Move the message in the model."""
        if (name, queue, message_id) in self.started:
            self.started.discard((name, queue, message_id))
            if clears:
                self.deaths.pop(message_id, None)
        if where is None:
            self.where.pop(message_id)
            self.bodies.pop(message_id)
        else:
            self.where[message_id] = where

    @rule(message_id=messages, queue=st.sampled_from([QUEUE, LINE]))
    def somebody_puts_a_message(self, message_id, queue):
        new = self.fresh(message_id, queue)

        accepted = self.workers["a"].enqueue(queue, message_id, new)

        assert accepted == (message_id not in self.where)
        if accepted:
            self.where[message_id] = (queue, None)
            self.bodies[message_id] = new

    @rule(name=picks, queue=st.sampled_from([QUEUE, LINE]), limit=st.integers(1, 3))
    def a_worker_fetches(self, name, queue, limit):
        expected = sum(where == (queue, None) for where in self.where.values())

        fetched = self.workers[name].fetch(queue, limit=limit)

        assert len(fetched) == min(limit, expected)
        for one in fetched:
            message_id = one.id.decode()
            assert self.where[message_id] == (queue, None)
            assert self.bodies[message_id] == one.body
            self.where[message_id] = (queue, name)
            self.believes[name].append((queue, one))
        if fetched:
            self.silent.discard(name)

    @rule(name=picks)
    def a_reply_is_lost(self, name):
        if self.workers[name].fetch(QUEUE, limit=1):
            (message_id,) = [
                key
                for key, where in self.where.items()
                if where == (QUEUE, None) and self.client.sismember(f"{NAMESPACE}:__acks__.{name}.{QUEUE}", key)
            ]
            self.where[message_id] = (QUEUE, name)
            self.silent.discard(name)

    def some(self, data, name, queue):
        held = [one for line, one in self.believes[name] if line == queue]
        return data.draw(st.sampled_from(held)) if held else None

    @rule(data=st.data(), name=picks, counted=st.booleans())
    def a_worker_starts(self, data, name, counted):
        fetched = self.some(data, name, QUEUE)
        if fetched is None:
            return
        message_id = fetched.id.decode()
        if (name, QUEUE, message_id) in self.started:
            return

        may = self.workers[name].start(QUEUE, message_id, counted=counted)

        assert may == self.ours(name, QUEUE, fetched, exactly=False)
        if may:
            self.started.add((name, QUEUE, message_id))
            self.deaths[message_id] += counted

    @rule(data=st.data(), name=picks, how=st.sampled_from(["ack", "nack", "retry"]), forgets=st.booleans())
    def a_worker_ends_a_message(self, data, name, how, forgets):
        fetched = self.some(data, name, QUEUE)
        if fetched is None:
            return
        message_id = fetched.id.decode()
        worker, ours = self.workers[name], self.ours(name, QUEUE, fetched)

        if how == "ack":
            answer, where = worker.ack(QUEUE, *fetched), None
        elif how == "nack":
            answer, where = worker.nack(QUEUE, *fetched, reason="no"), None
        else:
            later = self.fresh(message_id, LINE)
            answer, where = worker.retry(QUEUE, fetched, later), (LINE, None)

        assert answer == ours
        if ours:
            self.deaths.pop(message_id, None)
            self.settled(name, QUEUE, message_id, where)
            if how == "nack":
                self.dead.add(message_id)
            if how == "retry":
                self.bodies[message_id] = later
        if forgets:  # else the reply was lost, and the worker will do it again
            self.believes[name].remove((QUEUE, fetched))

    @rule(data=st.data(), name=picks)
    def a_message_becomes_due(self, data, name):
        fetched = self.some(data, name, LINE)
        if fetched is None:
            return
        message_id = fetched.id.decode()
        ours, now = self.ours(name, LINE, fetched), self.fresh(message_id, QUEUE)

        assert self.workers[name].due(QUEUE, fetched, now) == ours

        if ours:
            self.settled(name, LINE, message_id, (QUEUE, None))
            self.bodies[message_id] = now
        self.believes[name].remove((LINE, fetched))

    @rule(data=st.data(), name=picks, queue=st.sampled_from([QUEUE, LINE]))
    def a_worker_hands_a_message_back(self, data, name, queue):
        fetched = self.some(data, name, queue)
        if fetched is None:
            return
        ours = self.ours(name, queue, fetched, exactly=False)

        assert self.workers[name].requeue(queue, [fetched.id]) == ours

        if ours:
            self.settled(name, queue, fetched.id.decode(), (queue, None))
        self.believes[name].remove((queue, fetched))

    @rule(name=picks, queue=st.sampled_from([QUEUE, LINE]))
    def a_worker_drains(self, name, queue):
        unstarted = [
            message_id
            for message_id, where in self.where.items()
            if where == (queue, name) and (name, queue, message_id) not in self.started
        ]

        assert self.workers[name].requeue_unstarted(queue) == len(unstarted)

        for message_id in unstarted:
            self.where[message_id] = (queue, None)

    @rule(name=picks, queue=st.sampled_from([QUEUE, LINE]))
    def a_worker_reclaims(self, name, queue):
        held = [one.id for line, one in self.believes[name] if line == queue]
        strange = [
            message_id
            for message_id, where in self.where.items()
            if where == (queue, name) and message_id.encode() not in held
        ]

        assert self.workers[name].requeue_lost(queue, held) == len(strange)

        for message_id in strange:
            self.settled(name, queue, message_id, (queue, None), clears=False)

    @rule(name=picks)
    def a_worker_falls_silent(self, name):
        if self.client.zscore(HEARTBEATS, name) is not None:
            fall_silent(self.workers[name])
            self.silent.add(name)

    @rule(name=picks)
    def a_worker_is_killed_and_another_takes_its_place(self, name):
        """Its successor bears the same name here, which makes things worse than they can be."""
        self.a_worker_falls_silent(name)
        self.believes[name] = []

    @rule(name=picks)
    def a_worker_beats(self, name):
        self.workers[name].heartbeat()
        self.silent.discard(name)

    @precondition(lambda self: self.silent)
    @rule(name=picks)
    def somebody_rescues(self, name):
        found = self.workers[name].reclaim(QUEUES, dead_after=DEAD_AFTER)

        poison, silent = set(), self.silent - {name}
        for message_id, (queue, holder) in list(self.where.items()):
            if holder not in silent:
                continue
            if (holder, queue, message_id) in self.started and self.deaths[message_id] >= MAX_DEATHS:
                poison.add(message_id)
                self.settled(holder, queue, message_id, None)
            else:
                self.settled(holder, queue, message_id, (queue, None), clears=False)
        self.dead |= poison
        self.silent -= silent
        assert {message_id for reclaimed in found for message_id in reclaimed.poison} == poison

    @invariant()
    def every_message_is_in_exactly_one_place(self):
        if self.client is None or not hasattr(self, "where"):
            return
        places = Counter()
        for queue in (QUEUE, LINE):
            for message_id in ready(self.client, queue):
                places[message_id, (queue, None)] += 1
            for name in NAMES:
                for message_id in self.client.smembers(f"{NAMESPACE}:__acks__.{name}.{queue}"):
                    places[message_id.decode(), (queue, name)] += 1
        assert places == Counter(self.where.items())
        stored = {}
        for queue in (QUEUE, LINE):
            stored |= self.client.hgetall(f"{NAMESPACE}:{queue}.msgs")
        assert stored == {message_id.encode(): text for message_id, text in self.bodies.items()}
        assert {message_id.decode() for message_id in self.client.zrange(f"{NAMESPACE}:{QUEUE}.XQ", 0, -1)} == self.dead

    @invariant()
    def whoever_has_something_in_hand_is_watched(self):
        if hasattr(self, "where"):
            watched = {name.decode() for name in self.client.zrange(HEARTBEATS, 0, -1)}
            assert {name for _queue, name in self.where.values() if name} <= watched

    @invariant()
    def nothing_is_remembered_of_what_has_ended(self):
        if hasattr(self, "where"):
            counted = {
                key.decode(): int(value) for key, value in self.client.hgetall(f"{NAMESPACE}:{QUEUE}.starts").items()
            }
            assert counted == {key: count for key, count in self.deaths.items() if count}
            for name in NAMES:
                started = self.client.smembers(f"{NAMESPACE}:__started__.{name}.{QUEUE}")
                assert started == {key.encode() for who, _queue, key in self.started if who == name}


def test_every_message_is_in_exactly_one_place_whatever_the_order_of_events(client):
    class Here(Machine):
        pass

    Here.client = client
    run_state_machine_as_test(Here, settings=sequences(150, steps=40))


# Steps that are taken together


def test_steps_that_are_wanted_while_another_is_under_way_are_taken_together():
    asked = Asked()

    asked.by_threads("1", "2", "3", "4")

    assert [sorted(call) for call in asked.calls] == [["1"], ["2", "3", "4"]]


def test_of_steps_that_are_taken_together_each_has_its_own_answer():
    assert Asked().by_threads("1", "2", "gone", "4") == {"1": True, "2": True, "gone": False, "4": True}


def test_an_error_is_everybodys_who_was_asked_for_and_nobody_elses():
    error = redis.TimeoutError("away")

    assert Asked(None, error).by_threads("1", "2", "3") == {"1": True, "2": error, "3": error}


def test_who_is_interrupted_while_it_asks_leaves_the_others_to_ask_themselves():
    asked = Asked(None, KeyboardInterrupt())

    answers = asked.by_threads("1", "2", "3")

    interrupted = [arg for arg, answer in answers.items() if isinstance(answer, KeyboardInterrupt)]
    assert (len(interrupted), sum(answer is True for answer in answers.values())) == (1, 2)


def test_of_messages_that_are_acknowledged_together_those_end_that_are_ours(client, worker, other):
    enqueue(worker, "1", "2", "3")
    worker.fetch(QUEUE, limit=2)
    other.fetch(QUEUE, limit=1)

    found = steps(worker, ("ack", "1", body("1")), ("ack", "2", body("2", 9)), ("ack", "3", body("3")))

    assert (found, sorted(client.hkeys(f"{NAMESPACE}:{QUEUE}.msgs"))) == (b"100", [b"2", b"3"])


def test_of_messages_that_are_started_together_those_are_noted_that_are_ours(client, worker, other):
    enqueue(worker, "1", "2", "3")
    worker.fetch(QUEUE, limit=2)
    other.fetch(QUEUE, limit=1)

    found = steps(worker, ("start", "1", 1), ("start", "2", 0), ("start", "3", 1))

    assert (found, client.hgetall(f"{NAMESPACE}:{QUEUE}.starts")) == (b"110", {b"1": b"1"})


def test_an_end_and_a_start_that_are_taken_together_have_an_answer_each(client, worker):
    enqueue(worker, "done", "next", "later")
    done, _ = worker.fetch(QUEUE, limit=2)
    worker.start(QUEUE, "done", counted=True)

    found = [worker.ack_and_start(QUEUE, done, upcoming, counted=True) for upcoming in ("next", "later")]

    assert found == [(True, True), (False, False)]
    assert client.hgetall(f"{NAMESPACE}:{QUEUE}.starts") == {b"next": b"1"}


@pytest.mark.parametrize("key", ["started", "starts"])
def test_where_a_key_is_of_another_type_neither_the_end_nor_the_start_changes_anything(client, worker, key):
    enqueue(worker, "done", "next")
    done, _ = worker.fetch(QUEUE, limit=2)
    client.set({"started": worker._keys.started(QUEUE)}.get(key, f"{NAMESPACE}:{QUEUE}.{key}"), "not ours")

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        worker.ack_and_start(QUEUE, done, "next", counted=True)

    assert client.smembers(worker._keys.in_hand(QUEUE)) == {b"done", b"next"}
