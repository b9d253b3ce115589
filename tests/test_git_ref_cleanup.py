"""Batch 58 against a real PostgreSQL and Redis, and bare repositories on this machine's disk."""

import logging
import os
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta

import peewee as pw
import psycopg2
import pytest
from dramatiq import Message
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from forgekeeper import shutdown
from forgekeeper.connections import client
from forgekeeper.database import database, now
from forgekeeper.delivery.queues import RUN, depth
from forgekeeper.identity import identity
from forgekeeper.locks import LeaseInTransaction, LeaseLost, break_lease, lease, leases
from forgekeeper.process.broker import broker
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.deadline import Deadline
from forgekeeper.runs.ledger import JobRun
from forgekeeper.storage import git_refs, sentinel
from forgekeeper.storage.git_refs import RepositoryFailed, RepositoryLocked, RootUnavailable
from forgekeeper.storage.git_repository import RepositoriesMissing
from models import DeletionStatus, GitRefDeletion, Project
from tests.harness import audited
from tests.harness.clocks import Clock, Crash, crash
from tests.harness.git_samples import Bare, Held, put_root, stand_in
from tests.harness.performing import as_child, perform, recorded
from tests.harness.waiting import wait_until
from workers import git_ref_cleanup
from workers.git_ref_cleanup import BATCH_SIZE, MAX_PROJECTS, Outcome, clean_project_refs, cleaning
from workers.git_ref_cleanup.cleaning import LOCK_TIMEOUT, MAX_DELETES, ProjectOutcome
from workers.git_ref_cleanup.deletions import (
    PROJECTS_WITH_PENDING,
    Closed,
    Settled,
    pending_of,
    retry,
    settle,
    waiting_projects,
)

BATCH = git_ref_cleanup.git_ref_cleanup
NAME = "git_ref_cleanup"
QUEUE = f"{broker.namespace}:git"
PENDING, PROCESSED, REJECTED = DeletionStatus
PROJECT = 7
LIMIT = 60.0
NO_REPOSITORIES = "no repositories are configured; set FORGEKEEPER_REPOSITORIES_ROOT"
ELSEWHERE = "1" * 40
LONG = "refs/" + "x" * 1_020

ADD_PROJECTS = """
    insert into batched_git_ref_updates_deletions (project_id, ref)
    select project_id, 'refs/mr/' || number
    from generate_series({first}, {last}) as project_id, generate_series(1, {each}) as number
"""
ADD_REFS = """
    insert into batched_git_ref_updates_deletions (project_id, ref)
    select 7, 'refs/mr/' || number from generate_series(1, %s) as number
"""
# Every tenth row is project 7's, every second one of those is pending.
ADD_MIXED = """
    insert into batched_git_ref_updates_deletions (project_id, ref, status)
    select case mod(number, 10) when 0 then 7 else number end, 'refs/mr/' || number, 1 + mod(number / 10, 2)
    from generate_series(1, 50000) as number
"""
IDLE_IN_TRANSACTION = """
    select query from pg_stat_activity
    where datname = current_database() and application_name = 'forgekeeper tests' and xact_start is not null
"""
LOCKS = """
    select mode from pg_locks join pg_stat_activity using (pid)
    where application_name = 'forgekeeper tests' and locktype in ('relation', 'transactionid', 'tuple')
"""

pytestmark = pytest.mark.usefixtures("database")


def row(ref="refs/mr/1", *, project=PROJECT, **facts):
    return GitRefDeletion.create(project_id=project, ref=ref, **facts).id


def rows(*refs):
    return [row(ref) for ref in refs]


def statuses():
    """The status of every row, by its ref; of duplicates in order."""
    found = {}
    for one in GitRefDeletion.select().order_by(GitRefDeletion.id):
        found.setdefault(one.ref, []).append(one.status)
    return {ref: those[0] if len(those) == 1 else those for ref, those in found.items()}


def pending():
    return {one.ref for one in GitRefDeletion.pending()}


def projects(count, *, first=1, each=1):
    """Let projects have pending rows."""
    database.execute_sql(ADD_PROJECTS.format(first=first, last=first + count - 1, each=each))


def on_their_way():
    """The projects whose children wait in the queue, in its order."""
    return [int(number.rpartition(b":")[2]) for number in client.lrange(QUEUE, 0, -1)]


def let_children_finish():
    """Take the children from the queue and close their rows, as if they had run; return whose they were."""
    done = on_their_way()
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


@pytest.fixture
def other(urls):
    """A session of somebody else's."""
    with closing(psycopg2.connect(urls.database)) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        yield cursor


@pytest.fixture
def root(tmp_path):
    return put_root(tmp_path / "repositories")


@pytest.fixture
def repository(root):
    """The repository of project 7, with the packed refs 1 to 6."""
    repository = Bare(root)
    repository.packed(*(f"refs/mr/{number}" for number in range(1, 7)))
    Project.create(id=PROJECT, disk_path=repository.disk_path)
    return repository


@pytest.fixture
def configured(settings, root):
    return settings.model_copy(update={"repositories_root": root})


@pytest.fixture
def parent(configured):
    """Run the parent; return the row of its run."""
    return lambda **changes: recorded(BATCH, configured.model_copy(update=changes))


@pytest.fixture
def child(configured):
    """Work on a project as a worker's child does; return the child."""

    def work(project=PROJECT, *, missing=False, **changes):
        return as_child(clean_project_refs, configured.model_copy(update=changes), project, missing)

    return work


@pytest.fixture
def clean(configured):
    """Do a child's work with a deadline of the test's; return its outcome."""

    def clean(*, within=LOCK_TIMEOUT, project=PROJECT, dead_after=15.0, declared=clean_project_refs, **options):
        settings = configured.model_copy(update={"dead_after": timedelta(seconds=dead_after)})
        return perform(declared, project, deadline=Deadline(within, **options), settings=settings)

    return clean


@pytest.fixture
def walk(configured):
    """Do the parent's work with a deadline of the test's; return its outcome."""
    return lambda **options: perform(BATCH, deadline=Deadline(LOCK_TIMEOUT, **options), settings=configured)


