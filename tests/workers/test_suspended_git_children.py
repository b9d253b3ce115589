"""A child that was suspended, as when a virtual machine is moved, deletes no ref that it must not delete any more."""

import pytest

from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination.leases import LeaseLost, break_lease
from forgekeeper.platform.database import database as db
from models import DeletionStatus, GitRefDeletion
from tests.harness.git_samples import ALWAYS_IN_TIME, while_git_waits
from tests.harness.ref_deletions import PROJECT, ProjectOutcome, pending, row, rows, statuses
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.usefixtures("database")
LEASE = f"clean_project_refs:{PROJECT}"


@pytest.fixture
def suspended(clean, tmp_path, monkeypatch):
    """Suspend a child's git right before it locks the refs."""

    def connected():
        with db.connection_context():
            return clean()

    return while_git_waits(tmp_path, monkeypatch, connected)


def test_it_deletes_no_branch_that_was_pushed_again_after_another_has_done_its_work(suspended, child, repository):
    rows("refs/mr/1", "refs/mr/2")

    with suspended as it:
        break_lease(client, LEASE)
        assert child().outcome == ProjectOutcome(2, 0, "drained")
        repository.loose("refs/mr/1")  # at the very value that was announced
        repository.loose("refs/mr/2", value=repository.two)

    with pytest.raises(LeaseLost):
        it.result()
    assert {"refs/mr/1": repository.one, "refs/mr/2": repository.two}.items() <= repository.refs().items()


def test_it_deletes_no_ref_whose_row_was_closed(suspended, repository):
    rows("refs/mr/1", "refs/mr/2")

    with suspended as it:
        GitRefDeletion.update(status=DeletionStatus.PROCESSED).where(GitRefDeletion.ref == "refs/mr/2").execute()

    assert it.result() == ProjectOutcome(1, 0, "drained")
    assert ("refs/mr/1" in repository.refs(), "refs/mr/2" in repository.refs()) == (False, True)


def test_a_push_wins_though_no_value_was_expected_and_the_next_child_rejects_the_row_as_moved(
    suspended, child, repository
):
    rows("refs/mr/1", "refs/mr/2")

    with suspended as it:
        repository.loose("refs/mr/1", value=repository.two)

    assert (it.result(), pending()) == (ProjectOutcome(1, 0, "drained"), {"refs/mr/1"})
    assert child().outcome == ProjectOutcome(0, 1, "drained")
    assert (repository.refs()["refs/mr/1"], GitRefDeletion.select_rejected().get().reason) == (repository.two, "moved")


def test_the_value_of_the_first_look_is_the_expected_one_unless_the_row_has_one_or_the_ref_is_symbolic(
    suspended, repository
):
    rows("refs/mr/1", "refs/mr/2", "refs/sym")
    row("refs/mr/3", expected_oid=repository.one.upper())
    repository.loose("refs/sym", value="ref: refs/heads/main")

    one = repository.one

    def has_expected_values():
        expected = {row.ref: row.expected_oid for row in GitRefDeletion.select()}
        return expected == {"refs/mr/1": one, "refs/mr/2": one, "refs/mr/3": one.upper(), "refs/sym": None}

    with suspended as it:
        assert wait_until(has_expected_values, ALWAYS_IN_TIME)

    assert (it.result().total_deletes, set(statuses().values())) == (4, {DeletionStatus.PROCESSED})
