"""The scripts are read when a process starts, whole or not at all."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forgekeeper import scripts

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