@pytest.fixture
def in_the_middle(clean, repository, tmp_path, monkeypatch):
    """Begin a child's work in a thread, and hold its git before the deletion; return both, and what lets it go on."""
    gate, reached = tmp_path / "gate", tmp_path / "reached"

    def begin(**options):
        os.mkfifo(gate)
        # It waits here until somebody opens the other end.
        waiting = f'case "$*" in *update-ref*) touch {reached}; cat {gate};; esac'
        stand_in(tmp_path / "bin", monkeypatch, f'{waiting}\nexec $GIT "$@"')

        def work():
            with database.connection_context():
                return clean(**options)

        working = Held(work)
        assert wait_until(reached.exists, LIMIT)
        return working, lambda: gate.write_bytes(b"")

    yield begin
    with suppress(OSError):
        os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))


@pytest.fixture
def small(monkeypatch):
    """Make the limits small enough for a few rows to reach them."""
    monkeypatch.setattr(cleaning, "MAX_DELETES", 3)


@contextmanager
def without(table):
    database.execute_sql(f"alter table {table} rename to away")
    try:
        yield
    finally:
        database.execute_sql(f"alter table away rename to {table}")


@contextmanager
def failing_updates():
    """Let PostgreSQL refuse to close any row."""
    database.execute_sql(
        "create function spoil() returns trigger language plpgsql as $$ begin raise exception 'spoilt'; end $$"
    )
    database.execute_sql(
        "create trigger spoil before update on batched_git_ref_updates_deletions for each row execute function spoil()"
    )
    try:
        yield
    finally:
        database.execute_sql("drop function spoil cascade")


def lock(repository, *names):
    """Leave locks behind as a killed git does."""
    for name in names:
        file = repository.path / f"{name}.lock"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def counted(folder, monkeypatch):
    """Count git's commands from here on: call what is returned for their names."""
    stand_in(folder / "bin", monkeypatch, f'echo "$*" >> {folder}/calls\nexec $GIT "$@"')

    def calls(command=""):
        file = folder / "calls"
        return sum(command in line for line in file.read_text().splitlines()) if file.exists() else 0

    return calls


def hang(folder, monkeypatch, repository):
    """Let git take its locks and then do nothing, and give them back when it is asked to end."""
    script = f"""
case "$*" in *update-ref*)
    cd {repository.path}
    trap 'rm packed-refs.lock; exit 143' TERM
    touch packed-refs.lock
    while :; do sleep 0.05; done
esac
exec $GIT "$@"
"""
    stand_in(folder / "bin", monkeypatch, script)


def take_away(root, what):
    if what == "the root":
        root.rename(root.with_name("away"))
    elif what == "the root, in whose place an empty one is":
        root.rename(root.with_name("away"))
        root.mkdir()
    else:
        (root / sentinel.NAME).unlink()
    if what == "the reading of its sentinel":
        # A file that is there, and whose first byte the kernel refuses with an error of input and output.
        (root / sentinel.NAME).symlink_to("/proc/self/mem")


GONE = [
    "the root",
    "the root, in whose place an empty one is",
    "its sentinel",
    "the reading of its sentinel",
]


def nobody_has_a_lease():
    return leases(client) == []


def scans(sql, values):
    """Explain *sql* while running it; return the index of each scan of the deletions, and how many rows it read."""
    ((plans,),) = database.execute_sql(f"explain (analyze, format json) {sql}", values).fetchall()
    return [
        (
            node.get("Index Name"),
            node["Actual Loops"] * sum(node.get(kind, 0) for kind in ("Actual Rows", "Rows Removed by Filter")),
        )
        for node in nodes(plans[0]["Plan"])
        if node.get("Relation Name") == "batched_git_ref_updates_deletions"
    ]


def nodes(plan):
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes(below)


# The rows


def test_pending_are_those_that_nobody_has_made_yet():
    waiting = row("refs/a")
    row("refs/b", status=PROCESSED)
    row("refs/c", status=REJECTED)

    assert [one.id for one in GitRefDeletion.pending()] == [waiting]


def test_a_project_is_found_once_however_many_pending_rows_it_has():
    projects(3, each=5)

    assert waiting_projects(after=0, limit=100) == [1, 2, 3]


def test_a_project_without_pending_rows_is_not_found():
    row(project=1, status=PROCESSED)
    row(project=2, status=REJECTED)

    assert waiting_projects(after=0, limit=100) == []


@pytest.mark.parametrize(
    ("after", "until", "limit", "found"),
    [
        (0, 2**63 - 1, 100, [2, 3, 4]),
        (1, 2**63 - 1, 100, [2, 3, 4]),
        (2, 2**63 - 1, 100, [3, 4]),
        (4, 2**63 - 1, 100, []),
        (0, 3, 100, [2, 3]),
        (0, 2, 100, [2]),
        (0, 1, 100, []),
        (0, 4, 2, [2, 3]),
        (2, 4, 1, [3]),
        (2, 3, 1, [3]),
        (3, 3, 1, []),
    ],
)
def test_projects_are_found_above_one_bound_and_up_to_the_other(after, until, limit, found):
    projects(3, first=2, each=2)

    assert waiting_projects(after=after, until=until, limit=limit) == found


def test_the_largest_id_is_that_of_a_project():
    row(project=2**63 - 1)

    assert waiting_projects(after=0, limit=100) == [2**63 - 1]


@pytest.mark.parametrize("known", ["nothing", "an empty table", "few rows", "all"])
@pytest.mark.parametrize(("count", "each"), [(10_000, 1), (200, 500)])
def test_a_page_of_projects_costs_one_look_into_the_index_for_each_whatever_postgresql_knows(known, count, each):
    if known == "few rows":
        projects(100)
    if known in ("an empty table", "few rows"):
        database.execute_sql("analyze batched_git_ref_updates_deletions")
        GitRefDeletion.delete().execute()
    projects(count, each=each)
    if known == "all":
        database.execute_sql("analyze batched_git_ref_updates_deletions")

    found = scans(PROJECTS_WITH_PENDING, {"after": 0, "until": 2**63 - 1, "limit": BATCH_SIZE})

    assert {index for index, _ in found} == {"batched_git_ref_updates_deletions_pending"}
    assert sum(read for _, read in found) <= BATCH_SIZE + 1


def test_the_pending_rows_of_a_project_come_in_their_order_behind_where_we_were():
    first, second, third, fourth = rows("refs/d", "refs/c", "refs/b", "refs/a")
    row(project=PROJECT - 1)
    row(project=PROJECT + 1)
    GitRefDeletion.update(status=REJECTED).where(GitRefDeletion.id == third).execute()
    # What was changed last lies last in the table.
    GitRefDeletion.update(expected_oid=ELSEWHERE).where(GitRefDeletion.id == first).execute()

    def found(after, limit):
        return [one.id for one in pending_of(PROJECT, after=after, limit=limit)]

    assert (found(0, 10), found(0, 2), found(first, 10)) == (
        [first, second, fourth],
        [first, second],
        [second, fourth],
    )


