"""What lies in a repository leads no deletion out of it, and what git only reads may lie anywhere."""

import shutil

import pytest

from forgekeeper.targets.git_refs import DEFAULT_BRANCH, REF_DELETED, REF_MISSING, TOO_LONG_TO_LOCK, RefToDelete
from forgekeeper.targets.git_repository import RepositoryFailed
from tests.harness.git_samples import BareRepository, replace_git


@pytest.fixture
def repository(root):
    repository = BareRepository(root)
    repository.loose("refs/heads/a")
    return repository


@pytest.fixture
def other(root):
    """Another repository below the root; it loses nothing."""
    other = BareRepository(root, "group/other.git")
    other.loose("refs/heads/a", "refs/mr/1/a")
    other.packed("refs/heads/packed")
    before = {path: path.read_bytes() for path in other.path.rglob("*") if path.is_file()}
    yield other
    assert {path: path.read_bytes() for path in other.path.rglob("*") if path.is_file()} == before


def put_link(path, target):
    """Put a link to *target* where *path* was."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("link", "target", "ref"),
    [
        ("refs", "refs", "refs/heads/a"),
        ("refs/heads", "refs/heads", "refs/heads/a"),
        ("refs/mr", "refs/heads", "refs/mr/a"),
        # No such ref is there, which says nothing of a ref of this repository.
        ("refs/mr", "refs/heads", "refs/mr/absent"),
        ("refs/x/1", "refs/mr/1", "refs/x/1/a"),
        ("packed-refs", "packed-refs", "refs/heads/packed"),
        ("logs", "", "refs/heads/a"),
        ("logs/refs", "refs", "refs/heads/a"),
        ("logs/refs/heads", "refs/heads", "refs/heads/a"),
        ("logs/HEAD", "HEAD", "refs/heads/a"),
        ("reftable", "", "refs/heads/a"),
    ],
)
def test_a_link_that_git_would_delete_through_is_refused(repository, other, link, target, ref):
    put_link(repository.path / link, other.path / target)

    with pytest.raises(RepositoryFailed, match=f"^{link} is a symbolic link"):
        repository.delete(ref)


def test_refs_that_another_folder_has_are_refused(repository, other):
    (repository.path / "commondir").write_text(f"{other.path}\n")

    with pytest.raises(RepositoryFailed, match="commondir"):
        repository.delete("refs/heads/a", "refs/heads/packed")


@pytest.mark.parametrize("value", ["reftable:///srv/x", "files://x", "\\\n  files:///x", '"files:///x"'])
def test_a_place_of_refs_that_only_a_later_git_knows_is_refused(repository, value):
    with (repository.path / "config").open("a") as config:
        config.write(f"[extensions]\n\tRefStorage = {value}\n")

    with pytest.raises(RepositoryFailed, match=r"extensions\.refStorage"):
        repository.delete("refs/heads/a")


def test_a_link_that_comes_between_look_and_deletion_is_refused(repository, other, tmp_path, monkeypatch):
    repository.leave_format_to_git()
    heads = repository.path / "refs/heads"
    swap = f"rm -rf {heads}; ln -s {other.path}/refs/heads {heads}"
    replace_git(tmp_path / "bin", monkeypatch, f'$GIT "$@"; case "$*" in *rev-parse*) {swap};; esac')

    with pytest.raises(RepositoryFailed, match="refs/heads"):
        repository.delete("refs/heads/a")


def test_a_loose_ref_that_is_a_link_goes_and_what_it_leads_to_stays(repository, other):
    put_link(repository.path / "refs/heads/link", other.path / "refs/heads/a")

    assert repository.states("refs/heads/link") == {"refs/heads/link": "deleted"}
    assert not (repository.path / "refs/heads/link").is_symlink()


def test_what_git_only_reads_may_lie_elsewhere(repository, other):
    put_link(repository.path / "HEAD", "refs/heads/main")
    put_link(repository.path / "objects", other.path / "objects")
    assert repository.delete("refs/heads/a", "refs/heads/main") == {
        RefToDelete("refs/heads/a"): REF_DELETED,
        RefToDelete("refs/heads/main"): DEFAULT_BRANCH,
    }


@pytest.mark.parametrize(
    "config",
    [
        "[core]\n\tfsmonitor = {trap}\n\tsshCommand = {trap}\n\tpager = {trap}\n\teditor = {trap}\n",
        "[core]\n\talternateRefsCommand = {trap}\n\thooksPath = {hooks}\n",
        "[include]\n\tpath = {included}\n",
        '[extensions]\n\tpartialClone = far\n[remote "far"]\n\tpromisor = true\n\turl = ext::{trap}\n',
        "[alias]\n\tupdate-ref = !{trap}\n\tfor-each-ref = !{trap}\n[pager]\n\tfor-each-ref = {trap}\n",
    ],
)
def test_no_program_that_the_repository_names_is_run(repository, tmp_path, config):
    hooks, trap, included = tmp_path / "hooks", tmp_path / "trap", tmp_path / "included"
    hook = "reference-transaction"
    for program in (trap, hooks / hook, repository.path / "hooks" / hook):
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
        program.chmod(0o755)
    included.write_text(f"[core]\n\thooksPath = {hooks}\n\tfsmonitor = {trap}\n")
    repository.loose("refs/heads/lacks", value="1" * 40)
    with (repository.path / "config").open("a") as file:
        file.write(config.format(trap=trap, hooks=hooks, included=included))

    assert repository.states("refs/heads/a", "refs/heads/gone")["refs/heads/a"] == "deleted"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("length", [251, 256])
def test_a_ref_that_is_too_long_for_a_lock_is_rejected_and_keeps_no_other(repository, length):
    names = [f"refs/heads/{'x' * length}", f"refs/heads/{'é' * (length // 2 + 1)}", "refs/heads/" + "y" * 250]
    repository.packed(*names)
    long, letters, fits = map(RefToDelete, names)

    outcomes = repository.delete(long, letters, fits, "refs/heads/" + "z" * length)

    assert [outcomes[one] for one in (long, letters, fits)] == [TOO_LONG_TO_LOCK, TOO_LONG_TO_LOCK, REF_DELETED]
    assert outcomes[RefToDelete("refs/heads/" + "z" * length)] == REF_MISSING
    assert set(repository.refs()) == {"refs/heads/a", "refs/heads/main", long.ref, letters.ref}
