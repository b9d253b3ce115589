"""The page of writing a batch has a batch that deletes a ref for each row of a queue: here it is run as it is."""

import re
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import peewee as pw
import pytest
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper import ChildPerRepository, Refs, StatusQueue, Table, batch, child
from forgekeeper.api.answers import EnqueueCounts, Mistake
from forgekeeper.api.batches import BATCHES, CHILDREN, all_declared
from forgekeeper.engine.previewing import preview_batch
from forgekeeper.engine.ref_restoring import count_recoverable_refs, find_deleted_refs, restore_refs
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now
from forgekeeper.targets.missing_repositories import RepositoriesMissing
from tests.harness.git_samples import BareRepository, put_root
from tests.harness.performing import perform
from tests.harness.settings import settings_with

MINUTE = timedelta(minutes=1)
PAGE = (Path(__file__).parents[2] / "docs" / "writing_a_batch.md").read_text()
PENDING, PROCESSED, REJECTED = range(3)


@pytest.fixture
def page(database):
    """The module that the page shows, with its tables."""
    known = {one.name for one in all_declared()}
    module = ModuleType("merged_branches")
    exec(re.search(r"## Git refs.*?```python\n(.*?)```", PAGE, re.DOTALL)[1], module.__dict__)
    db.create_tables([module.Repository, module.Branch])
    yield module
    db.drop_tables([module.Repository, module.Branch])
    forget(known)


@pytest.fixture
def world(page, tmp_path):
    """A repository with three branches to delete, of which one has moved, and a project without a repository."""
    repository = BareRepository(put_root(tmp_path / "root"))
    repository.packed("refs/heads/a", "refs/heads/b", "refs/heads/c")
    page.Repository.create(id=1, path=repository.disk_path)
    page.Repository.create(id=2, path="gone.git")
    for project, name, expected in [(1, "a", None), (1, "b", None), (1, "c", "1" * 40), (2, "a", None)]:
        facts = {"ref": f"refs/heads/{name}", "expected": expected, "created_at": now(), "updated_at": now()}
        page.Branch.create(repository_id=project, **facts)
    return repository


def forget(known):
    for registry in (BATCHES, CHILDREN):
        for name in registry.keys() - known:
            del registry[name]


def settings(repository, **changes):
    return settings_with(repositories_root=repository.root, breaker_share=1, **changes)


def states(page):
    return {(row.repository_id, row.ref[-1]): (row.state, row.reason) for row in page.Branch.select()}


def test_a_child_deletes_the_refs_of_its_repository_and_closes_their_rows(page, world):
    outcome = perform(page.delete_branches, 1, settings=settings(world))

    assert (outcome.total_deletes, outcome.rejected, outcome.stopped) == (2, 1, "drained")
    assert {name for name in world.refs() if name[-2] == "/"} == {"refs/heads/c"}
    expected = {(1, "a"): (PROCESSED, None), (1, "b"): (PROCESSED, None), (1, "c"): (REJECTED, "moved")}
    assert states(page) == expected | {(2, "a"): (PENDING, None)}


def test_a_child_that_is_told_that_its_repository_is_missing_closes_the_rows_without_git(page, world):
    outcome = perform(page.delete_branches, 2, True, settings=settings(world))

    assert (outcome.total_deletes, outcome.gone, states(page)[2, "a"]) == (0, 1, (PROCESSED, None))


def fan_out(repository):
    """Run the batch; return its outcome, and the calls of children that it sends."""
    calls = []

    def send(one, keyed, **_options):
        calls.extend((one.name, *arguments) for _key, arguments in keyed)
        return EnqueueCounts(len(keyed))

    return perform(BATCHES["merged_branches"], settings=settings(repository), fan_out=send), calls


def test_a_run_sends_a_child_for_each_repository_and_the_missing_ones_last(page, world):
    outcome, calls = fan_out(world)

    assert calls == [("delete_branches", 1), ("delete_branches", 2, True)]
    assert (outcome.total_projects, outcome.missing_repositories, outcome.stopped) == (2, 1, "drained")


def test_no_row_is_closed_if_too_many_repositories_are_missing(page, world):
    for number in (3, 4):
        page.Repository.create(id=number, path=f"gone/{number}.git")
        page.Branch.create(repository_id=number, ref="refs/heads/a", created_at=now(), updated_at=now())

    with pytest.raises(RepositoriesMissing, match=r"3 of 4 projects.*forgekeeper run merged_branches`"):
        fan_out(world)


def test_a_preview_looks_into_the_repositories(page, world):
    parts = {part.record: part for part in preview_batch(page.merged_branches, settings(world)).parts}

    assert (parts["branch"].records, parts["branch"].kept, parts["branch"].projects) == (2, {"moved": 1}, {"1": 2})
    assert parts["gone_branch_deletion"].records == 1


def test_a_rejected_ref_waits_in_quarantine_until_a_person_lets_it_be_retried(page, world):
    perform(page.delete_branches, 1, settings=settings(world))

    (refused,) = page.delete_branches.refused
    (entry,) = refused.entries(settings(world), 10)
    assert (refused.kind, entry.error) == ("branch", f"moved: refs/heads/c of project 1 at {'1' * 40}")
    assert (refused.retry([entry.key]), states(page)[1, "c"]) == (1, (PENDING, None))


