"""Refs are deleted in bulk: exactly those that may go, whatever else is among them."""

import pytest

from forgekeeper.storage.git_refs import DELETED, Doomed, Outcome
from tests.harness.git_samples import Bare, put_root


@pytest.fixture
def root(tmp_path):
    return put_root(tmp_path / "repositories")


@pytest.fixture
def repository(root):
    return Bare(root)


def test_names_that_git_must_not_see_are_rejected_and_keep_no_other(repository):
    repository.loose("refs/a", "refs/z")
    (repository.path / "FETCH_HEAD").write_text(repository.one)
    bad = {
        "HEAD": "not_under_refs",
        "FETCH_HEAD": "not_under_refs",
        "main": "not_under_refs",
        "": "not_under_refs",
        "refs/heads/x\0refs/heads/main": "invalid_name",
        "refs/heads/x\ncreate refs/heads/evil HEAD": "invalid_name",
        "refs/../HEAD": "invalid_name",
        "refs/heads/\udcff": "invalid_name",
        "refs/".ljust(1_025, "x"): "too_long",
    }

    outcomes = repository.delete("refs/a", *bad, "refs/z")

    assert {name: outcomes[Doomed(name)] for name in bad} == {
        name: Outcome("rejected", reason) for name, reason in bad.items()
    }
    assert outcomes[Doomed("refs/a")] == outcomes[Doomed("refs/z")] == DELETED
    assert repository.refs() == {"refs/heads/main": repository.one}
    assert (repository.path / "HEAD").exists()
    assert (repository.path / "FETCH_HEAD").exists()