@pytest.mark.parametrize("known", ["nothing", "all"])
def test_a_page_of_pending_rows_reads_no_others(known, caplog):
    database.execute_sql(ADD_MIXED)
    if known == "all":
        database.execute_sql("analyze batched_git_ref_updates_deletions")
    with caplog.at_level(logging.DEBUG, logger="peewee"):
        pending_of(PROJECT, after=1_000, limit=1_000)
    (query,) = [record.msg for record in caplog.records if "select" in record.msg[0].lower()]

    ((index, read),) = scans(*query)

    assert (index, read) == ("batched_git_ref_updates_deletions_pending", 1_000)


def test_rows_are_closed_as_processed_or_with_their_reason():
    done, refused, open_one = rows("refs/a", "refs/b", "refs/c")
    before = now()

    settled = settle(PROJECT, [Closed(done, "refs/a"), Closed(refused, "refs/b", "moved")])

    facts = {one.id: one for one in GitRefDeletion.select()}
    assert settled == Settled(processed=1, rejected=1)
    assert [(facts[number].status, facts[number].reason) for number in (done, refused, open_one)] == [
        (PROCESSED, None),
        (REJECTED, "moved"),
        (PENDING, None),
    ]
    assert before <= facts[done].processed_at <= now()
    assert (facts[refused].processed_at, facts[open_one].processed_at) == (None, None)
    assert facts[open_one].updated_at < before <= min(facts[done].updated_at, facts[refused].updated_at)


def test_with_no_rows_to_close_none_is_closed():
    row()

    assert (settle(PROJECT, []), pending()) == (Settled(0, 0), {"refs/mr/1"})


@pytest.mark.parametrize("reason", [None, "moved"])
@pytest.mark.parametrize("status", [PROCESSED, REJECTED])
def test_a_row_that_somebody_has_closed_meanwhile_stays_as_it_is(status, reason):
    closed = row(status=status, reason="default_branch")
    before = GitRefDeletion.get_by_id(closed).__data__

    settled = settle(PROJECT, [Closed(closed, before["ref"], reason)])

    assert (settled, GitRefDeletion.get_by_id(closed).__data__) == (Settled(0, 0), before)


@pytest.mark.parametrize(("project", "ref"), [(PROJECT, "refs/mr/2"), (PROJECT + 1, "refs/mr/1")])
def test_a_row_that_has_its_number_since_the_database_came_back_older_stays_pending(project, ref):
    another = row("refs/mr/1")

    settled = settle(project, [Closed(another, ref)])

    assert (settled, pending()) == (Settled(0, 0), {"refs/mr/1"})


def test_the_rejected_are_listed_in_the_order_of_their_ids():
    numbers = [row(f"refs/{name}", status=REJECTED) for name in "cab"]
    row("refs/d")
    row("refs/e", status=PROCESSED)
    GitRefDeletion.update(reason="moved").where(GitRefDeletion.id == numbers[0]).execute()

    assert [one.id for one in GitRefDeletion.rejected()] == numbers


@pytest.mark.parametrize(
    ("named", "retried"), [(None, {"refs/a", "refs/b"}), ([1], {"refs/a"}), ([], set()), ([3], set())]
)
def test_rejected_rows_are_tried_anew_those_that_are_named_or_all(named, retried):
    row("refs/a", status=REJECTED, reason="moved")
    row("refs/b", status=REJECTED, reason="moved")
    row("refs/done", status=PROCESSED)
    before = now()

    count = retry(named)

    assert (count, pending()) == (len(retried), retried)
    assert {one.ref for one in GitRefDeletion.select() if one.updated_at >= before} == retried
    assert {one.ref for one in GitRefDeletion.select() if one.reason} == {"refs/a", "refs/b"} - retried


# The parent


def test_the_limits_are_the_documents():
    limits = (BATCH_SIZE, MAX_PROJECTS, MAX_DELETES, LOCK_TIMEOUT)

    assert limits == (100, 10_000, 10_000, timedelta(minutes=10))
    assert (BATCH.budget, clean_project_refs.budget) == (LOCK_TIMEOUT, LOCK_TIMEOUT)


def test_with_nothing_to_do_nothing_is_enqueued(parent):
    run = parent()

    assert (run.state, run.result) == (
        "succeeded",
        asdict(Outcome()),
    )
    assert on_their_way() == []


def test_each_project_with_pending_rows_gets_one_child_that_is_told_which(parent):
    projects(3, first=4, each=5)
    row(project=9, status=PROCESSED)

    run = parent()

    assert run.result == asdict(Outcome(3, 3))
    with taken() as message:
        facts = (message.actor_name, message.message_id, *message.args)
    assert facts == ("clean_project_refs", "clean_project_refs:4", 4)
    assert set(client.hkeys(f"{QUEUE}.msgs")) == {b"clean_project_refs:%d" % number for number in (5, 6)}


@pytest.mark.parametrize("count", [1, BATCH_SIZE - 1, BATCH_SIZE, BATCH_SIZE + 1, 3 * BATCH_SIZE + 1])
def test_all_projects_get_a_child_whatever_number_there_is(parent, count):
    projects(count)

    run = parent()

    assert run.result == asdict(Outcome(count, count))
    assert on_their_way() == list(range(1, count + 1))


def test_ten_thousand_projects_get_a_child_each_in_one_run(parent):
    projects(MAX_PROJECTS)

    run = parent()

    assert (run.result["enqueued"], on_their_way()) == (MAX_PROJECTS, list(range(1, MAX_PROJECTS + 1)))


def test_beyond_ten_thousand_projects_the_next_run_goes_on_and_counts_those_whose_children_still_wait(parent):
    projects(MAX_PROJECTS + 50)

    runs = [parent().result for _ in range(3)]

    total = {"total_projects": MAX_PROJECTS, "stopped": "max_projects", "missing_repositories": 0}
    assert runs == [
        total | {"enqueued": MAX_PROJECTS, "deduplicated": 0},
        total | {"enqueued": 50, "deduplicated": MAX_PROJECTS - 50},
        total | {"enqueued": 0, "deduplicated": MAX_PROJECTS},
    ]
    assert sorted(on_their_way()) == list(range(1, MAX_PROJECTS + 51))


