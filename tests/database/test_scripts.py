"""The scripts are read when a process starts, whole or not at all."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forgekeeper.connections import client
from forgekeeper.coordination import scripts
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


@pytest.mark.parametrize("left", [0, 300])
def test_a_script_of_which_a_part_is_missing_is_refused(tmp_path, monkeypatch, left):
    shutil.copytree(str(scripts.FOLDERS[0]), tmp_path / "lua")
    script = tmp_path / "lua" / "lease_renew.lua"
    script.write_text(script.read_text()[:left])
    monkeypatch.setattr(scripts, "FOLDERS", [tmp_path / "lua"])
    scripts._script.cache_clear()

    with pytest.raises(OSError, match="the script is not whole") as refused:
        scripts.load()

    scripts._script.cache_clear()
    assert refused.value.filename == str(script)


@pytest.mark.usefixtures("database")
def test_a_key_of_another_type_is_named():
    client.set("ours", "another program's")

    (said,) = misfits(client, {"ours": "hash", "missing": "set"})

    assert said.startswith("the key ours is a string, and has to be a hash: another program has written it")
