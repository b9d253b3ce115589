"""Dramatiq's own tests of its Redis broker, run against ours.

They come with Dramatiq's source distribution, which is fetched by the hash in our lock file: nothing of it is kept
here.  Where there is no way to the package index these tests are skipped; under CI they are not.

`OTHERWISE` names the seven that fail by intention (docs/adr/0010-our-own-delivery-scripts.md).  An eighth, or one
of the seven that passes, is news.
"""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree as ET

import dramatiq
import pytest

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "demo.txt"
PATIENCE = 120
TRIES = 3
"""Some of them measure time: one that fails when the machine is busy is asked again."""
OTHERWISE = {
    "test_redis_unacked_messages_can_be_requeued": (
        "wants a dead worker's messages back with anybody's next command, by chance; ours are rescued once it is silent",
        "assert not unacked|assert .* == set()",
    ),
    "test_redis_dead_lettered_messages_are_cleaned_up": (
        "wants dead letters gone after their time with any command, by chance; ours are the prune batch's",
        "assert not",
    ),
    "test_redis_messages_belonging_to_missing_actors_are_rejected": (
        "wants the message of an unknown actor to be a dead letter at once; ours waits for a newer worker, who may know it",
        "Timeout",
    ),
    "test_redis_consumer_ack_can_retry_on_connection_error": (
        "puts a stub in place of `do_ack` and counts its calls; our consumer does without it, for it names the body, too",
        "no attribute 'broker'",
    ),
    "test_redis_consumer_nack_can_retry_on_connection_error": (
        "puts a stub in place of `do_nack` and counts its calls; see above",
        "no attribute 'broker'",
    ),
    "test_redis_consumer_nack_does_not_raise_on_missing_id": (
        "rejects a message that was never fetched; ours takes back only what it has handed out",
        "AssertionError",
    ),
    "test_redis_join_race_condition": (
        "wants the size of a queue to count a message twice while it is in hand; ours counts each once",
        r"\[2, 1, 1, 0\] == \[4, 4, 2, 2\]",
    ),
}
"""Dramatiq's test -> what it asks for and what we do instead, and what its failure says."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A package of Dramatiq's Redis tests, as they are, with what they import of Dramatiq's helpers."""
    folder = tmp_path_factory.mktemp("dramatiq")
    with tarfile.open(_source(folder)) as source:
        (member,) = (one for one in source.getmembers() if one.name.endswith("/tests/test_redis.py"))
        text = source.extractfile(member).read()
    package = folder / "theirs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "common.py").write_text("from tests.system.dramatiq_fixtures import worker\n")
    (package / "test_redis.py").write_bytes(text)
    return package


def _source(folder):
    """Fetch the source of the Dramatiq that is installed."""
    pinned = re.search(rf"^dramatiq=={re.escape(dramatiq.__version__)} (?:.*\\\n)+.*", LOCK.read_text(), re.MULTILINE)
    assert pinned, f"the Dramatiq that is installed, {dramatiq.__version__}, is not the one in {LOCK}"
    (folder / "source.txt").write_text(pinned[0] + "\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--require-hashes"]
    fetched = subprocess.run(
        [*command, "--retries", "2", "--timeout", "10", "-r", "source.txt"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if fetched.returncode and "CI" not in os.environ:
        pytest.skip(f"the source of Dramatiq cannot be fetched: {fetched.stderr.strip()[-300:]}")
    assert fetched.returncode == 0, fetched.stderr
    (source,) = folder.glob("dramatiq-*.tar.gz")
    return source


@pytest.fixture(scope="module")
def failures(theirs, urls):
    """Run them; return what each said in failing, None for one that passed."""
    found = run(theirs, urls, [])
    for _ in range(TRIES - 1):
        if again := [name for name, said in found.items() if said and name not in OTHERWISE]:
            found |= run(theirs, urls, [f"{theirs.name}/test_redis.py::{name}" for name in again])
    return found


def run(theirs, urls, names):
    environment = {"PYTHONPATH": str(ROOT), "OWN_TESTS_REDIS": urls.redis, "HOPELESS": " ".join(OTHERWISE)}
    plugins = ["-p", "tests.system.dramatiq_fixtures", "-p", "no:cacheprovider"]
    options = ["-q", "-c", os.devnull, "--rootdir", ".", "--junit-xml", "report.xml", "--show-capture", "no"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *plugins, *(names or [theirs.name])],
        cwd=theirs.parent,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode in (0, 1), ended.stdout[-2000:] + ended.stderr[-2000:]
    cases = ET.parse(theirs.parent / "report.xml").iter("testcase")
    return {
        case.get("name"): "\n".join(f"{part.get('message')}\n{part.text}" for part in case) or None for case in cases
    }


def test_all_of_dramatiqs_redis_tests_pass_but_for_the_seven_that_we_do_otherwise(failures, say):
    passed = [name for name, said in failures.items() if said is None]

    say(f"{len(passed)} of {len(failures)} of Dramatiq {dramatiq.__version__}'s Redis tests pass; by intention not:")
    say(*(f"  {name}: {why}" for name, (why, _) in OTHERWISE.items()))
    assert {name: said[-1000:] for name, said in failures.items() if said and name not in OTHERWISE} == {}
    assert len(passed) >= 13


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_we_do_otherwise_fails_for_the_reason_that_we_give(failures, name):
    _, sign = OTHERWISE[name]

    assert re.search(sign, failures[name] or "it passed")