def test_a_project_whose_child_still_waits_is_not_enqueued_again(parent):
    projects(3)
    parent()

    run = parent()

    assert (run.result["enqueued"], run.result["deduplicated"], len(on_their_way())) == (0, 3, 3)


def test_a_project_whose_child_is_running_is_not_enqueued_again(parent):
    projects(1)
    parent()

    with taken():
        during = parent().result
    afterwards = parent().result

    assert (during["enqueued"], during["deduplicated"]) == (0, 1)
    assert (afterwards["enqueued"], afterwards["deduplicated"]) == (1, 0)


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


def test_project_number_ten_thousand_and_one_is_reached_by_the_second_run(parent):
    projects(MAX_PROJECTS + 1)
    parent()
    let_children_finish()
    projects(MAX_PROJECTS)

    parent()

    assert on_their_way()[:3] == [MAX_PROJECTS + 1, 1, 2]


def test_a_run_goes_round_once_and_no_further(parent):
    projects(5)
    Batch.move_to(NAME, 3)

    run = parent()

    assert (run.result["enqueued"], run.result["deduplicated"], run.result["stopped"]) == (5, 0, "drained")
    assert on_their_way() == [4, 5, 1, 2, 3]


def test_a_run_that_begins_behind_the_last_project_begins_anew(parent):
    projects(3)
    Batch.move_to(NAME, 1_000)

    run = parent()

    assert (run.result["enqueued"], on_their_way()) == (3, [1, 2, 3])


def test_a_run_remembers_where_it_ended(parent):
    projects(3, first=40)

    parent()

    assert Batch.position(NAME) == 42


def test_a_full_queue_gets_no_more_and_the_next_run_goes_on_with_the_first_that_was_left_out(parent):
    projects(4 * BATCH_SIZE)
    full = 3 * BATCH_SIZE
    everyone = [*range(full + 1, 4 * BATCH_SIZE + 1), *range(1, full + 1)]

    first = parent(queue_limit=2 * BATCH_SIZE + 50).result
    let_children_finish()
    projects(full)
    second = parent(queue_limit=2 * BATCH_SIZE + 50).result

    assert first == asdict(Outcome(full, full, 0, "queue_full"))
    assert second == first
    assert on_their_way() == everyone[:full]


def test_a_queue_that_is_full_from_the_start_gets_nothing(parent):
    projects(1)
    parent()
    row(project=2)

    run = parent(queue_limit=1)

    assert run.result == asdict(Outcome(0, 0, 0, "queue_full"))


def test_a_run_ends_at_its_deadline_and_the_next_goes_on(walk, parent):
    projects(3 * BATCH_SIZE)

    outcome = walk(clock=Clock(step=LOCK_TIMEOUT.total_seconds()))
    let_children_finish()
    parent()

    assert outcome == Outcome(BATCH_SIZE, BATCH_SIZE, 0, "deadline")
    assert on_their_way()[0] == BATCH_SIZE + 1


def test_a_run_that_is_asked_to_stop_ends_after_its_page(parent):
    projects(3 * BATCH_SIZE)
    shutdown.requested.set()
    try:
        run = parent()
    finally:
        shutdown.requested.clear()

    assert (run.result["enqueued"], run.result["stopped"]) == (BATCH_SIZE, "deadline")


def test_a_run_that_crashes_between_two_pages_is_made_up_for_by_the_next(walk, parent):
    projects(2 * BATCH_SIZE)
    with pytest.raises(Crash):
        walk(safe_point=crash)

    run = parent()

    assert (run.result["enqueued"], run.result["deduplicated"]) == (BATCH_SIZE, BATCH_SIZE)


def test_without_a_folder_of_repositories_a_run_is_blocked_and_says_why(parent):
    projects(1)

    run = parent(repositories_root=None)

    assert (run.state, run.result) == (
        "blocked",
        asdict(Outcome()) | {"skipped": "no_repositories", "blocked": NO_REPOSITORIES},
    )
    assert (on_their_way(), len(pending())) == ([], 1)


@pytest.mark.parametrize("gone", GONE)
def test_without_its_disk_a_run_fails_and_nothing_is_enqueued(parent, root, gone):
    projects(1)
    take_away(root, gone)

    with pytest.raises(RootUnavailable):
        parent()

    assert (JobRun.get().failures, on_their_way(), len(pending()), Batch.position(NAME)) == (1, [], 1, 0)


def test_the_last_line_of_a_run_carries_its_figures_as_stats(parent):
    projects(3)

    with capture_logs(processors=[merge_contextvars]) as lines:
        parent()

    (finished,) = [line for line in lines if line["event"] == "run finished"]
    assert finished["stats"] == asdict(Outcome(3, 3))


# A child


def test_a_child_deletes_the_refs_and_marks_the_rows_processed(child, repository):
    rows("refs/mr/1", "refs/mr/3")
    before = now()

    done = child()

    assert (done.outcome, done.more) == (ProjectOutcome(2, 0, "drained"), False)
    assert {name for name in repository.refs() if name.startswith("refs/mr/")} == {
        "refs/mr/2",
        "refs/mr/4",
        "refs/mr/5",
        "refs/mr/6",
    }
    assert statuses() == {"refs/mr/1": PROCESSED, "refs/mr/3": PROCESSED}
    assert all(before <= one.processed_at <= now() for one in GitRefDeletion.select())


def test_a_child_with_nothing_to_do_does_nothing(child, repository):
    assert child().outcome == ProjectOutcome(0, 0, "drained")


def test_a_child_touches_no_other_project(child, root, repository):
    other = Bare(root, "group/other.git")
    other.packed("refs/mr/1")
    Project.create(id=8, disk_path=other.disk_path)
    row("refs/mr/1", project=8)
    row("refs/mr/2")

    child()

    assert ("refs/mr/1" in other.refs(), "refs/mr/1" in repository.refs(), pending()) == (True, True, {"refs/mr/1"})


def test_refs_that_are_gone_already_are_processed(child, repository):
    rows("refs/mr/1", "refs/gone")

    outcome = child().outcome

    assert (outcome, pending()) == (ProjectOutcome(2, 0, "drained"), set())


def test_the_same_ref_twice_goes_once_and_both_rows_are_processed(child, repository):
    rows("refs/mr/1", "refs/mr/2", "refs/mr/1")

    outcome = child().outcome

    assert outcome == ProjectOutcome(3, 0, "drained")
    assert statuses() == {"refs/mr/1": [PROCESSED, PROCESSED], "refs/mr/2": PROCESSED}


