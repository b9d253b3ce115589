"""Batch 58 against a real PostgreSQL and Redis, and bare repositories on this machine's disk."""

from contextlib import contextmanager
from dataclasses import asdict

import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from forgekeeper.delivery.broker import broker
from forgekeeper.engine.repository_children import MAX_PROJECTS_PER_MESSAGE, MAX_REFS_OF_SMALL_PROJECT
from forgekeeper.ledger.holds import Batch
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import now
from models import DeletionStatus, GitRefDeletion
from tests.harness.ref_deletions import (
    NAME,
    QUEUE,
    Outcome,
    list_enqueued_messages,
    list_enqueued_projects,
    pending,
    projects,
    row,
)
from tests.harness.thorough import whole_only
from workers import git_ref_cleanup
from workers.git_ref_cleanup import BATCH_SIZE, MAX_PROJECTS

PENDING, PROCESSED, REJECTED = DeletionStatus
NO_REPOSITORIES = "no repositories are configured; set FORGEKEEPER_REPOSITORIES_ROOT"


pytestmark = pytest.mark.usefixtures("database")


def let_children_finish():
    """Take the children from the queue and close their rows, as if they had run; return whose they were."""
    done = list_enqueued_projects()
    client.delete(QUEUE, f"{QUEUE}.msgs")
    changes = {"status": PROCESSED, "processed_at": now()}
    GitRefDeletion.update(changes).where(GitRefDeletion.project_id.in_(done)).execute()
    return done


@contextmanager
def taken():
    """Have the first child in hand as a worker does, who acknowledges it in the end."""
    consumer = broker.consume("git", prefetch=1, timeout=100)
    message = next(consumer)
    try:
        yield message
    finally:
        consumer.ack(message)


def test_each_project_with_pending_rows_gets_one_child_that_is_told_which(parent):
    projects(3, first=4, each=MAX_REFS_OF_SMALL_PROJECT + 1)
    row(project=9, status=PROCESSED)

    run = parent()

    assert run.result == asdict(Outcome(3, 3))
    with taken() as message:
        facts = (message.actor_name, message.message_id, *message.args)
    assert facts == ("clean_project_refs", "clean_project_refs:4", 4)
    assert list_enqueued_messages() == [[(5,)], [(6,)]]


def test_projects_with_few_pending_rows_share_messages(parent):
    projects(MAX_PROJECTS_PER_MESSAGE + 2, each=MAX_REFS_OF_SMALL_PROJECT)

    run = parent()

    assert run.result == asdict(Outcome(MAX_PROJECTS_PER_MESSAGE + 2, MAX_PROJECTS_PER_MESSAGE + 2))
    assert [len(message) for message in list_enqueued_messages()] == [MAX_PROJECTS_PER_MESSAGE, 2]


@whole_only
def test_beyond_ten_thousand_projects_the_next_run_goes_on_and_counts_those_whose_children_still_wait(parent):
    projects(MAX_PROJECTS + 50)

    runs = [parent().result for _ in range(3)]

    total = {"total_projects": MAX_PROJECTS, "stopped": "max_projects", "missing_repositories": 0}
    assert runs == [
        total | {"enqueued": MAX_PROJECTS, "deduplicated": 0},
        total | {"enqueued": 50, "deduplicated": MAX_PROJECTS - 50},
        total | {"enqueued": 0, "deduplicated": MAX_PROJECTS},
    ]
    assert sorted(list_enqueued_projects()) == list(range(1, MAX_PROJECTS + 51))


def test_nobody_starves_beyond_the_maximum_while_low_ids_keep_getting_new_rows(parent, monkeypatch):
    monkeypatch.setattr(git_ref_cleanup, "MAX_PROJECTS", 10)
    monkeypatch.setattr(git_ref_cleanup, "BATCH_SIZE", 4)
    projects(45)
    reached = []

    for _ in range(6):
        parent()
        reached.append(let_children_finish())
        projects(10)

    # Forty-five in runs of ten: the fifth comes to the end and goes on with the low ones.
    assert [number for run in reached[:5] for number in run][:45] == list(range(1, 46))
    assert reached[4][5:] == [1, 2, 3, 4, 5]
    assert reached[5] == [6, 7, 8, 9, 10, 1, 2, 3, 4, 5]


def test_a_run_goes_round_once_and_no_further(parent):
    projects(5)
    Batch.store_position(NAME, 3)

    run = parent()

    assert (run.result["enqueued"], run.result["deduplicated"], run.result["stopped"]) == (5, 0, "drained")
    assert list_enqueued_projects() == [4, 5, 1, 2, 3]


def test_a_full_queue_gets_no_more_and_the_next_run_goes_on_with_the_first_that_was_left_out(parent):
    projects(4 * BATCH_SIZE)
    full = 3 * BATCH_SIZE
    limit = 2 * BATCH_SIZE // MAX_PROJECTS_PER_MESSAGE + 1
    everyone = [*range(full + 1, 4 * BATCH_SIZE + 1), *range(1, full + 1)]

    first = parent(queue_limit=limit).result
    let_children_finish()
    projects(full)
    second = parent(queue_limit=limit).result

    assert first == asdict(Outcome(full, full, 0, "queue_full"))
    assert second == first
    assert list_enqueued_projects() == everyone[:full]


def test_without_a_folder_of_repositories_a_run_is_blocked_and_says_why(parent):
    projects(1)

    run = parent(repositories_root=None)

    assert (run.state, run.result) == (
        "blocked",
        asdict(Outcome()) | {"skipped": "no_repositories", "blocked": NO_REPOSITORIES},
    )
    assert (list_enqueued_projects(), len(pending())) == ([], 1)


@pytest.mark.parametrize("sign", [".gitaly-metadata", "+gitaly"])
def test_repositories_that_a_git_server_keeps_are_refused_unless_somebody_says_otherwise(parent, root, sign):
    projects(1)
    (root / sign).touch()

    refused, bypassed = parent(), parent(git_server="bypass")

    assert (refused.state, refused.result["skipped"]) == ("blocked", "git_server")
    assert f"manages the repositories below {root}, which has {sign}" in refused.result["blocked"]
    assert (bypassed.state, list_enqueued_projects()) == ("succeeded", [1])


def test_the_last_line_of_a_run_carries_its_figures_as_stats(parent):
    projects(3)

    with capture_logs(processors=[merge_contextvars]) as lines:
        parent()

    (finished,) = [line for line in lines if line["event"] == "run finished"]
    assert finished["stats"] == asdict(Outcome(3, 3))


def test_a_project_whose_child_is_running_is_not_enqueued_again(parent):
    projects(1)
    parent()

    with taken():
        during = parent().result
    afterwards = parent().result

    assert (during["enqueued"], during["deduplicated"]) == (0, 1)
    assert (afterwards["enqueued"], afterwards["deduplicated"]) == (1, 0)
