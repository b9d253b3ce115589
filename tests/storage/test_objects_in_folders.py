"""Deletion in a local store: a disk can vanish, and a name can lead elsewhere."""

import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import obstore
import pytest

from forgekeeper.storage import sentinel
from forgekeeper.storage.objects import DELETED, LOOKS, MISSING, StoreUnavailable
from tests.harness.installation import INSTALLATION

ROOT = Path(__file__).parents[2]
LIMIT = 60.0

# Uses a store, forks, and lets the child use it, then open it anew.
FORK = """
import os, signal, sys
from forgekeeper.storage.objects import Objects
from forgekeeper.storage.sentinel import Store
url, installation = sys.argv[1:]
parents = Objects("artifacts", url, installation=installation)
parents.delete(["a"])
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
signal.alarm(10)
for use in (lambda: parents.delete(["b"]), lambda: Objects("artifacts", url, installation=""), lambda: Store("artifacts", url)):
    try:
        use()
    except RuntimeError as error:
        print(error, flush=True)
os._exit(0)
"""


def numbered(count):
    return [f"{number % 100:02}/{number:05}" for number in range(count)]


def test_missing_objects_keep_no_other(folder, objects):
    paths = numbered(1_500)
    folder.put(*paths[1::2], "bystander")

    outcomes = objects(folder).delete(paths)

    assert folder.keys() == {"bystander"}
    assert outcomes == dict.fromkeys(paths[::2], MISSING) | dict.fromkeys(paths[1::2], DELETED)


def test_nothing_is_missing_after_the_root_goes_in_the_middle(folder, objects, monkeypatch):
    paths = numbered(2_000)
    folder.put(*paths)
    elsewhere = folder.root.with_name("unmounted")
    delete, asked = obstore.delete_async, count(1)

    def delete_or_unmount(store, path):
        if next(asked) == 1_500:
            folder.root.rename(elsewhere)
        return delete(store, path)

    monkeypatch.setattr(obstore, "delete_async", delete_or_unmount)
    with pytest.raises(StoreUnavailable) as caught:
        objects(folder).delete(paths)
    folder.root = elsewhere

    assert caught.value.known.items() <= dict.fromkeys(set(paths) - folder.keys(), DELETED).items()
    assert len(caught.value.known) >= 1_000


@pytest.mark.parametrize("name", ["outside", "the root-old"])
def test_a_link_that_leads_out_of_the_store_is_not_followed(folder, objects, name):
    outside = folder.root.with_name(name)
    outside.mkdir()
    (outside / "precious").touch()
    (folder.root / "linked").symlink_to(outside)

    outcomes = objects(folder).delete(["linked/precious", "linked/missing"])

    assert (outside / "precious").exists()
    assert {outcome.state for outcome in outcomes.values()} == {"failed"}


def test_a_link_within_a_folder_does_not_lead_out_of_it(folder, objects):
    folder.put("up/a", "backup/precious")
    (folder.root / "up/linked").symlink_to(folder.root / "backup")
    (folder.root / "aside").symlink_to(folder.root / "up")

    outcomes = objects(folder, prefixes=["up"]).delete(["up/linked/precious", "aside/a", "up/a"])

    assert [outcome.state for outcome in outcomes.values()] == ["failed", "failed", "deleted"]
    assert (folder.root / "backup/precious").exists()


def test_an_object_that_is_a_link_goes_without_what_it_leads_to(folder, objects, tmp_path):
    (tmp_path / "precious").touch()
    (folder.root / "a").symlink_to(tmp_path / "precious")

    objects(folder).delete(["a"])

    assert folder.keys() == set()
    assert (tmp_path / "precious").exists()


def test_a_forked_child_is_told_instead_of_left_hanging(folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    child = subprocess.run(
        [sys.executable, "-c", FORK, folder.url, INSTALLATION],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )

    assert child.returncode == 0, child.stderr
    assert child.stdout.count("before it forked") == 3


def test_objects_that_are_there_are_told_from_those_that_are_not(store, objects):
    paths = [f"a/{number}" for number in range(2 * LOOKS + 1)]
    store.put(*paths[::2])

    assert objects(store).present(paths) == {path: number % 2 == 0 for number, path in enumerate(paths)}


@pytest.mark.parametrize("content", [None, sentinel.text("d15c0")], ids=["no sentinel", "another's"])
def test_without_our_sentinel_nothing_is_believed_to_be_gone(store, objects, content):
    store.remove_sentinel() if content is None else store.write_sentinel(content)

    with pytest.raises(StoreUnavailable):
        objects(store).present(["a"])