def test_a_ref_at_its_expected_oid_goes(child, repository):
    row("refs/mr/1", expected_oid=repository.one)

    child()

    assert ("refs/mr/1" in repository.refs(), statuses()) == (False, {"refs/mr/1": PROCESSED})


def test_a_ref_that_has_moved_from_its_expected_oid_stays_and_its_row_says_so(child, repository):
    moved = row("refs/mr/1", expected_oid=ELSEWHERE)
    row("refs/mr/2")

    outcome = child().outcome

    fact = GitRefDeletion.get_by_id(moved)
    assert (outcome, fact.status, fact.reason) == (ProjectOutcome(1, 1, "drained"), REJECTED, "moved")
    assert {"refs/mr/1", "refs/mr/2"} & set(repository.refs()) == {"refs/mr/1"}


def test_an_expected_oid_of_a_ref_that_is_gone_is_processed(child, repository):
    row("refs/gone", expected_oid=ELSEWHERE)

    assert (child().outcome, pending()) == (ProjectOutcome(1, 0, "drained"), set())


BAD = {
    "HEAD": "not_under_refs",
    "": "not_under_refs",
    "heads/main": "not_under_refs",
    "refs/a..b": "invalid_name",
    "refs/mr/4\ndelete refs/mr/5": "invalid_name",
    LONG: "too_long",
    "refs/heads/main": "default_branch",
}


def test_bad_rows_are_rejected_with_their_reasons_and_the_others_go_in_one_transaction(
    child, repository, tmp_path, monkeypatch
):
    rows("refs/mr/1", *BAD, "refs/mr/2")
    row("refs/mr/3", expected_oid=ELSEWHERE)
    calls = counted(tmp_path, monkeypatch)

    outcome = child().outcome

    assert outcome == ProjectOutcome(2, len(BAD) + 1, "drained")
    rejected = {one.ref: one.reason for one in GitRefDeletion.rejected()}
    assert rejected == BAD | {"refs/mr/3": "moved"}
    assert (calls("update-ref"), pending()) == (1, set())
    left = repository.refs()
    assert [f"refs/mr/{number}" in left for number in range(1, 7)] == [False, False, True, True, True, True]
    assert (repository.path / "HEAD").read_text() == "ref: refs/heads/main\n"


def test_a_ref_that_another_stands_in_the_way_of_is_rejected_with_the_cure_and_goes_once_that_is_gone(
    child, repository
):
    repository.packed("refs/mr/7/head")
    repository.loose("refs/mr/7")
    refused = row("refs/mr/7/head")

    outcome = child().outcome

    reason = GitRefDeletion.get_by_id(refused).reason
    assert (outcome, reason) == (ProjectOutcome(0, 1, "drained"), git_refs.behind(b"refs/mr/7").reason)
    assert reason.startswith("name_conflict: refs/mr/7 ")
    assert audited.lines("git_ref_deletion") == []
    (repository.path / "refs/mr/7").unlink()
    retry([refused])
    assert (child().outcome, "refs/mr/7/head" in repository.refs()) == (ProjectOutcome(1, 0, "drained"), False)


def test_a_project_whose_path_no_file_system_takes_keeps_no_other_from_its_child(parent, root):
    Bare(root, "1.git")
    for number, path in ((1, "1.git"), (2, "x" * 5_000), (3, "y/" * 3_000)):
        Project.create(id=number, disk_path=path)
        row("refs/go", project=number)

    result = parent().result

    assert (result["enqueued"], result["missing_repositories"]) == (3, 0)


def test_one_ref_that_is_locked_for_ever_does_not_block_its_project(child, repository):
    rows("refs/mr/1", "refs/mr/2", "refs/mr/3")
    lock(repository, "refs/mr/2")

    with capture_logs() as lines:
        outcome = child().outcome

    assert (outcome, pending()) == (ProjectOutcome(2, 0, "drained"), {"refs/mr/2"})
    assert ("refs/mr/2" in repository.refs(), (repository.path / "refs/mr/2.lock").exists()) == (True, True)
    (line,) = [line for line in lines if line["event"] == "refs locked"]
    assert (line["log_level"], line["project_id"], line["refs"], line["first"]) == ("warning", PROJECT, 1, "refs/mr/2")
    assert line["reason"].startswith("another process holds its lock")


@pytest.mark.usefixtures("small")
def test_rows_behind_a_page_of_locked_ones_are_reached_in_the_same_run(child, repository):
    rows(*(f"refs/mr/{number}" for number in range(1, 7)))
    lock(repository, *(f"refs/mr/{number}" for number in range(1, 4)))

    done = child()

    assert (done.outcome, done.more) == (ProjectOutcome(3, 0, "drained"), False)
    assert pending() == {"refs/mr/1", "refs/mr/2", "refs/mr/3"}


@pytest.mark.usefixtures("small")
def test_a_child_counts_the_rows_of_all_its_pages(child, repository):
    rows("refs/mr/1", "refs/mr/2", "HEAD", "refs/mr/3", "HEAD")
    lock(repository, "refs/mr/1", "refs/mr/2")

    assert child().outcome == ProjectOutcome(1, 2, "drained")


def test_a_ref_that_was_locked_goes_once_it_is_free(child, repository):
    rows("refs/mr/1", "refs/mr/2")
    lock(repository, "refs/mr/1")
    child()
    (repository.path / "refs/mr/1.lock").unlink()

    outcome = child().outcome

    assert (outcome, pending()) == (ProjectOutcome(1, 0, "drained"), set())


def test_locked_refs_behind_the_last_deletion_are_not_asked_for_one_by_one(child, repository, tmp_path, monkeypatch):
    monkeypatch.setattr(cleaning, "MAX_DELETES", 5)
    rows("refs/a", "refs/b", "refs/c", "refs/d", *(f"refs/mr/{number}" for number in range(1, 7)))
    lock(repository, *(f"refs/mr/{number}" for number in range(1, 7)))
    calls = counted(tmp_path, monkeypatch)

    child()

    assert calls("update-ref") <= 3


@pytest.mark.usefixtures("small")
def test_a_child_that_comes_to_its_maximum_leaves_a_successor_who_finishes(child, repository):
    rows(*(f"refs/mr/{number}" for number in range(1, 6)))

    first, second = child(), child()

    assert (first.outcome, first.more) == (ProjectOutcome(3, 0, "max_deletes"), True)
    assert (second.outcome, second.more) == (ProjectOutcome(2, 0, "drained"), False)
    assert pending() == set()


