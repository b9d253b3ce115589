"""Whatever anybody writes into Redis or PostgreSQL ends nothing of ours, and stops nothing but itself."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import chain
from queue import SimpleQueue

import hypothesis
import peewee as pw
import pytest
from dramatiq.errors import ConnectionClosed
from hypothesis import strategies as st
from redis.exceptions import ResponseError
from structlog.testing import capture_logs

import scheduler
from forgekeeper.api.batches import BATCHES, CHILDREN, list_queues
from forgekeeper.delivery import queues as keys
from forgekeeper.delivery.broker import broker
from forgekeeper.delivery.children import send_children
from forgekeeper.delivery.messages import UNREADABLE_ACTOR
from forgekeeper.exporter import Exporter
from forgekeeper.ledger.holds import Batch
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform import database as db
from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination import leases as locks
from forgekeeper.platform.coordination import redis_values
from forgekeeper.platform.database import release_connection
from tests.harness.artifacts import buckets
from tests.harness.leases import hold_lease
from tests.harness.stale_uploads import uploads as register
from tests.harness.tables import TABLES, empty
from tests.harness.thorough import examples, whole_only

PATIENCE = timedelta(seconds=1)
KEYS = redis_values.KEY_TYPES | keys.required_key_types(list_queues())
KEYS["pending_direct_uploads"] = "hash"
TYPES = ("string", "list", "set", "zset", "hash")
CHILD = "clean_project_refs"
READING = (
    *("status", "leases", "buckets", "quarantine", "processes", "objects held", "check", "flags"),
    *("status --json", "leases list --json", "buckets --json", "quarantine --json", "check --json", "processes --json"),
    *("ticks prune", "ticks prune --json", "why prune", "why 1", "why 2 --json"),
)


def body(**parts):
    message = {"queue_name": "git", "actor_name": CHILD, "args": [7], "kwargs": {}, "options": {}, "message_id": "m"}
    return json.dumps(message | {"message_timestamp": 1_700_000_000_000} | parts).encode()


MEMBERS = st.sampled_from([
    *(b"", b"\xff\xfe", b"\0", b"x" * 70_000, b"9" * 5_000, b"-1", b"1.5", b"nan", b"inf", b"1e400", b"5", b":"),
    *("ü😀".encode(), b"artifacts:\xff", b"artifacts:../x", b"\x1b[31m\n", b"t \xff", b"[" * 5_000, b'{"a": 1}', b"null"),
]) | st.binary(max_size=20)  # fmt: skip
BODIES = st.sampled_from([
    *(body(actor_name=None), body(args=5), body(args=[10**400]), body(message_id="\ud800"), body(actor_name="\ud800")),
    *(body(options={"eta": wrong}) for wrong in (float("nan"), float("inf"), 10**30, "x", None)),
    *(body(message_timestamp=wrong) for wrong in (float("nan"), float("inf"), 10**17, -(10**17), "x", None)),
    *(body(options={name: []}) for name in ("run", "retries", "traceparent", "forgekeeper_due_ms", "traceback")),
    body(options={"forgekeeper_due_ms": 10**18}),
])  # fmt: skip
SCORES = st.sampled_from([0, -1, 0.5, 1e9, 1e12, 1e18, 1e300, -1e300, float("inf"), float("-inf"), 253_402_300_800])
NOISE = st.fixed_dictionaries({
    name: st.lists(st.tuples(MEMBERS, BODIES | MEMBERS if name.endswith(".msgs") else MEMBERS, SCORES), max_size=4)
    for name in KEYS
    if name != "forgekeeper:installation"
})  # fmt: skip

TEXTS = st.sampled_from(["", "x" * 20_000, "\x1b[31m", "a\nb", "😀", "{}", "../..", "/etc", ":::", "\u2028", "5"])
DOCUMENTS = st.sampled_from([
    *("null", "5", '"x"', "[]", "[1]", "{}", '{"n": 1e400}', '{"earlier": 5}', '{"set_aside": "x"}', '{"set_aside": 5}'),
    *("[" * 3_000 + "]" * 3_000, '{"a":' * 3_000 + "1" + "}" * 3_000, '[{"what": 5, "seconds": "x"}]', '{"prune": 5}'),
    '[{"what": "a", "message_id": "m", "seconds": 1e300}]',
])  # fmt: skip
INSTANTS = st.sampled_from(["infinity", "-infinity", "4713-01-01 BC", "0001-01-01", "294276-12-31", "epoch", "now"])
DAYS = st.sampled_from(["infinity", "-infinity", "4713-01-01 BC", "5874897-12-31", "epoch"])
ARRAYS = st.lists(st.sampled_from([0, -1, 2**31 - 1, -(2**31)]), max_size=3)
NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 5, 32_767, 2**31 - 2, 2**63 - 2, -(2**63)])
OF_KIND = {
    "batch": st.sampled_from(sorted(BATCHES)),
    "state": st.sampled_from(["started", "claimed", "enqueued", "succeeded", "failed", "blocked", "skipped", "missed"]),
    "kind": st.sampled_from(["worker", "scheduler"]),
}
few = hypothesis.settings(
    max_examples=examples(30),
    derandomize=True,
    print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def put(name, kind, members):
    for member, value, score in members:
        if kind == "zset":
            client.zadd(name, {member: score})
        elif kind == "hash":
            client.hset(name, member, value)
        elif kind == "set":
            client.sadd(name, member)
        elif kind == "list":
            client.rpush(name, member)
        else:
            client.set(name, value)


def put_noise(noise):
    for name, members in noise.items():
        put(name, KEYS[name], members)
    for field, (_member, value, _score) in zip(("last_claimed", "max_buckets"), noise[buckets.state_key], strict=False):
        client.hset(buckets.state_key, field, value)


def in_a_thread(work):
    """Do the work in a thread with a connection of its own, as schedulers and workers do."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def consume():
    """What the consumers of all queues hand out, and acknowledge or reject."""
    found = []
    for queue in chain.from_iterable((queue, f"{queue}.DQ") for queue in list_queues()):
        # A worker tries again after what Redis refuses.
        with suppress(ConnectionClosed, ResponseError):
            consumer = broker.consume(queue, prefetch=50, timeout=1)
            while (message := next(consumer)) is not None:
                found.append(message.message_id)
                if UNREADABLE_ACTOR in message.options:
                    broker.emit_before("nack", message)
                    consumer.nack(message)
                else:
                    consumer.ack(message)
    return found


