"""Children that fail: `status` says so at once and `why` how many, until they end well or a person discards them."""

import pytest

from demo import git_repositories
from forgekeeper.connections import client
from forgekeeper.runs.quarantine import Quarantined
from models import GitRefDeletion, Project
from tests.harness.performing import ended, recorded, runner_of
from tests.harness.settings import settings_with
from workers.git_ref_cleanup import clean_project_refs
from workers.git_ref_cleanup import git_ref_cleanup as batch

NAME = "git_ref_cleanup"
CHILD = "clean_project_refs:1"

pytestmark = pytest.mark.usefixtures("database", "settings")


@pytest.fixture
def fix(root):
    """Two projects with a ref to delete; git fails in the repository of the first until this is called."""
    for number in (1, 2):
        git_repositories.create(root, f"{number}.git", ["refs/go"])
        Project.create(id=number, disk_path=f"{number}.git")
        GitRefDeletion.create(project_id=number, ref="refs/go")
    packed = root / "1.git" / "packed-refs"
    whole = packed.read_text()
    packed.write_text("nonsense\n")
    return lambda: packed.write_text(whole)


@pytest.fixture
def failed(fix):
    """A run that has sent both children, of which the first has failed."""
    run = recorded(batch, settings_with())
    assert work_on(run.id).error is not None
    return run


def work_on(run):
    with runner_of(settings_with()) as runner:
        return ended(runner.child(clean_project_refs, CHILD, run=run), 1)


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
