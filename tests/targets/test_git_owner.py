"""What git replaces in a repository stays readable for the forge, whoever deletes the ref."""

import os
import stat
import time
from contextlib import contextmanager

import pytest

from forgekeeper.cli.check_places import check_repositories
from forgekeeper.targets import git_restore
from forgekeeper.targets.git_repository import RepositoryFailed
from models import Project
from tests.harness.git_samples import ALWAYS_IN_TIME, BareRepository, put_root
from tests.harness.installation import INSTALLATION
from tests.harness.settings import settings_with

FORGE, GROUP = 65_533, 65_532
OURS = 65_531

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a repository away")


@pytest.fixture
def repository(fast_folder):
    """A repository of the forge's, below folders that everybody may enter and change."""
    fast_folder.chmod(0o755)
    repository = BareRepository(put_root(fast_folder / "root"))
    repository.packed("refs/a", "refs/b")
    repository.loose("refs/c")
    for path in [repository.path, *repository.path.rglob("*")]:
        os.chown(path, FORGE, GROUP)
        path.chmod(0o777 if path.is_dir() else 0o666)
    return repository


@contextmanager
def user(number, group):
    """Let this process be another user's; and let it make files for itself alone, as the shipped unit does."""
    before = os.umask(0o077)
    os.setegid(group)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.umask(before)


def facts(path):
    found = path.stat()
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


@pytest.mark.parametrize("who", [(0, 0), (FORGE, GROUP)], ids=["root", "owner"])
@pytest.mark.parametrize("mode", [0o664, 0o640, 0o600])
def test_packed_refs_keeps_its_owner_group_and_mode(repository, mode, who):
    packed = repository.path / "packed-refs"
    packed.chmod(mode)

    with user(*who):
        states = repository.states("refs/a")

    assert (states, facts(packed)) == ({"refs/a": "deleted"}, (FORGE, GROUP, mode))


@pytest.mark.parametrize("who", [(0, 0), (FORGE, GROUP)], ids=["root", "owner"])
def test_a_restored_ref_is_one_of_the_forge_s(repository, who):
    (repository.path / "packed-refs").chmod(0o664)
    with user(*who):
        repository.states("refs/b")
        git_restore.restore_missing_refs(
            repository.root,
            repository.disk_path,
            {"refs/new/b": repository.one},
            until=time.monotonic() + ALWAYS_IN_TIME,
        )

    assert facts(repository.path / "refs/new/b") == (FORGE, GROUP, 0o664)
    assert facts(repository.path / "refs/new") == (FORGE, GROUP, 0o775)


def test_a_folder_that_hands_on_its_group_keeps_it(repository):
    repository.path.chmod(0o2777)

    with user(FORGE, OURS):
        assert repository.states("refs/a") == {"refs/a": "deleted"}

    assert facts(repository.path / "packed-refs") == (FORGE, GROUP, 0o666)


@pytest.mark.parametrize("who", [(OURS, GROUP), (FORGE, OURS)], ids=["user", "group"])
def test_a_repository_is_refused_if_its_files_would_change_hands(repository, who):
    said = (
        f"packed-refs belongs to {FORGE}:{GROUP}, .* runs as {who[0]}:{who[1]}: .*; run the worker of the queue git as"
    )

    with user(*who), pytest.raises(RepositoryFailed, match=said):
        repository.delete("refs/a", "refs/c")

    assert {"refs/a", "refs/c"} <= repository.refs().keys()


def test_check_names_a_repository_that_would_be_refused(database, repository):
    Project.create(id=1, disk_path=repository.disk_path)

    with user(OURS, GROUP):
        found = list(check_repositories(settings_with(repositories_root=repository.root), INSTALLATION, init=False))

    assert [one.level for one in found] == ["ok", "error"]
    assert found[1].message.startswith(f"{repository.path}: packed-refs belongs to {FORGE}:{GROUP}")
