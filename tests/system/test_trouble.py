"""What the soak calls a fault is one, and is over when it says so."""

import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

import psycopg2
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.harness.waiting import wait_until

from .history import History
from .trouble import FAULTS, HARD, Rig, Servers, rounds

LIMIT = 30.0
SHORT = 0.5
LASTING, PASSING = 2, 1
"""Seeds of a fault that would last for seven seconds by itself, and of one that lasts for two."""
IN_NEED = """
import os, sys
for line in sys.stdin:
    try:
        exec(line)
        print("done", flush=True)
    except (OSError, MemoryError) as error:
        print(type(error).__name__, flush=True)
"""


@pytest.fixture(scope="module")
def servers():
    with ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture
def client(servers):
    with servers.redis(retry=Retry(NoBackoff(), 0)) as client:
        yield client
        client.flushall()


@pytest.fixture
def ask(servers):
    """Ask PostgreSQL, each time in a session of its own, and only for as long as it takes when all is well."""

    def ask(sql):
        connection = psycopg2.connect(servers.database_url, connect_timeout=2)
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(sql)
                return cursor.fetchall() if cursor.description else None
        finally:
            connection.close()

    yield ask
    ask("drop table if exists things")


@pytest.fixture
def rig(servers, tmp_path):
    history = History(tmp_path / "history")
    yield Rig(servers, None, [], history, random.Random(LASTING))
    history.close()


@pytest.fixture
def service():
    """A process that does what it is told, and says what came of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", IN_NEED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def do(line):
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    with process:
        assert do("pass") == "done"
        yield SimpleNamespace(group=lambda: [process.pid], do=do)
        process.stdin.close()


def test_redis_knows_what_it_knew_when_it_was_copied(rig, client):
    client.set("before", 1)
    fault = FAULTS["Redis rolled back"](rig)
    next(fault)
    client.set("after", 1)
    client.delete("before")

    assert next(fault, None) is None

    assert client.keys() == [b"before"]


def test_postgres_knows_what_it_knew_when_it_was_copied(rig, ask):
    ask("create table things as select 1 as number")
    fault = FAULTS["PostgreSQL rolled back"](rig)
    next(fault)
    ask("update things set number = 2")

    assert next(fault, None) is None

    assert ask("select number from things") == [(1,)]


def test_the_history_knows_from_when_to_when_a_server_went_back(rig):
    fault = FAULTS["Redis rolled back"](rig)

    assert list(fault) != []

    assert rig.history.done == Counter({("redis keep", "ok"): 1, ("redis return", "ok"): 1})


def test_on_a_full_disk_redis_refuses_writes_and_nothing_else_until_there_is_room(rig, client):
    fault = FAULTS["disk of Redis full"](rig)
    next(fault)

    def refused():
        try:
            client.set("key", "x" * 20_000)
        except redis.ResponseError as error:
            return "MISCONF" in str(error)
        return False

    assert wait_until(refused, LIMIT)
    assert client.get("other") is None

    assert next(fault, None) is None

    assert wait_until(lambda: not refused(), LIMIT)


def test_a_frozen_redis_answers_nobody_until_it_goes_on(rig, servers):
    fault = FAULTS["Redis frozen"](rig)
    next(fault)

    with pytest.raises(redis.TimeoutError), servers.redis(socket_timeout=SHORT, retry=Retry(NoBackoff(), 0)) as client:
        client.ping()

    next(fault, None)
    with servers.redis() as client:
        assert client.ping()


def test_a_frozen_postgres_answers_nobody_until_it_goes_on(rig, ask):
    fault = FAULTS["PostgreSQL frozen"](rig)
    next(fault)

    with pytest.raises(psycopg2.OperationalError, match="timeout"):
        ask("select 1")

    next(fault, None)
    assert ask("select 1") == [(1,)]


def test_a_frozen_server_goes_on_even_if_nobody_has_time_for_it(rig, client):
    rig.dice = random.Random(PASSING)
    fault = FAULTS["Redis frozen"](rig)
    seconds = next(fault)
    began = time.monotonic()

    assert client.ping()

    assert time.monotonic() - began >= seconds / 2
    fault.close()


@pytest.mark.parametrize(
    ("name", "need", "error"),
    [
        ("descriptors used up", "kept = [os.dup(0) for _ in range(10)]", "OSError"),
        ("memory used up", "kept = bytearray(50_000_000)", "MemoryError"),
        ("data memory used up", "kept = bytearray(50_000_000)", "MemoryError"),
    ],
)
def test_a_process_gets_no_more_than_it_has_until_the_limit_is_lifted(rig, service, name, need, error):
    rig.services.append(service)
    fault = FAULTS[name](rig)
    next(fault)

    assert service.do(need) == error

    assert next(fault, None) is None
    assert service.do(need) == "done"


def test_a_seed_repeats_the_faults_and_each_hard_one_has_its_turn():
    first, again = ([faults for faults, _ in zip(rounds(random.Random(7)), HARD, strict=False)] for _ in range(2))

    assert first == again
    assert {faults[0] for faults in first} == set(HARD)


def test_no_copy_is_left_of_servers_that_went_back(rig, servers):
    list(FAULTS["Redis rolled back"](rig))

    assert [entry for entry in servers.site.folder.iterdir() if entry.suffix == ".kept"] == []