def test_deleted_refs_are_found_in_the_audit_and_restored(page, world):
    given = settings(world)
    perform(page.delete_branches, 1, settings=given, number=17)

    found = count_recoverable_refs(page.delete_branches, 17, float("inf"), given)
    deleted = find_deleted_refs(page.delete_branches, (), 17)
    restored = [outcome.state for _, outcome in restore_refs(page.delete_branches, deleted, given, dry_run=False)]

    assert (found.recoverable, restored) == (2, ["restored", "restored"])
    assert {"refs/heads/a", "refs/heads/b"} <= set(world.refs())


def test_what_everybody_asks_about_it_follows_from_the_answer(page, world):
    spec = page.merged_branches

    assert (spec.sum_backlogs(now()).records, spec.stake(now()).due(10), spec.deletes_from) == (4, 4, "repositories")
    assert (page.delete_branches.lease, page.delete_branches.continues) == (True, ("max_deletes",))
    assert [one.name for one in page.delete_branches.records] == ["branch", "gone_branch_deletion", "rejected_branch"]
    assert sorted(spec.known_repositories[0]()) == ["gone.git", world.disk_path]
    branches, repositories = spec.relations
    assert branches.needed_privileges("exporter") == repositories.needed_privileges("worker") == ["select"]
    assert [(one.columns, one.where) for one in branches.indexes] == [("repository_id, id", '"state" = 0')]
    assert "update (state, reason, expected, updated_at, deleted_at)" in branches.needed_privileges("worker")


class Topic(Table):
    project_id = pw.BigIntegerField()
    name = pw.TextField()
    oid = pw.TextField(null=True)
    state = pw.IntegerField()
    reason = pw.TextField(null=True)
    made_at = DateTimeTZField()
    done_at = DateTimeTZField(null=True)


class Place(Table):
    path = pw.TextField()


def topics(**changes):
    columns = {"status": Topic.state, "reason": Topic.reason, "created_at": Topic.made_at, "updated_at": Topic.made_at}
    given = {"pending": 0, "processed": 1, "rejected": 2, **columns, "processed_at": Topic.done_at}
    return StatusQueue(Topic, **given | changes)


def refs(of=1, *, missing=False, **changes):
    columns = {"project": Topic.project_id, "ref": Topic.name, "expected": Topic.oid, "repository": Place.path}
    return Refs(topics(), of=of, missing=missing, **columns | changes)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: topics(status=Place.id), "status has to be a column of Topic for whole numbers"),
        (lambda: topics(reason=Topic.state), "reason has to be a column of Topic for texts"),
        (lambda: topics(reason=Topic.name), "reason has to be a column that may be NULL: write null=True"),
        (lambda: topics(processed_at=Topic.made_at), "processed_at has to be a column that may be NULL"),
        (lambda: topics(rejected=1), "pending, processed and rejected have to be different numbers"),
        (lambda: refs(ref=Place.path), "ref has to be a column of Topic for texts"),
        (lambda: refs(project=Topic.name), "project has to be a column of Topic for whole numbers"),
        (lambda: refs(expected=Topic.name), "expected has to be a column that may be NULL"),
        (lambda: refs(repository=Topic.name), "repository has to be a column for texts .* of the table of projects"),
        (lambda: refs(most=0), "a child works on at least one row, not 0"),
        (lambda: ChildPerRepository(page=0), "page and most have to be at least 1, not 0 and 10000"),
    ],
)  # fmt: skip
def test_a_mistake_is_an_error_where_it_is_written(answer, said):
    with pytest.raises(Mistake, match=said):
        answer()


@pytest.fixture
def declared():
    known = {one.name for one in all_declared()}
    yield batch(cron="off", budget=MINUTE)(old_topics)
    forget(known)


def old_topics(_now):
    """Delete topics."""
    return ChildPerRepository()


def of_another(_now, project, missing=False):  # noqa: FBT002, as the engine calls it
    """Delete topics of another project."""
    return refs(of=project + 1, missing=missing)


def never_missing(_now, project):
    """Delete topics, whether their repository is missing or not."""
    return refs(of=project)


def fans_out(_now, _project):
    """Send children."""
    return ChildPerRepository()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (of_another, "declare its arguments as now, project_id: int, missing: bool = False"),
        (never_missing, "return Refs.*of=project_id, missing=missing"),
        (fans_out, "fans_out is a child and returns ChildPerRepository: return it from its batch"),
    ],
)
def test_a_child_that_does_not_answer_for_its_project_is_refused(declared, function, said):
    with pytest.raises(Mistake, match=said):
        child(declared, queue="git", budget=MINUTE)(function)

    assert function.__name__ not in CHILDREN


def test_a_batch_that_answers_with_refs_is_told_of_its_child(declared):
    def all_topics(_now):
        """Delete topics."""
        return refs()

    with pytest.raises(Mistake, match="return ChildPerRepository, and return Refs from a function with @child"):
        batch(cron="off", budget=MINUTE)(all_topics)


def test_a_batch_without_a_child_for_its_repositories_says_so(declared, database):
    with pytest.raises(Mistake, match="return Refs from exactly one of its children, not from none"):
        perform(declared)
