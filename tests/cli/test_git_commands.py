"""Refs: deleted by a run by hand, by children that may fail, and restored; and leases."""

import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest

from demo.sample_data import count_refs, create_repository
from forgekeeper.api.batches import CHILDREN
from forgekeeper.audit.acts import Act
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination.leases import LeaseLost
from forgekeeper.targets import sentinel
from models import DeletionStatus, GitRefDeletion, Project
from tests.harness.git_samples import BareRepository, replace_git
from tests.harness.leases import hold_lease
from tests.harness.performing import perform, run_as_worker, run_child, runner_of
from tests.harness.programs import LIMIT, eventually
from tests.harness.settings import settings_with
from tests.harness.thorough import whole_only
from tests.harness.waiting import scale_timeout
from workers.git_ref_cleanup import clean_project_refs
from workers.git_ref_cleanup import git_ref_cleanup as batch

MINUTE = timedelta(minutes=1)
NAME = "git_ref_cleanup"
CHILD = "clean_project_refs:1"

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def held():
    with hold_lease(client, "clean_project_refs:7", ttl=MINUTE, holder="forge-2:77") as held:
        yield held


@pytest.fixture
def fix(root):
    """Two projects with a ref to delete; git fails in the repository of the first until this is called."""
    for number in (1, 2):
        create_repository(root, f"{number}.git", ["refs/go"])
        Project.create(id=number, disk_path=f"{number}.git")
        GitRefDeletion.create(project_id=number, ref="refs/go")
    packed = root / "1.git" / "packed-refs"
    whole = packed.read_text()
    packed.write_text("nonsense\n")
    return lambda: packed.write_text(whole)


def statuses():
    return [row.status for row in GitRefDeletion.select().order_by(GitRefDeletion.id)]


# run


def test_a_run_by_hand_deletes_the_refs_of_every_project(main, root):
    for number in (1, 2):
        disk_path = f"group/{number}.git"
        create_repository(root, disk_path, ["refs/keep", "refs/go"])
        Project.create(id=number, disk_path=disk_path)
        GitRefDeletion.create(project_id=number, ref="refs/go")

    result = main("run", NAME, "--json")

    assert (result.status, result.json["total_projects"], count_refs(root)) == (0, 2, 4)
    assert [child["total_deletes"] for child in result.json["children"]] == [1, 1]


def test_a_repository_in_which_git_fails_keeps_no_other_from_its_turn(main, fix):
    result = main("run", NAME)

    assert result.status == 1
    assert "1 of 2 children failed, the first clean_project_refs:1" in result.sentences[-1]
    assert statuses() == [DeletionStatus.PENDING, DeletionStatus.PROCESSED]


def test_what_a_run_had_sent_before_it_failed_is_worked_on_by_hand_too(main, root):
    create_repository(root, "1.git", ["refs/go"])
    for number in range(1, 5):
        Project.create(id=number, disk_path=f"{number}.git")
        GitRefDeletion.create(project_id=number, ref="refs/go")

    result = main("run", NAME)

    assert (result.status, statuses()) == (1, [DeletionStatus.PROCESSED, *[DeletionStatus.PENDING] * 3])
    assert "3 of 4 projects have no repository" in result.sentences[-1]


# It cleans up at SIGTERM alone, and lets nobody wait for it where nobody sends one.
HANGING = """
case "$*" in *update-ref*)
    trap 'touch {folder}/cleaned; exit 143' TERM
    touch {folder}/begun
    while [ -e /proc/$PPID ]; do sleep 0.05; done; exit 1
esac
exec $GIT "$@"
"""


@whole_only
def test_a_run_that_is_interrupted_twice_among_its_children_ends_git_with_itself(
    environment, root, tmp_path, monkeypatch
):
    create_repository(root, "1.git", ["refs/go"])
    Project.create(id=1, disk_path="1.git")
    GitRefDeletion.create(project_id=1, ref="refs/go")
    replace_git(tmp_path / "bin", monkeypatch, HANGING.format(folder=tmp_path))
    running = subprocess.Popen(
        [sys.executable, "-m", "forgekeeper.cli", "run", NAME], env=environment(), stderr=subprocess.DEVNULL
    )
    eventually((tmp_path / "begun").exists)

    # Two of one kind may come as one, and these in either order.
    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGTERM)

    assert running.wait(scale_timeout(LIMIT)) in {128 + signal.SIGINT, 128 + signal.SIGTERM}
    eventually((tmp_path / "cleaned").exists)


# children that fail


@pytest.fixture
def failed(fix):
    """A run that has sent both children, of which the first has failed."""
    run = run_as_worker(batch, settings_with())
    assert work_on(run.id).error is not None
    return run


