"""What commands say of children that fail: `status` at once, `why` of each, until they end well or a person gives them up."""

from datetime import datetime

import pytest

from demo import git_repositories
from forgekeeper.connections import client
from forgekeeper.database import LAST_INSTANT
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.quarantine import Quarantined
from forgekeeper.storage import sentinel
from models import GitRefDeletion, Project
from tests.cli.test_status_without_redis import frozen
from tests.harness.installation import INSTALLATION
from tests.harness.performing import ended, recorded, runner_of
from tests.harness.programs import Program, eventually
from tests.harness.settings import settings_with
from workers.git_ref_cleanup import clean_project_refs
from workers.git_ref_cleanup import git_ref_cleanup as batch

NAME = "git_ref_cleanup"
CHILD = "clean_project_refs:1"
ERROR = "RepositoryFailed"

pytestmark = pytest.mark.usefixtures("database", "settings")


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "repositories"
    root.mkdir()
    sentinel.Folder(root).create_sentinel(INSTALLATION)
    return root


@pytest.fixture
def broken(root):
    """Two projects with a ref to delete; git fails in the repository of the first."""
    for number in (1, 2):
        git_repositories.create(root, f"{number}.git", ["refs/go"])
        Project.create(id=number, disk_path=f"{number}.git")
        GitRefDeletion.create(project_id=number, ref="refs/go")
    packed = root / "1.git" / "packed-refs"
    whole = packed.read_text()
    packed.write_text("nonsense\n")
    return lambda: packed.write_text(whole)


@pytest.fixture
def with_root(settings, root):
    return settings_with(repositories_root=root)


def work_on(settings, run, number=1):
    with runner_of(settings) as runner:
        return ended(runner.child(clean_project_refs, f"clean_project_refs:{number}", run=run), number)


@pytest.fixture
def failed(with_root, broken):
    """A run that has sent both children, of which the first has failed."""
    run = recorded(batch, with_root)
    assert work_on(with_root, run.id).error is not None
    return run


def batch_of(main):
    return main("status", "--json").json["batches"][NAME]


def test_a_child_that_fails_is_there_with_its_run_and_error(failed):
    (row,) = Quarantined.select()

    assert (row.batch, row.record, row.key, row.run) == (NAME, "clean_project_refs", CHILD, failed.id)
    assert (row.reason, row.failures, "nonsense" in row.error or ERROR in row.error) == ("child_failed", 1, True)


def test_failures_of_a_child_are_counted_from_the_first_one_on(failed, with_root):
    before = Quarantined.get()
    work_on(with_root, failed.id)

    row = Quarantined.get()
    assert (row.failures, row.since, row.failed_at > before.failed_at) == (2, before.since, True)


def test_a_child_that_ends_well_is_forgotten(failed, with_root, broken):
    broken()
    assert work_on(with_root, failed.id).error is None

    assert Quarantined.select().count() == 0


def test_a_child_whose_batch_was_stopped_has_not_shown_that_it_works(failed, with_root, broken, main):
    broken()
    main("stop", NAME, "--reason", "a test")
    work_on(with_root, failed.id)

    assert Quarantined.select().count() == 1


def test_status_says_at_once_that_a_child_fails_on_the_line_of_its_batch(failed, main):
    facts, shown = batch_of(main), main("status").stdout

    assert (facts["last"]["state"], facts["children_failing"]["count"]) == ("succeeded", 1)
    assert facts["children_failing"]["last"]["key"] == CHILD
    below = shown.partition("last run of")[2]
    line = next(line for line in below.splitlines() if line.startswith(NAME))
    assert " failing " in line
    assert " succeeded " not in line
    assert f"1 child failing, the last {CHILD}: " in line


def test_status_warns_of_children_that_fail_first(failed, main):
    warnings = main("status", "--json").json["warnings"]

    assert warnings[0].startswith(f"{NAME}: 1 child failing, the last {CHILD}: ")
    assert warnings[0].endswith(f"; `forgekeeper why {NAME}` lists them")


def test_why_says_what_has_become_of_the_children_of_a_run(failed, main):
    (children,) = main("why", str(failed.id), "--json").json["children"]

    (failure,) = children.pop("failing")
    assert children == {
        "child": "clean_project_refs",
        "sent": 2,
        "running": 0,
        "queued": 2,
        "ended": 0,
    }
    assert (failure["key"], failure["failures"], failure["run"]) == (CHILD, 1, failed.id)


def test_why_says_it_to_people(failed, main):
    shown = main("why", str(failed.id)).stdout

    assert "It sent 2 children clean_project_refs: 2 queued, 0 ended.\n1 child of them fails:\n" in shown
    assert f"  {CHILD} failed once, the last time at 20" in shown


def test_why_of_a_later_run_says_which_children_of_earlier_ones_fail(failed, main):
    JobRun.succeed(JobRun.start_here(NAME, by="test"), {"enqueued": 0})

    shown = main("why", NAME).stdout

    assert f"1 child that other runs sent fails:\n  {CHILD} of run {failed.id} failed once" in shown


def test_why_says_which_children_fail_while_redis_is_frozen(failed, main):
    with frozen(client):
        result = main("why", str(failed.id), "--json")

    (children,) = result.json["children"]
    assert (result.status, children["sent"], children["queued"], len(children["failing"])) == (0, 2, None, 1)
    assert any(sentence.startswith("cannot use Redis: ") for sentence in result.json["story"])


def test_what_was_emptied_out_of_redis_still_fails(failed, main):
    client.flushdb()

    assert batch_of(main)["children_failing"]["count"] == 1


@pytest.fixture
def worker(tmp_path, broken, root):
    words = ("-m", "forgekeeper.process", "--processes", 1, "--threads", 1)
    program = Program(tmp_path / "worker.log", *words, repositories_root=root)
    yield program
    program.end()
    program.kill()


def test_a_child_that_fails_in_a_worker_is_left_to_the_next_run_and_is_shown(with_root, broken, worker, main):
    run = recorded(batch, with_root)
    eventually(lambda: Quarantined.select().count() == 1)
    eventually(lambda: GitRefDeletion.pending().count() == 1)

    def children():
        (found,) = main("why", str(run.id), "--json").json["children"]
        return [found[name] for name in ("sent", "running", "queued", "ended")], len(found["failing"])

    eventually(lambda: children() == ([2, 0, 0, 2], 1))


def test_why_says_when_a_failing_child_is_tried_again(failed, with_root, main):
    work_on(with_root, failed.id)

    (children,) = main("why", str(failed.id), "--json").json["children"]

    again = datetime.fromisoformat(children["failing"][0]["retry_at"])
    assert again > Quarantined.get().failed_at
    assert f"; the first run after {again:%Y-%m-%d %H:%M:%S} tries it again" in main("why", str(failed.id)).stdout


def test_why_says_that_a_child_waits_for_a_person(failed, main):
    Quarantined.update(retry_at=LAST_INSTANT).execute()

    assert "; it waits for a person: `forgekeeper quarantine`" in main("why", str(failed.id)).stdout


def test_a_child_that_a_person_discards_fails_no_longer(failed, main):
    assert main("quarantine", "discard", str(Quarantined.get().id)).status == 0
    assert Quarantined.select().count() == 0