def reconcile(settings):
    """Let each batch's loop turn once."""
    for batch in BATCHES.values():
        scheduler.BatchLoop(batch, settings, broken=threading.Event(), stop_requests=SimpleQueue()).reconcile_once()
    release_connection()


def read_by(call, command):
    result = call(*command.split())
    assert "Traceback" not in result.stderr, f"{command}: {result.stderr[-2000:]}"
    assert result.status in {0, 1}, f"{command}: {result.stderr[-2000:]}"
    return result


def failed_collectors(settings):
    with capture_logs() as lines:
        list(Exporter(settings)._collect_readings())
    return [line["collector"] for line in lines if line["event"] == "collector failed"]


def begin_anew(database):
    """Empty the ledger; its next runs have numbers that no noise has, and ticks that are due."""
    client.flushdb()
    database.execute_sql("truncate job_runs; alter table job_runs alter column id restart with 1000000")
    Batch.register(BATCHES)
    Batch.update(registered_at=db.now() - timedelta(hours=1)).execute()


# Redis


@whole_only
def test_noise_in_every_key_stops_nothing_but_itself(database, settings, main):
    @few
    @hypothesis.given(NOISE, st.sampled_from(READING))
    def claim(noise, command):
        begin_anew(database)
        put_noise(noise)
        send_children(broker, None, CHILDREN[CHILD], [("good", (7,))], limit_depth=None)
        register.prepare(client, "artifacts", "good")

        assert failed_collectors(settings) == []
        read_by(main, command)
        in_a_thread(partial(reconcile, settings))
        run = JobRun.find_open("git_ref_cleanup")
        assert {"good", str(run.id)} <= set(in_a_thread(consume))
        buckets.tidy(client, 5)
        assert buckets.claim(client, 5) is not None
        client.zadd(register.keys.pending, {"artifacts:good": 0}, xx=True)
        claimed = register.claim(client, visibility=timedelta(minutes=5), limit=1_000)
        assert "artifacts:good" in [entry.member for entry in claimed.entries]
        for entry in claimed.entries:
            register.record_failure(client, claimed, entry)

    claim()