@pytest.mark.usefixtures("small")
def test_a_child_that_comes_to_its_maximum_with_its_last_row_leaves_no_successor(child, repository):
    rows("refs/mr/1", "refs/mr/2", "HEAD")

    done = child()

    assert (done.outcome, done.more) == (ProjectOutcome(2, 1, "drained"), False)


@pytest.mark.usefixtures("small")
def test_refused_rows_count_towards_the_maximum(child, repository):
    rows("HEAD", "HEAD", "HEAD", "refs/mr/1")

    assert child().outcome == ProjectOutcome(0, 3, "max_deletes")


@pytest.mark.usefixtures("small")
def test_a_locked_row_alone_is_no_reason_for_a_successor(child, repository):
    rows("refs/mr/1", "refs/mr/2", "refs/mr/3", "refs/mr/4")
    lock(repository, "refs/mr/1")

    assert child().outcome == ProjectOutcome(3, 0, "drained")


def test_ten_thousand_rows_go_in_one_transaction_and_the_next_is_the_successors(
    child, repository, tmp_path, monkeypatch
):
    repository.packed(*(f"refs/mr/{number}" for number in range(1, MAX_DELETES + 3)))
    database.execute_sql(ADD_REFS, (MAX_DELETES + 1,))
    calls = counted(tmp_path, monkeypatch)

    first = child()
    transactions = calls("update-ref")
    second = child()

    assert (first.outcome, first.more, transactions) == (ProjectOutcome(MAX_DELETES, 0, "max_deletes"), True, 1)
    assert (second.outcome, second.more) == (ProjectOutcome(1, 0, "drained"), False)
    assert [name for name in repository.refs() if name.startswith("refs/mr/")] == [f"refs/mr/{MAX_DELETES + 2}"]


def test_a_busy_lease_is_not_reported_as_a_failure(child, repository):
    row("refs/mr/1")

    with (
        lease(client, f"clean_project_refs:{PROJECT}", ttl=timedelta(seconds=15), holder="another"),
        capture_logs() as lines,
    ):
        done = child()

    assert (done.outcome, done.more) == (ProjectOutcome(0, 0, "lease_held"), False)
    assert {line["log_level"] for line in lines} == {"info"}
    assert (pending(), "refs/mr/1" in repository.refs()) == ({"refs/mr/1"}, True)


def test_a_lease_of_another_project_is_not_in_the_way(child, repository):
    row("refs/mr/1", project=PROJECT + 1)

    with lease(client, f"clean_project_refs:{PROJECT}", ttl=timedelta(seconds=15), holder="another"):
        outcome = child(PROJECT + 1).outcome

    assert outcome == ProjectOutcome(0, 0, "drained", gone=1)


def test_a_lease_does_not_expire_under_a_long_run(clean, in_the_middle):
    row("refs/mr/1")
    first, go = in_the_middle(dead_after=3.0)
    began = time.monotonic()
    assert wait_until(lambda: time.monotonic() > began + 4, LIMIT)
    second = clean(dead_after=3.0)
    (held,) = leases(client)
    go()

    assert (second.stopped, held.holder) == ("lease_held", identity())
    assert first.result() == ProjectOutcome(1, 0, "drained")


def test_the_lease_of_a_dead_child_is_free_after_the_time_that_settings_give_it(in_the_middle):
    row("refs/mr/1")
    first, go = in_the_middle(dead_after=3_600.0)

    (held,) = leases(client)
    go()
    first.result()

    assert timedelta(minutes=59) < held.left <= timedelta(minutes=60)


@pytest.mark.usefixtures("small")
def test_a_child_works_no_longer_than_it_may_hold_its_lease(clean, repository):
    rows("refs/mr/1", "refs/mr/2", "refs/mr/3", "refs/mr/4")
    # Waiting for it takes a second.
    lock(repository, "refs/mr/1")

    with pytest.raises(LeaseLost):
        clean(within=timedelta(minutes=1), declared=replace(clean_project_refs, budget=timedelta(seconds=0.5)))

    assert pending() == {"refs/mr/1", "refs/mr/4"}


@pytest.mark.usefixtures("small")
def test_a_child_that_has_lost_its_lease_consumes_nothing_more(clean, repository):
    rows("refs/mr/1", "refs/mr/2", "refs/mr/3", "refs/mr/4")
    lock(repository, "refs/mr/1")

    with pytest.raises(LeaseLost):
        clean(safe_point=lambda: break_lease(client, f"clean_project_refs:{PROJECT}"))

    assert pending() == {"refs/mr/1", "refs/mr/4"}
    assert "refs/mr/4" in repository.refs()


def test_of_a_project_that_is_gone_the_rows_are_processed_without_git(child, root, tmp_path, monkeypatch):
    rows("refs/mr/1", "HEAD")
    calls = counted(tmp_path, monkeypatch)

    outcome = child().outcome

    assert (outcome, pending(), calls()) == (ProjectOutcome(0, 0, "drained", gone=2), set(), 0)


def test_of_a_repository_that_is_gone_the_rows_are_processed_without_git(child, root, tmp_path, monkeypatch):
    Project.create(id=PROJECT, disk_path="gone.git")
    rows("refs/mr/1", "refs/mr/2")
    calls = counted(tmp_path, monkeypatch)

    outcome = child(missing=True).outcome

    assert (outcome, pending(), calls()) == (ProjectOutcome(0, 0, "drained", gone=2), set(), 0)


def test_a_child_that_the_parent_has_not_told_of_it_closes_no_row_of_a_missing_repository(child):
    Project.create(id=PROJECT, disk_path="gone.git")
    row("refs/mr/1")

    outcome = child().outcome

    assert (outcome, pending()) == (ProjectOutcome(0, 0, "missing"), {"refs/mr/1"})


def test_a_repository_that_is_there_after_all_is_worked_on(child, repository):
    row("refs/mr/1")

    outcome = child(missing=True).outcome

    assert (outcome, "refs/mr/1" in repository.refs()) == (ProjectOutcome(1, 0, "drained"), False)


def repositories(root, count, *, missing):
    """Let so many projects have pending rows, and all but the first *missing* of them a repository."""
    projects(count)
    for number in range(1, count + 1):
        Project.create(id=number, disk_path=f"{number}.git")
        if number > missing:
            (root / f"{number}.git").mkdir()


