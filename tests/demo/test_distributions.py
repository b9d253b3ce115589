"""`make dist` builds the same sdist and the same wheel each time, whoever builds them."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.harness.thorough import whole_only

pytestmark = whole_only

ROOT = Path(__file__).parents[2]


def build(folder, *, umask, **environment):
    """Build with temporary files in *folder*; return the paths of the sdist and the wheel."""
    folder.mkdir()
    command = (ROOT / ".ci" / "distributions", sys.executable, folder / "dist")
    environment = {**os.environ, "TMPDIR": str(folder), **environment}
    done = subprocess.run(command, env=environment, umask=umask, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sdist, wheel = (next((folder / "dist").glob(f"forgekeeper-*{suffix}")) for suffix in (".tar.gz", ".whl"))
    return sdist, wheel


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return build(tmp_path_factory.mktemp("first") / "here", umask=0o022)


def test_two_builds_of_a_commit_are_equal_byte_for_byte(first, tmp_path):
    second = build(tmp_path / "another_place", umask=0o077, TZ="Asia/Tokyo", LC_ALL="C.UTF-8", SOURCE_DATE_EPOCH="1")

    for one, other in zip(first, second, strict=True):
        assert (one.name, one.read_bytes()) == (other.name, other.read_bytes())


def test_the_files_have_the_time_of_the_commit_and_no_name_of_a_user(first):
    sdist, wheel = first
    committed = int(subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT))

    with tarfile.open(sdist) as archive:
        facts = {(member.mtime, member.uid, member.gid, member.uname, member.gname) for member in archive}
    with zipfile.ZipFile(wheel) as archive:
        days = {member.date_time[:3] for member in archive.infolist()}

    assert facts == {(committed, 0, 0, "", "")}
    assert len(days) == 1