@whole_only
def test_a_key_of_another_type_ends_nothing_and_is_named(database, settings, main):
    @few
    @hypothesis.given(
        st.sampled_from(sorted(set(KEYS) - {"forgekeeper:installation", "pending_direct_uploads"})),
        st.sampled_from(TYPES),
        st.sampled_from(READING),
    )
    def claim(name, kind, command):
        hypothesis.assume(kind != KEYS[name])
        begin_anew(database)
        put(name, kind, [(b"member", b"value", 1.0)])

        in_a_thread(partial(reconcile, settings))
        in_a_thread(consume)
        failed_collectors(settings)
        read_by(main, command)
        (said,) = redis_values.find_wrong_types(client, {name: KEYS[name]})
        assert said.startswith(f"the key {name} is a {kind}, but must be a {KEYS[name]}: ")

    claim()


def test_check_names_a_key_of_another_type(database, main):
    client.set(register.keys.pending, "x")

    findings = main("check", "--json").json["findings"]

    (said,) = [one["message"] for one in findings if "the key" in one["message"]]
    assert said.startswith("the key {pending_direct_uploads}:pending is a string, but must be a zset")


# PostgreSQL


def columns():
    found = db.database.execute_sql(
        "select table_name, column_name, data_type, is_nullable = 'YES' from information_schema.columns"
        " where table_schema in ('public', 'forgekeeper') and is_identity = 'NO' and table_name = any(%s) order by 1, 2",
        (TABLES,),
    ).fetchall()
    of_table = {}
    for table, column, kind, nullable in found:
        of_table.setdefault(table, {})[column] = _of_column(column, kind, nullable=nullable)
    return of_table


def _of_column(column, kind, *, nullable):
    values = {"jsonb": DOCUMENTS, "text": TEXTS, "boolean": st.booleans()}
    values |= {"timestamp with time zone": INSTANTS, "date": DAYS, "ARRAY": ARRAYS}
    chosen = OF_KIND.get(column, values.get(kind, NUMBERS))
    return st.none() | chosen if nullable else chosen


@whole_only
def test_noise_in_every_column_ends_nothing(database, settings, main):
    rows = st.fixed_dictionaries(
        {table: st.lists(st.fixed_dictionaries(each), min_size=1, max_size=6) for table, each in columns().items()}
    )

    @few
    @hypothesis.given(rows, st.sampled_from(READING))
    def claim(noise, command):
        client.flushdb()
        empty()
        for table, lines in noise.items():
            for line in lines:
                insert(table, line)

        in_a_thread(partial(reconcile, settings))
        failed_collectors(settings)
        read_by(main, command)

    claim()


def insert(table, line):
    """Insert the row, unless the table itself refuses it."""
    marks = ", ".join(["%s"] * len(line))
    with suppress(pw.PeeweeException), db.database.atomic():
        db.database.execute_sql(f"insert into {table} ({', '.join(line)}) values ({marks})", list(line.values()))


@pytest.mark.parametrize("score", [float("inf"), float("-inf"), -5, 1e300])
def test_an_adopted_upload_of_no_known_day_is_still_an_adopted_one(database, score):
    """It is kept whenever its object was written since: here, ever."""
    client.zadd(register.keys.deleting, {"artifacts:one": 1})
    client.zadd(register.keys.adopted, {"artifacts:one": score})

    claimed = register.claim(client, visibility=timedelta(minutes=5), limit=10)

    assert [entry.adopted_at for entry in claimed.entries] == [0]


def test_leases_are_listed_whatever_lies_beside_them(database):
    with hold_lease(client, "clean_project_refs:1", ttl=timedelta(minutes=1), holder="me"):
        client.mset(
            {f"{locks.LEASE_KEY_PREFIX}for ever": "x", locks.LEASE_KEY_PREFIX.encode() + b"\xff": b"\xff \xff \xff"}
        )
        client.rpush(f"{locks.LEASE_KEY_PREFIX}a list", "x")
        found = locks.list_leases(client)

    assert {one.name: one.holder for one in found} == {"clean_project_refs:1": "me", "for ever": "", "\udcff": "\udcff"}
    assert locks.break_lease(client, "\udcff")