def believed_missing():
    """The projects whose children were told that their repositories are missing."""
    calls = [Message.decode(body).args for body in client.hvals(f"{QUEUE}.msgs")]
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

    assert (believed_missing(), len(on_their_way())) == (set(), count - missing)


def test_a_run_that_does_not_believe_what_is_missing_keeps_how_many_there_were(parent, root):
    repositories(root, 5, missing=3)

    with pytest.raises(RepositoriesMissing):
        parent()

    assert JobRun.get().result == asdict(Outcome(2, 2, 0, "drained", 3))


def test_whoever_knows_that_they_are_gone_can_say_so(parent, root):
    repositories(root, 5, missing=3)

    parent(missing_repositories=1.0)

    assert believed_missing() == {1, 2, 3}


def test_projects_that_the_database_has_deleted_are_not_missed(parent, root):
    projects(5)

    run = parent()

    assert (run.result["total_projects"], run.result["missing_repositories"]) == (5, 0)


@pytest.mark.parametrize(
    ("there", "named"), [("x.git", "x"), ("x", "x.git")], ids=["lacks its .git", "has a .git too much"]
)
def test_a_path_that_is_spelt_otherwise_than_its_folder_is_not_believed_to_be_missing(parent, root, there, named):
    repositories(root, 3, missing=0)
    (root / there).mkdir()
    Project.update(disk_path=named).where(Project.id == 2).execute()

    with pytest.raises(RepositoriesMissing, match=f"project 2 has no repository at {named}, but .* at {there}:"):
        parent()

    assert on_their_way() == [1, 3]


def test_another_root_with_any_sentinel_costs_no_row(parent, root, tmp_path):
    repositories(root, 3, missing=0)
    elsewhere = put_root(tmp_path / "elsewhere")

    with pytest.raises(RepositoriesMissing):
        parent(repositories_root=elsewhere)

    assert (on_their_way(), GitRefDeletion.pending().count()) == ([], 3)


def test_of_a_repository_that_is_inside_another_and_gone_the_outer_one_keeps_its_refs(child, repository):
    Project.create(id=8, disk_path=f"{repository.disk_path}/inner.git")
    row("refs/mr/1", project=8)

    child(8)

    assert "refs/mr/1" in repository.refs()


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


def test_a_child_that_knows_of_no_folder_of_repositories_consumes_nothing(child, repository):
    row("refs/mr/1")

    with pytest.raises(RootUnavailable):
        child(repositories_root=None)

    assert pending() == {"refs/mr/1"}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("project", ["there", "gone"])
def test_a_disk_that_vanishes_between_two_pages_costs_no_row_from_then_on(clean, repository, root, project):
    rows("refs/mr/1", "refs/mr/2", "refs/mr/3", "refs/mr/4")
    lock(repository, "refs/mr/1")

    def vanish():
        root.rename(root.with_name("away"))
        if project == "gone":
            Project.delete().execute()

    with pytest.raises(RootUnavailable):
        clean(safe_point=vanish)

    assert pending() == {"refs/mr/1", "refs/mr/4"}


@pytest.mark.parametrize("command", ["for-each-ref", "update-ref"])
def test_a_disk_that_vanishes_while_git_is_at_work_costs_no_row(child, repository, tmp_path, monkeypatch, command):
    rows("refs/mr/1", "refs/gone")
    vanish = f'case "$*" in *{command}*) mv {repository.root} {tmp_path}/away;; esac'
    stand_in(tmp_path / "bin", monkeypatch, f'{vanish}\nexec $GIT "$@"')

    with pytest.raises(RootUnavailable):
        child()

    assert pending() == {"refs/mr/1", "refs/gone"}


@pytest.mark.parametrize("name", ["packed-refs.lock", "packed-refs.new"])
def test_a_stale_lock_of_the_repository_is_reported_and_left_and_costs_no_row(clean, repository, name):
    row("refs/mr/1")
    (repository.path / name).touch()

    with pytest.raises(RepositoryLocked) as caught:
        clean(within=timedelta(seconds=3))

    assert (caught.value.path, pending(), (repository.path / name).exists()) == (name, {"refs/mr/1"}, True)
    assert caught.value.age is not None


def test_a_folder_that_is_no_repository_costs_no_row(child, root):
    (root / "broken.git").mkdir()
    Project.create(id=PROJECT, disk_path="broken.git")
    row("refs/mr/1")

    with pytest.raises(RepositoryFailed):
        child()

    assert pending() == {"refs/mr/1"}


def test_a_git_that_hangs_is_ended_at_the_deadline_and_costs_no_row(clean, repository, tmp_path, monkeypatch):
    row("refs/mr/1")
    hang(tmp_path, monkeypatch, repository)

    with capture_logs() as lines:
        outcome = clean(within=timedelta(seconds=2))

    assert (outcome, pending(), repository.locks()) == (ProjectOutcome(0, 0, "deadline"), {"refs/mr/1"}, [])
    (line,) = [line for line in lines if line["event"] == "git ended, it took too long"]
    assert (line["log_level"], line["project_id"]) == ("warning", PROJECT)


def test_a_child_has_as_much_time_as_it_may_hold_its_lease(child, repository, tmp_path, monkeypatch):
    monkeypatch.setitem(vars(clean_project_refs), "budget", timedelta(seconds=2))
    row("refs/mr/1")
    hang(tmp_path, monkeypatch, repository)
    began = time.monotonic()

    outcome = child().outcome

    assert (outcome.stopped, 2 <= time.monotonic() - began < 10) == ("deadline", True)


def test_the_locks_that_a_killed_git_may_have_left_are_reported(clean, repository, tmp_path, monkeypatch):
    row("refs/mr/1")
    deaf = f"trap '' TERM\ntouch {repository.path}/packed-refs.lock\nwhile :; do sleep 0.05; done"
    stand_in(tmp_path / "bin", monkeypatch, f'case "$*" in *update-ref*) {deaf}\nesac\nexec $GIT "$@"')

    with capture_logs() as lines:
        clean(within=timedelta(seconds=2))

    (line,) = [line for line in lines if line["event"] == "git ended, it took too long"]
    assert "packed-refs.lock" in str(line)


