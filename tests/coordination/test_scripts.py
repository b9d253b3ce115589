"""The scripts are read when a process starts, whole or not at all."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from forgekeeper import scripts
from tests.harness.programs import eventually

ROOT = Path(__file__).parents[2]
WITHOUT_FILES = """
import sys
from forgekeeper.delivery.queues import actor_of
from forgekeeper.boot import load
from forgekeeper.connections import Limits
from forgekeeper.connections import client
from forgekeeper.connections import connect
from forgekeeper.delivery.deliveries import Deliveries

def refuse(event, arguments):
    if event == "open":
        raise OSError(24, "Too many open files", arguments[0])

settings = load()
connect(settings, Limits.of_worker(settings), name="test", connections=1)
client.ping()
sys.addaudithook(refuse)
deliveries = Deliveries(client, "scripts", "me")
print(deliveries.enqueue("q", "1", b"body"), deliveries.fetch("q", limit=1)[0].id, deliveries.ack("q", "1"))
"""


def test_a_process_that_has_connected_opens_no_file_to_take_a_step(database):
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_FILES], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )

    assert (ended.stdout.strip(), ended.stderr) == ("True b'1' True", "")


@pytest.mark.parametrize("left", [0, 300])
def test_a_script_of_which_a_part_is_missing_is_refused(tmp_path, monkeypatch, left):
    shutil.copytree(str(scripts.FOLDERS[1]), tmp_path / "lua")
    script = tmp_path / "lua" / "worker_heartbeat.lua"
    script.write_text(script.read_text()[:left])
    monkeypatch.setattr(scripts, "FOLDERS", [tmp_path / "lua"])
    scripts._script.cache_clear()

    with pytest.raises(OSError, match="the script is not whole") as refused:
        scripts.load()

    scripts._script.cache_clear()
    assert refused.value.filename == str(script)


@pytest.fixture
def lonely(urls):
    """A client that has one connection, and misses it soon."""
    pool = redis.BlockingConnectionPool.from_url(urls.redis, max_connections=1, timeout=1)
    client = redis.Redis(connection_pool=pool)
    client.flushdb()
    yield client
    pool.disconnect()


def heartbeat(client):
    return scripts.ask(client, "worker_heartbeat", keys=["beats"], args=["me"])


def test_what_is_asked_for_is_done_while_the_caller_does_something_else(lonely, urls):
    heartbeat(lonely)()  # from here on the server knows it
    lonely.delete("beats")

    answer = heartbeat(lonely)

    with redis.Redis.from_url(urls.redis) as other:
        eventually(lambda: other.zcard("beats") == 1)
    assert answer() == 1
    assert lonely.ping()


def test_a_server_that_has_forgotten_what_is_asked_for_is_taught_it_again(lonely):
    lonely.script_flush()

    assert heartbeat(lonely)() == 1


def test_an_error_of_what_is_asked_for_names_the_key_and_costs_no_connection(lonely):
    lonely.set("beats", "not ours")

    # Who names it needs the one connection, too.
    with pytest.raises(redis.ResponseError, match=r"WRONGTYPE .*beats"):
        heartbeat(lonely)()

    assert lonely.ping()
