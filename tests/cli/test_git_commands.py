"""Ref deletions and leases from the command line."""

from datetime import timedelta

import pytest

from demo import git_repositories
from forgekeeper.connections import client
from forgekeeper.coordination.leases import LeaseLost, lease
from models import DeletionStatus, GitRefDeletion, Project

MINUTE = timedelta(minutes=1)

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def held():
    with lease(client, "clean_project_refs:7", ttl=MINUTE, holder="forge-2:77") as held:
        yield held


def statuses():
    return [row.status for row in GitRefDeletion.select().order_by(GitRefDeletion.id)]


# run


def test_a_run_by_hand_deletes_the_refs_of_every_project(main, root):
    for number in (1, 2):
        disk_path = f"group/{number}.git"
        git_repositories.create(root, disk_path, ["refs/keep", "refs/go"])
        Project.create(id=number, disk_path=disk_path)
        GitRefDeletion.create(project_id=number, ref="refs/go")

    result = main("run", "git_ref_cleanup", "--json")

    assert (result.status, result.json["total_projects"], git_repositories.count_refs(root)) == (0, 2, 4)
    assert [child["total_deletes"] for child in result.json["children"]] == [1, 1]


def test_a_repository_in_which_git_fails_keeps_no_other_from_its_turn(main, root):
    for number in (1, 2):
        git_repositories.create(root, f"{number}.git", ["refs/go"])
        Project.create(id=number, disk_path=f"{number}.git")
        GitRefDeletion.create(project_id=number, ref="refs/go")
    (root / "1.git" / "packed-refs").write_text("nonsense\n")

    result = main("run", "git_ref_cleanup")

    assert result.status == 1
    assert "1 of 2 children failed, the first clean_project_refs:1" in result.sentences[-1]
    assert statuses() == [DeletionStatus.PENDING, DeletionStatus.PROCESSED]


def test_what_a_run_had_sent_before_it_failed_is_worked_on_by_hand_too(main, root):
    git_repositories.create(root, "1.git", ["refs/go"])
    for number in range(1, 5):
        Project.create(id=number, disk_path=f"{number}.git")
        GitRefDeletion.create(project_id=number, ref="refs/go")

    result = main("run", "git_ref_cleanup")

    assert (result.status, statuses()) == (1, [DeletionStatus.PROCESSED, *[DeletionStatus.PENDING] * 3])
    assert "3 of 4 projects have no repository" in result.sentences[-1]


# leases


@pytest.mark.parametrize("command", [["leases"], ["leases", "list"]])
def test_leases_are_listed_with_their_holders(main, held, command):
    result = main(*command)

    assert result.status == 0
    assert "clean_project_refs:7" in result.stdout
    assert "forge-2:77" in result.stdout


def test_a_broken_lease_is_free_and_its_holder_learns_of_it(main, held):
    result = main("leases", "break", "clean_project_refs:7")

    assert (result.status, main("leases", "list", "--json").json) == (0, {"leases": []})
    with pytest.raises(LeaseLost):
        held.check()
