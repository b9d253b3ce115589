"""The wheel: it holds the product and nothing else, and works alone, far from the checkout."""

import json
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from importlib.metadata import PathDistribution
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from build import ProjectBuilder
from build.env import DefaultIsolatedEnv
from packaging.version import Version
from pyproject_hooks import quiet_subprocess_runner

from forgekeeper.platform.settings import PREFIX
from tests.harness.thorough import whole_only
from tests.harness.traps import OURS

pytestmark = whole_only

ROOT = Path(__file__).parents[2]
PRODUCT = {name if (ROOT / name).is_dir() else f"{name}.py" for name in OURS}


@pytest.fixture(scope="module")
def building():
    """Make the environment in which `python -m build` builds, once for all; return what builds a tree in it."""
    with DefaultIsolatedEnv() as environment:
        environment.install(ProjectBuilder(ROOT).build_system_requires)
        yield lambda tree: ProjectBuilder.from_isolated_env(environment, tree, runner=quiet_subprocess_runner)


@pytest.fixture(scope="module")
def wheel(building, tmp_path_factory):
    """A wheel, built from what git would commit."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in listed.split("\0"):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    return building(tree).build("wheel", out)


@pytest.fixture
def forgekeeper(wheel, urls, new_database, tmp_path):
    """Run the command, installed with what it asks for, on a database of its own, far from the checkout."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path, cwd=tmp_path)
    pip = (sys.executable, "-m", "pip", "--python", tmp_path / "bin" / "python", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-compile", wheel, cwd=tmp_path)
    settings = {PREFIX + "DATABASE_URL": new_database(), PREFIX + "REDIS_URL": urls.redis}
    return partial(run, "forgekeeper", cwd=tmp_path, env={"PATH": str(tmp_path / "bin"), **settings})


def run(*command, **options):
    """Run a program to its end; return what it prints, fail with everything it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_every_file_of_the_product_and_nothing_else(wheel):
    paths = {path for top in PRODUCT for path in (ROOT / top, *(ROOT / top).rglob("*"))}
    files = {str(path.relative_to(ROOT)) for path in paths if path.is_file() and path.suffix != ".pyc"}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    assert {top for name in names if not (top := name.split("/")[0]).endswith(".dist-info")} == PRODUCT
    assert files - names == set()


def test_the_wheel_holds_the_runbooks_as_they_are_in_the_documentation(wheel):
    runbooks = {f"metrics/runbooks/{page.name}": page.read_bytes() for page in (ROOT / "docs" / "runbooks").iterdir()}
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if name.startswith("metrics/runbooks/")}

    assert held == runbooks


def commit(clone):
    run("git", "-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "--allow-empty", "-m", "m", cwd=clone)


def test_each_commit_makes_a_newer_version_a_tag_is_the_version_and_building_writes_none(building, tmp_path):
    clone = tmp_path / "clone"

    def version_of(tree):
        with TemporaryDirectory(dir=tmp_path) as folder:
            return Version(PathDistribution(Path(building(tree).metadata_path(folder))).version)

    run("git", "clone", "-q", "--no-tags", ROOT, clone)
    versions = [version_of(clone)]
    commit(clone)
    versions.append(version_of(clone))
    run("git", "tag", "v7.0.0", cwd=clone)
    versions.append(version_of(clone))
    commit(clone)
    versions.append(version_of(clone))

    assert Version("0.2.0") < versions[0] < versions[1] < versions[2] == Version("7.0.0") < versions[3]
    assert run("git", "status", "--porcelain", cwd=clone) == ""


def test_a_batch_runs_and_is_sent(forgekeeper):
    applied = forgekeeper("migrate")
    seeded = json.loads(forgekeeper("seed", "--json"))
    forgekeeper("release", "user_status_cleanup", "--reason", "I looked")

    result = json.loads(forgekeeper("run", "user_status_cleanup", "--json"))
    sent = json.loads(forgekeeper("send", "user_status_cleanup", "--json"))

    assert "0001_ledger" in applied
    assert result["deleted"] == seeded["user_statuses"]["due"] > 0
    assert sent["skipped"] is None
