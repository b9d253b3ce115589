"""The scripts are read when a process starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from forgekeeper.connections import client
from forgekeeper.coordination.key_types import misfits

ROOT = Path(__file__).parents[2]
WITHOUT_FILES = """
import sys
from datetime import timedelta
from forgekeeper.boot import load
from forgekeeper.connections import Limits, client, connect
from forgekeeper.coordination.leases import lease

def refuse(event, arguments):
    if event == "open":
        raise OSError(24, "Too many open files", arguments[0])

settings = load()
connect(settings, Limits.of_worker(settings), name="test", connections=1)
client.ping()
sys.addaudithook(refuse)
with lease(client, "a lease", ttl=timedelta(seconds=10), holder="test") as held:
    held.check()
    print("held")
"""


def test_a_process_that_has_connected_opens_no_file_to_take_a_step(database):
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_FILES], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )

    assert (ended.stdout.strip(), ended.stderr) == ("held", "")


@pytest.mark.usefixtures("database")
def test_a_key_of_another_type_is_named():
    client.set("ours", "another program's")

    (said,) = misfits(client, {"ours": "hash", "missing": "set"})

    assert said.startswith("the key ours is a string, and has to be a hash: another program has written it")