def work_on(run):
    with runner_of(settings_with()) as runner:
        return run_child(runner, clean_project_refs, CHILD, 1, run=run)


def test_a_child_that_fails_is_there_with_its_run_and_error_and_counted(failed):
    first = Quarantined.get()
    work_on(failed.id)

    row = Quarantined.get()
    assert (row.batch, row.record, row.key, row.run) == (NAME, "clean_project_refs", CHILD, failed.id)
    assert (row.reason, row.failures, row.since) == ("child_failed", 2, first.since)
    assert "nonsense" in row.error or "RepositoryFailed" in row.error


def test_a_child_that_ends_well_is_forgotten(failed, fix):
    fix()
    assert work_on(failed.id).error is None

    assert Quarantined.select().count() == 0


def test_a_child_whose_batch_was_stopped_has_not_shown_that_it_works(failed, fix, main):
    fix()
    main("stop", NAME, "--reason", "a test")
    work_on(failed.id)

    assert Quarantined.select().count() == 1


@whole_only
def test_status_and_why_say_at_once_that_a_child_fails_also_when_redis_was_emptied(failed, main):
    client.flushdb()

    facts, shown = main("status", "--json").json, main("status").stdout
    why, story = main("why", str(failed.id), "--json").json, main("why", NAME).stdout

    said = f"{NAME}: 1 child is failing; "
    assert (facts["batches"][NAME]["children_failing"], why["children_failing"]) == (1, 1)
    assert facts["warnings"][0].startswith(said)
    assert f"\n{said}" in story
    line = next(line for line in shown.partition("last run of")[2].splitlines() if line.startswith(NAME))
    assert (" failing " in line, " succeeded " in line) == (True, False)


# leases


def test_leases_are_listed_with_their_holders(main, held):
    result = main("leases")

    assert result.status == 0
    assert "clean_project_refs:7" in result.stdout
    assert "forge-2:77" in result.stdout


def test_a_broken_lease_is_free_and_its_holder_learns_of_it(main, held):
    result = main("leases", "break", "clean_project_refs:7")

    assert (result.status, main("leases", "list", "--json").json) == (0, {"leases": []})
    with pytest.raises(LeaseLost):
        held.check()


# restored


@pytest.fixture
def repository(root):
    """The repository of project 7: of its refs a, b and keep the first two were deleted, a packed, b loose."""
    repository = BareRepository(root)
    repository.packed("refs/a", "refs/keep")
    repository.loose("refs/b", value=repository.two)
    Project.create(id=7, disk_path=repository.disk_path)
    delete(7, "refs/a", "refs/b")
    return repository


def delete(project, *refs):
    """Let the batch delete refs; return the ids of their rows."""
    rows = [GitRefDeletion.create(project_id=project, ref=ref).id for ref in refs]
    perform(clean_project_refs, project, settings=settings_with(), number=17)
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


def test_an_id_by_which_two_batches_have_deleted_refs_restores_none(main, repository, monkeypatch):
    monkeypatch.setitem(CHILDREN, "another", clean_project_refs)

    result = main("refs", "restore", numbers()[0])

    assert (result.status, "several batches have deleted a ref" in result.stderr) == (1, True)
    assert "refs/a" not in repository.refs()


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
    assert result.complaint.startswith("the audit has no deleted ref for 998, 999; ")


def test_the_refs_of_a_run_are_restored_and_one_that_it_deleted_twice_as_it_was_last(main, repository):
    repository.loose("refs/a", value=repository.two)
    delete(7, "refs/a")

    assert main("refs", "restore", "--run", "17").status == 0
    assert (repository.refs()["refs/a"], repository.refs()["refs/b"]) == (repository.two, repository.two)


def test_what_was_restored_before_the_disk_went_is_said(main, repository, root, tmp_path, monkeypatch):
    other = BareRepository(root, "group/other.git")
    other.loose("refs/c")
    Project.create(id=8, disk_path=other.disk_path)
    delete(8, "refs/c")
    gone = f'$GIT "$@"; status=$?; rm {root}/{sentinel.SENTINEL_NAME}; exit $status'
    replace_git(tmp_path / "bin", monkeypatch, f'case "$*" in *{other.path}*update-ref*) {gone};; esac; exec $GIT "$@"')

    result = main("refs", "restore", *numbers())

    assert (result.status, "refs/a at" in result.stdout, sentinel.SENTINEL_NAME in result.stderr) == (1, True, True)


def test_nothing_is_restored_unless_the_act_can_be_written(main, repository, refuse_acts):
    result = main("refs", "restore", *numbers())

    assert (result.status, set(repository.refs())) == (1, {"refs/heads/main", "refs/keep"})


LONG = "refs/" + "/".join(["long" * 20] * 10)


@whole_only
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
    assert "--json shows the command" in said
