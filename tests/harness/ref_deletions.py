"""Pending ref deletions, repositories, and fixtures that run parent and child of batch 58."""

from datetime import timedelta

import pytest
from dramatiq import Message

from forgekeeper.delivery.broker import broker
from forgekeeper.delivery.children import list_calls
from forgekeeper.guards.deadline import Deadline
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from models import GitRefDeletion, Project
from tests.harness.git_samples import BareRepository, put_root, replace_git
from tests.harness.performing import perform, run_as_worker, run_child_as_worker
from workers import git_ref_cleanup
from workers.git_ref_cleanup import LOCK_TIMEOUT, clean_project_refs

BATCH = git_ref_cleanup.git_ref_cleanup
Outcome, ProjectOutcome = BATCH.outcome, clean_project_refs.outcome
NAME = "git_ref_cleanup"
QUEUE = f"{broker.namespace}:git"
PROJECT = 7
ADD_PROJECTS = """
    insert into batched_git_ref_updates_deletions (project_id, ref)
    select project_id, 'refs/mr/' || number
    from generate_series({first}, {last}) as project_id, generate_series(1, {each}) as number
"""


def row(ref="refs/mr/1", *, project=PROJECT, **facts):
    return GitRefDeletion.create(project_id=project, ref=ref, **facts).id


def rows(*refs):
    return [row(ref) for ref in refs]


def pending():
    return {one.ref for one in GitRefDeletion.select_pending()}


def projects(count, *, first=1, each=1):
    """Insert *each* pending rows for *count* projects."""
    database.execute_sql(ADD_PROJECTS.format(first=first, last=first + count - 1, each=each))


def statuses():
    """Return the status of every row by its ref; a list for duplicates, in order."""
    found = {}
    for one in GitRefDeletion.select().order_by(GitRefDeletion.id):
        found.setdefault(one.ref, []).append(one.status)
    return {ref: those[0] if len(those) == 1 else those for ref, those in found.items()}


def lock(repository, *names):
    """Create lock files, as a killed git leaves them."""
    for name in names:
        file = repository.path / f"{name}.lock"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def count_git_commands(folder, monkeypatch):
    """Count git commands from now on; return a function that returns the number of commands with a word."""
    replace_git(folder / "bin", monkeypatch, f'echo "$*" >> {folder}/calls\nexec $GIT "$@"')

    def calls(command=""):
        file = folder / "calls"
        return sum(command in line for line in file.read_text().splitlines()) if file.exists() else 0

    return calls


def list_enqueued_messages():
    """Return the arguments of the children of each message in the queue, in order."""
    waiting = client.lrange(QUEUE, 0, -1)
    bodies = client.hmget(f"{QUEUE}.msgs", waiting) if waiting else []
    return [[arguments for _key, arguments in list_calls(Message.decode(body))] for body in bodies]


def list_enqueued_projects():
    """Return the projects whose children wait in the queue, in order."""
    return [project for message in list_enqueued_messages() for project, *_ in message]


@pytest.fixture
def small_limits(monkeypatch):
    """Make the limits so small that a few rows reach them."""
    monkeypatch.setattr(git_ref_cleanup, "MAX_DELETES", 3)


@pytest.fixture
def root(tmp_path):
    return put_root(tmp_path / "repositories")


@pytest.fixture
def repository(root):
    """The repository of project 7, with the packed refs 1 to 6."""
    repository = BareRepository(root)
    repository.packed(*(f"refs/mr/{number}" for number in range(1, 7)))
    Project.create(id=PROJECT, disk_path=repository.disk_path)
    return repository


@pytest.fixture
def configured(settings, root):
    return settings.model_copy(update={"repositories_root": root})


@pytest.fixture
def parent(configured):
    """Run the parent; return the row of its run."""
    return lambda **changes: run_as_worker(BATCH, configured.model_copy(update=changes))


@pytest.fixture
def child(configured):
    """Run the child of a project as a worker does; return its run."""

    def work(project=PROJECT, *, missing=False, **changes):
        return run_child_as_worker(clean_project_refs, configured.model_copy(update=changes), project, missing)

    return work


@pytest.fixture
def clean(configured):
    """Run the child's function with a deadline of the test; return its outcome."""

    def clean(*, within=LOCK_TIMEOUT, project=PROJECT, dead_after=15.0, declared=clean_project_refs, **options):
        settings = configured.model_copy(update={"dead_after": timedelta(seconds=dead_after)})
        return perform(declared, project, deadline=Deadline(within, **options), settings=settings)

    return clean
