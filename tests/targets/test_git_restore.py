"""Refs are restored as they were, and nothing that is there is touched."""

import time

import pytest

from forgekeeper.targets import git_restore
from forgekeeper.targets.git_repository import RepositoryFailed
from tests.harness.git_samples import ALWAYS_IN_TIME, replace_git

NOBODY = "1" * 40


def restore(repository, wanted, **options):
    until = time.monotonic() + ALWAYS_IN_TIME
    return git_restore.restore_missing_refs(repository.root, repository.disk_path, wanted, until=until, **options)


def states(repository, wanted, **options):
    return {ref: outcome.state for ref, outcome in restore(repository, wanted, **options).items()}


def deleted(repository, *names):
    """Delete the refs; return what was said of them before."""
    was = {}
    repository.delete(*names, announce=lambda going: was.update({row.ref: value for row, value in going.items()}))
    assert not set(names) & set(repository.refs())
    return was


def test_a_ref_that_exists_again_is_left(repository):
    names = ["refs/a", "refs/b", "refs/c", "refs/d"]
    repository.loose(*names)
    was = deleted(repository, *names)
    repository.loose("refs/a", value=repository.two)
    repository.loose("refs/b", value="ref: refs/nowhere")
    repository.packed("refs/d")

    outcomes = restore(repository, was)

    assert {ref: outcome.state for ref, outcome in outcomes.items()} == {
        "refs/a": "exists",
        "refs/b": "exists",
        "refs/c": "restored",
        "refs/d": "exists",
    }
    assert repository.refs()["refs/a"] == repository.two


def test_a_ref_pushed_just_before_git_is_asked_is_left(repository, tmp_path, monkeypatch):
    repository.loose("refs/a", "refs/b")
    was = deleted(repository, "refs/a", "refs/b")
    push = f"mkdir -p {repository.path}/refs; echo {repository.two} > {repository.path}/refs/a"
    replace_git(tmp_path / "bin", monkeypatch, f'case "$*" in *update-ref*) {push};; esac; exec $GIT "$@"')

    assert states(repository, was) == {"refs/a": "exists", "refs/b": "restored"}
    assert repository.refs()["refs/a"] == repository.two


def test_what_git_has_pruned_is_said_to_be_lost(repository):
    repository.loose("refs/a", value=repository.two)
    repository.loose("refs/b")
    was = deleted(repository, "refs/a", "refs/b")
    repository.git("reflog", "expire", "--expire=now", "--all")
    repository.git("gc", "--quiet", "--prune=now")

    outcomes = restore(repository, was)

    assert {ref: outcome.state for ref, outcome in outcomes.items()} == {"refs/a": "pruned", "refs/b": "restored"}
    assert "git has deleted the object of the ref" in outcomes["refs/a"].reason


def test_a_dry_run_says_what_could_be_and_writes_nothing(repository):
    repository.packed("refs/b")
    before = set(repository.path.rglob("*"))
    wanted = {"refs/new/a": repository.one, "refs/b": repository.one, "refs/c": NOBODY}

    assert states(repository, wanted, dry_run=True) == {
        "refs/new/a": "would be restored",
        "refs/b": "exists",
        "refs/c": "pruned",
    }
    # Git itself would have made refs/new.
    assert set(repository.path.rglob("*")) == before


def test_nothing_is_written_where_a_link_leads(repository, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (repository.path / "refs/mr").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(RepositoryFailed, match="symbolic link"):
        restore(repository, {"refs/mr/1": repository.one})
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_locked_ref_is_refused_and_keeps_no_other(repository):
    (repository.path / "refs/a.lock").touch()

    assert states(repository, {"refs/a": repository.one, "refs/z": repository.one}) == {
        "refs/a": "refused",
        "refs/z": "restored",
    }