def test_after_a_git_that_hung_the_next_child_finishes(clean, child, repository, tmp_path):
    row("refs/mr/1")
    with pytest.MonkeyPatch.context() as patch:
        hang(tmp_path, patch, repository)
        clean(within=timedelta(seconds=2))

    outcome = child().outcome

    assert (outcome, "refs/mr/1" in repository.refs()) == (ProjectOutcome(1, 0, "drained"), False)


@pytest.mark.usefixtures("small")
def test_a_child_ends_at_its_deadline_after_its_page(clean, repository):
    rows("refs/mr/1", "refs/mr/2", "refs/mr/3", "refs/mr/4")
    lock(repository, "refs/mr/1")
    reached = []

    outcome = clean(clock=lambda: 600.0 if reached else 0.0, safe_point=lambda: reached.append(True))

    assert (outcome, pending()) == (ProjectOutcome(2, 0, "deadline"), {"refs/mr/1", "refs/mr/4"})


@pytest.mark.usefixtures("small")
def test_a_child_that_is_asked_to_stop_ends_after_its_page_and_leaves_no_successor(child, repository):
    rows(*(f"refs/mr/{number}" for number in range(1, 6)))
    shutdown.requested.set()
    try:
        done = child()
    finally:
        shutdown.requested.clear()

    assert (done.outcome, done.more) == (ProjectOutcome(3, 0, "deadline"), False)


def test_a_child_keeps_to_the_pace_of_the_batch(child, repository):
    rows("refs/mr/1", "refs/mr/2")
    began = time.monotonic()

    child(pace_git_ref_cleanup=4.0)

    assert time.monotonic() - began >= 0.5


def test_a_crash_between_git_and_table_repeats_a_harmless_deletion(child, repository):
    rows("refs/mr/1", "HEAD", "refs/gone", "refs/mr/2")
    row("refs/mr/3", expected_oid=ELSEWHERE)
    with failing_updates(), pytest.raises(pw.InternalError):
        child()
    assert not {"refs/mr/1", "refs/mr/2"} & set(repository.refs())
    assert len(pending()) == 5

    outcome = child().outcome

    assert outcome == ProjectOutcome(3, 2, "drained")
    assert statuses() == {
        "refs/mr/1": PROCESSED,
        "HEAD": REJECTED,
        "refs/gone": PROCESSED,
        "refs/mr/2": PROCESSED,
        "refs/mr/3": REJECTED,
    }
    assert {f"refs/mr/{number}" for number in range(3, 7)} <= set(repository.refs())


def test_a_ref_that_was_made_anew_after_a_crash_survives_where_its_row_says_what_it_was(child, repository):
    row("refs/mr/1", expected_oid=repository.one)
    with failing_updates(), pytest.raises(pw.InternalError):
        child()
    repository.git("update-ref", "refs/mr/1", repository.two)

    outcome = child().outcome

    assert (outcome, repository.refs()["refs/mr/1"]) == (ProjectOutcome(0, 1, "drained"), repository.two)


def test_a_row_that_somebody_closes_while_git_is_at_work_stays_as_it_is_and_is_not_counted(in_the_middle, other):
    mine, theirs = rows("refs/mr/1", "refs/mr/2")
    working, go = in_the_middle()
    other.execute(
        "update batched_git_ref_updates_deletions set status = 3, reason = 'by hand' where id = %s", (theirs,)
    )
    go()

    assert working.result() == ProjectOutcome(1, 0, "drained")
    assert (GitRefDeletion.get_by_id(mine).status, GitRefDeletion.get_by_id(theirs).reason) == (PROCESSED, "by hand")


def test_git_is_at_work_in_no_database_transaction(in_the_middle, other):
    row("refs/mr/1")
    working, go = in_the_middle()
    other.execute(IDLE_IN_TRANSACTION)
    transactions = other.fetchall()
    other.execute(LOCKS)
    held = other.fetchall()
    go()
    working.result()

    assert (transactions, held) == ([], [])


def test_in_a_database_transaction_nothing_is_begun(clean, repository):
    row("refs/mr/1")

    with pytest.raises(LeaseInTransaction), database.atomic():
        clean()

    assert (pending(), "refs/mr/1" in repository.refs()) == ({"refs/mr/1"}, True)


def deaf_database(clean, **_):
    with failing_updates():
        clean()


def vanished(clean, repository, **_):
    repository.root.rename(repository.root.with_name("away"))
    clean()


def hung(clean, tmp_path, monkeypatch, repository, **_):
    hang(tmp_path, monkeypatch, repository)
    clean(within=timedelta(seconds=2))


def locked_repository(clean, repository, **_):
    (repository.path / "packed-refs.lock").touch()
    clean(within=timedelta(seconds=2))


WAYS_OUT = {
    "drained": lambda clean, **_: clean(),
    "after the last row": lambda clean, **_: [clean(), clean()],
    "deadline": lambda clean, **_: clean(clock=Clock(step=400.0)),
    "crash": lambda clean, **_: clean(safe_point=crash),
    "database": deaf_database,
    "root gone": vanished,
    "hung git": hung,
    "repository locked": locked_repository,
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("way", WAYS_OUT.values(), ids=list(WAYS_OUT))
def test_the_lease_is_free_after_every_way_out(clean, repository, tmp_path, monkeypatch, way):
    rows("refs/mr/1", "refs/mr/2", "refs/mr/3", "refs/mr/4")
    way_out = {"repository": repository, "tmp_path": tmp_path, "monkeypatch": monkeypatch}
    errors = (Crash, pw.InternalError, RootUnavailable, RepositoryLocked)

    with suppress(*errors):
        way(clean, **way_out)

    assert nobody_has_a_lease()


def test_the_last_line_of_a_child_carries_its_figures(child, repository):
    rows("refs/mr/1", "HEAD")

    with capture_logs() as lines:
        child()

    (finished,) = [line for line in lines if line["event"] == "child finished"]
    facts = {"total_deletes": 1, "rejected": 1, "stopped": "drained", "more": False, "log_level": "info"}
    assert facts.items() <= finished.items()


def test_a_child_s_message_says_which_run_has_sent_it(parent, repository):
    rows("refs/mr/1")
    run = parent()

    with taken() as message:
        assert message.options[RUN] == run.id


def test_what_the_parent_sends_is_what_a_child_drains(parent, child, repository):
    rows("refs/mr/1", "refs/mr/2")
    parent()

    with taken() as message:
        child(*message.args)

    assert (pending(), depth(client, broker.namespace, "git")) == (
        set(),
        {"ready": 0, "in_flight": 0, "delayed": 0, "dead": 0},
    )
