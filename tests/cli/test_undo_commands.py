"""What was deleted wrongly comes back: refs while git has their objects."""

import os
import subprocess

import pytest

from forgekeeper.audit.acts import Act
from forgekeeper.storage.sentinel import NAME
from models import GitRefDeletion, Project
from tests.harness.git_samples import Bare, stand_in
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from workers.git_ref_cleanup import clean_project_refs

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def repository(root):
    """The repository of project 7: of its refs a, b and keep the first two were deleted, a packed, b loose."""
    repository = Bare(root)
    repository.packed("refs/a", "refs/keep")
    repository.loose("refs/b", value=repository.two)
    Project.create(id=7, disk_path=repository.disk_path)
    delete(7, "refs/a", "refs/b")
    return repository


def delete(project, *refs, run=17):
    """Let the batch delete refs; return the ids of their rows."""
    rows = [GitRefDeletion.create(project_id=project, ref=ref).id for ref in refs]
    perform(clean_project_refs, project, settings=settings_with(), number=run)
    return rows


def numbers():
    return [str(row.id) for row in GitRefDeletion.select().order_by(GitRefDeletion.id)]


def test_refs_are_restored_by_the_ids_of_their_deletions_as_an_act_of_a_person(main, repository):
    result = main("refs", "restore", *numbers())

    (act,) = Act.select()
    assert (result.status, "2 of 2 were restored" in result.stdout) == (0, True)
    assert (repository.refs()["refs/a"], repository.refs()["refs/b"]) == (repository.one, repository.two)
    assert (act.act, act.what, act.batch) == ("refs restore", "project:7", "git_ref_cleanup")
    assert act.after == {"refs": {"refs/a": repository.one, "refs/b": repository.two}}


def test_refs_are_restored_by_the_run_that_deleted_them(main, repository):
    assert main("refs", "restore", "--run", "17").status == 0
    assert {"refs/a", "refs/b"} < set(repository.refs())


def test_what_cannot_be_restored_is_said_and_keeps_no_other(main, repository):
    repository.loose("refs/a", value=repository.two)

    result = main("refs", "restore", *numbers(), "--json")

    assert result.status == 1
    assert [(entry["ref"], entry["state"]) for entry in result.json["entries"]] == [
        ("refs/a", "exists"),
        ("refs/b", "restored"),
    ]
    assert repository.refs()["refs/a"] == repository.two


def test_ids_that_the_audit_does_not_know_are_named_and_nothing_is_restored(main, repository):
    before = repository.refs()

    result = main("refs", "restore", *numbers(), "999", "998")

    assert (result.status, repository.refs()) == (1, before)
    assert result.complaint.startswith("the audit knows of no ref that was deleted for 998, 999; ")


def test_a_ref_that_was_deleted_twice_comes_back_as_it_was_last(main, repository):
    repository.loose("refs/a", value=repository.two)
    delete(7, "refs/a")

    assert main("refs", "restore", "--run", "17").status == 0
    assert repository.refs()["refs/a"] == repository.two


def test_what_was_restored_before_the_disk_went_is_said(main, repository, root, tmp_path, monkeypatch):
    other = Bare(root, "group/other.git")
    other.loose("refs/c")
    Project.create(id=8, disk_path=other.disk_path)
    delete(8, "refs/c")
    gone = f'$GIT "$@"; status=$?; rm {root}/{NAME}; exit $status'
    stand_in(tmp_path / "bin", monkeypatch, f'case "$*" in *{other.path}*update-ref*) {gone};; esac; exec $GIT "$@"')

    result = main("refs", "restore", *numbers())

    assert (result.status, "refs/a at" in result.stdout, NAME in result.stderr) == (1, True, True)


def test_nothing_is_restored_unless_the_act_can_be_written(main, repository, unwritten):
    result = main("refs", "restore", *numbers())

    assert (result.status, set(repository.refs())) == (1, {"refs/heads/main", "refs/keep"})


LONG = "refs/" + "/".join(["long" * 20] * 10)


@pytest.mark.parametrize("ref", ["refs/it's", "refs/$(touch-x)", LONG])
def test_the_command_for_a_symbolic_ref_can_be_copied(main, repository, ref):
    repository.loose(ref, value="ref: refs/keep")
    (number,) = delete(7, ref)

    result = main("refs", "restore", str(number))
    (command,) = [line for line in result.stdout.splitlines() if line.lstrip().startswith("git ")]
    subprocess.run(["bash", "-c", command], env=os.environ | {"GIT_DIR": str(repository.path)}, check=True)

    assert repository.refs()[ref] == "ref: refs/keep"


def test_what_a_terminal_may_obey_is_not_printed(main, repository):
    repository.loose("refs/\u200f\u2028", value="ref: refs/keep")
    (number,) = delete(7, "refs/\u200f\u2028")

    said = main("refs", "restore", str(number)).stdout

    assert all(line.isprintable() for line in said.splitlines())
    assert "--json has the command" in said
