"""The names of Redis keys: spelled in one place, and each with its type."""

import ast
import re
from pathlib import Path

import pytest
import redis

from forgekeeper.delivery import keys
from forgekeeper.delivery.deliveries import Deliveries

ROOT = Path(__file__).parents[2]
PLACES = ("forgekeeper", "workers", "metrics", "benchmarks", "models.py", "scheduler.py")
SPELLED = re.compile(
    r"__(heartbeats|acks|started)__|\.(msgs|XQ|DQ|starts|reasons)\b|namespace\)?\}:"
    r"|^['\"]?(forgekeeper:|\{\w+\}:)[\w{]"
)
SPELLERS = {
    "forgekeeper/delivery/keys.py",
    "forgekeeper/locks.py",  # its own, in one place
    "workers/expired_job_artifacts/buckets.py",  # those of document 11
    "workers/stale_direct_uploads/register.py",  # those of document 100
}


def texts(path):
    """The strings of a module as they are written, but for its docstrings."""
    tree = ast.parse(path.read_text())
    notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in notes
    ]
    return {ast.unparse(node) for node in found if isinstance(node, ast.JoinedStr) or isinstance(node.value, str)}


def modules():
    paths = [
        path for place in PLACES for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
    ]
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def spelled(module):
    return {text for text in texts(ROOT / module) if SPELLED.search(text)}


def test_no_other_module_spells_a_key():
    found = {module: names for module in modules() if module not in SPELLERS and (names := spelled(module))}

    assert found == {}


@pytest.mark.parametrize("speller", sorted(SPELLERS))
def test_who_spells_keys_is_found_to(speller):
    assert spelled(speller)


def test_every_key_that_a_delivery_leaves_is_listed_and_of_its_type(urls):
    with redis.Redis.from_url(urls.redis) as client:
        client.flushdb()
        client.set(keys.INSTALLATION, "id")
        worker = Deliveries(client, "keys", "me")
        for number in "123456":
            worker.enqueue("q", number, b"body")
        worker.enqueue("q.DQ", "7", b"body")
        dead, later, *_ = worker.fetch("q", limit=3)
        worker.start("q", dead.id, counted=True)
        worker.nack("q", *dead, reason="no")
        worker.retry("q", later, b"later")
        worker.start("q", "3", counted=True)

        found = {name.decode(): client.type(name).decode() for name in client.scan_iter()}

    of_worker = {keys.WorkerKeys("keys", "me").in_hand("q"), keys.WorkerKeys("keys", "me").started("q")}
    # Only a message that waits could be started on a delayed queue, and none is.
    assert {*keys.names("keys", ["q"]), *of_worker} - set(found) == {"keys:q.DQ.starts"}
    assert found == {name: keys.type_of(name) for name in found}
