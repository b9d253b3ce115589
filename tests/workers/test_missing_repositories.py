"""Batch 58 against a real PostgreSQL and Redis, and bare repositories on this machine's disk."""

import pytest

from forgekeeper.ledger.holds import Batch
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.targets import sentinel
from forgekeeper.targets.git_repository import RootUnavailable
from forgekeeper.targets.missing_repositories import RepositoriesMissing
from models import Project
from tests.harness.git_samples import replace_git
from tests.harness.ref_deletions import (
    NAME,
    PROJECT,
    ProjectOutcome,
    count_git_commands,
    list_enqueued_messages,
    list_enqueued_projects,
    pending,
    projects,
    row,
    rows,
)

pytestmark = pytest.mark.usefixtures("database")


def take_away(root, what):
    if what == "the root":
        root.rename(root.with_name("away"))
    elif what == "the root, in whose place an empty one is":
        root.rename(root.with_name("away"))
        root.mkdir()
    else:
        (root / sentinel.SENTINEL_NAME).unlink()
    if what == "the reading of its sentinel":
        # A file that is there, and whose first byte the kernel refuses with an error of input and output.
        (root / sentinel.SENTINEL_NAME).symlink_to("/proc/self/mem")


GONE = ["the root", "the root, in whose place an empty one is", "its sentinel", "the reading of its sentinel"]


@pytest.mark.parametrize("gone", GONE)
def test_without_its_disk_a_run_fails_and_nothing_is_enqueued(parent, root, gone):
    projects(1)
    take_away(root, gone)

    with pytest.raises(RootUnavailable):
        parent()

    assert (JobRun.get().failures, list_enqueued_projects(), len(pending()), Batch.read_position(NAME)) == (1, [], 1, 0)


@pytest.mark.parametrize("gone", ["the repository", "the project"])
def test_of_what_is_gone_the_rows_are_processed_without_git(child, root, tmp_path, monkeypatch, gone):
    if gone == "the repository":
        Project.create(id=PROJECT, disk_path="gone.git")
    rows("refs/mr/1", "HEAD")
    calls = count_git_commands(tmp_path, monkeypatch)

    outcome = child(missing=gone == "the repository").outcome

    assert (outcome, pending(), calls()) == (ProjectOutcome(0, 0, "drained", gone=2), set(), 0)


def test_a_child_that_the_parent_has_not_told_of_it_closes_no_row_of_a_missing_repository(child):
    Project.create(id=PROJECT, disk_path="gone.git")
    row("refs/mr/1")

    outcome = child().outcome

    assert (outcome, pending()) == (ProjectOutcome(0, 0, "missing"), {"refs/mr/1"})


def repositories(root, count, *, missing):
    """Let so many projects have pending rows, and all but the first *missing* of them a repository."""
    projects(count)
    for number in range(1, count + 1):
        Project.create(id=number, disk_path=f"{number}.git")
        if number > missing:
            (root / f"{number}.git").mkdir()


def believed_missing():
    """The projects whose children were told that their repositories are missing."""
    calls = [call for message in list_enqueued_messages() for call in message]
    return {number for number, *missing in calls if missing == [True]}


@pytest.mark.parametrize(("count", "missing"), [(2, 2), (60, 3)], ids=["two of two", "three of sixty"])
def test_few_missing_repositories_are_believed_to_be_gone(parent, root, count, missing):
    repositories(root, count, missing=missing)

    run = parent()

    assert believed_missing() == set(range(1, missing + 1))
    assert (run.result["total_projects"], run.result["missing_repositories"]) == (count, missing)


@pytest.mark.parametrize(("count", "missing"), [(5, 3), (60, 4)], ids=["three of five", "four of sixty"])
def test_more_than_a_share_of_missing_repositories_is_not_believed(parent, root, count, missing):
    repositories(root, count, missing=missing)

    with pytest.raises(RepositoriesMissing, match=f"{missing} of {count} projects"):
        parent()

    assert (believed_missing(), len(list_enqueued_projects())) == (set(), count - missing)


def test_whoever_knows_that_they_are_gone_can_say_so(parent, root):
    repositories(root, 5, missing=3)

    parent(missing_repositories=1.0)

    assert believed_missing() == {1, 2, 3}


@pytest.mark.parametrize(
    ("there", "named"), [("x.git", "x"), ("x", "x.git")], ids=["lacks its .git", "has a .git too much"]
)
def test_a_path_that_is_spelt_otherwise_than_its_folder_is_not_believed_to_be_missing(parent, root, there, named):
    repositories(root, 3, missing=0)
    (root / there).mkdir()
    Project.update(disk_path=named).where(Project.id == 2).execute()

    with pytest.raises(RepositoriesMissing, match=f"project 2 has no repository at {named}, but .* at {there}:"):
        parent()

    assert list_enqueued_projects() == [1, 3]


@pytest.mark.parametrize("project", ["there", "gone"])
@pytest.mark.parametrize("gone", GONE)
def test_without_the_disk_no_row_is_consumed(child, repository, root, gone, project):
    row("refs/mr/1")
    if project == "gone":
        Project.delete().execute()
    take_away(root, gone)

    with pytest.raises(RootUnavailable):
        child()

    assert pending() == {"refs/mr/1"}


@pytest.mark.parametrize("command", ["for-each-ref", "update-ref"])
def test_a_disk_that_vanishes_while_git_is_at_work_costs_no_row(child, repository, tmp_path, monkeypatch, command):
    rows("refs/mr/1", "refs/gone")
    vanish = f'case "$*" in *{command}*) mv {repository.root} {tmp_path}/away;; esac'
    replace_git(tmp_path / "bin", monkeypatch, f'{vanish}\nexec $GIT "$@"')

    with pytest.raises(RootUnavailable):
        child()

    assert pending() == {"refs/mr/1", "refs/gone"}
