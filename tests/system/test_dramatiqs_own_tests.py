"""Dramatiq's own tests of its Redis broker and of its worker, run against what `forgekeeper worker` uses.

They come with Dramatiq's source distribution, which is fetched by the hash in our lock file: nothing of it is kept
here.  Where there is no way to the package index these tests are skipped; under CI they are not.
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
LIMIT = 240
TRIES = 3
"""Some of them measure time: one that fails when the machine is busy is asked again."""
FILES = ("test_redis.py", "test_worker.py")


@pytest.fixture
def theirs(tmp_path):
    """A package of Dramatiq's tests, as they are, with what they import of Dramatiq's helpers."""
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "common.py").write_text("from tests.system.dramatiq_fixtures import worker\n")
    with tarfile.open(_source(tmp_path)) as source:
        for member in source.getmembers():
            if member.name.endswith(tuple(f"/tests/{name}" for name in FILES)):
                (package / Path(member.name).name).write_bytes(source.extractfile(member).read())
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


def run(theirs, urls, names):
    """Run them; return what each said in failing, None for one that passed."""
    environment = {"PYTHONPATH": str(ROOT), "OWN_TESTS_REDIS": urls.redis}
    plugins = ["-p", "tests.system.dramatiq_fixtures", "-p", "no:cacheprovider", "-p", "no:cloudcoil"]
    options = ["-q", "-c", os.devnull, "--rootdir", ".", "--junit-xml", "report.xml", "--show-capture", "no"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *plugins, *(names or [theirs.name])],
        cwd=theirs.parent,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert ended.returncode in (0, 1), ended.stdout[-2000:] + ended.stderr[-2000:]
    cases = ET.parse(theirs.parent / "report.xml").iter("testcase")
    return {
        f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}": "\n".join(
            f"{part.get('message')}\n{part.text}" for part in case if part.tag != "skipped"
        )
        for case in cases
    }


def test_all_of_dramatiqs_redis_and_worker_tests_pass(theirs, urls, say):
    found = run(theirs, urls, [])
    for _ in range(TRIES - 1):
        if again := [name for name, said in found.items() if said]:
            found |= run(theirs, urls, again)

    say(f"{len(found)} of Dramatiq {dramatiq.__version__}'s tests pass")
    assert {name: said[-1000:] for name, said in found.items() if said} == {}
    assert len(found) >= 24
