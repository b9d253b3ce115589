"""The documents' batches over GitLab's tables, as a role that has rights on the views alone: what is due goes, no more."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from peewee import SQL

from forgekeeper.api.batches import BATCHES
from forgekeeper.guards import preconditions
from forgekeeper.platform import database as db
from forgekeeper.platform.connections import client
from forgekeeper.sources.outbox import DeletedObject
from forges import adoption
from forges.gitlab.adoption import ADOPTION_CLASS
from models import WAITING_CONDITIONS, GitRefDeletion, JobArtifact, UserStatus
from tests.harness import artifacts, bulk_imports, gitlab_tables
from tests.harness.adopted import KEEPER, VIEWS
from tests.harness.artifacts import buckets
from tests.harness.git_samples import BareRepository, put_root
from tests.harness.gitlab_tables import ids, rows
from tests.harness.performing import perform, run_child_as_worker
from tests.harness.settings import settings_with
from workers.expired_job_artifacts import FLAG, HIGH_CONCURRENCY_FLAG
from workers.git_ref_cleanup import clean_project_refs
from workers.user_status_cleanup import user_status_cleanup

NUMBER = 3
"""The project whose repository there is."""


@pytest.fixture
def due(gitlab):
    return gitlab_tables.find_due(gitlab)


def all_but(cursor, table, gone, *, key="id"):
    return ids(cursor, f"select {key} from {table}") - gone


def test_statuses_whose_time_has_passed_go(gitlab, due):
    stay = all_but(gitlab, "user_statuses", due.statuses, key="user_id")

    outcome = perform(user_status_cleanup)

    assert (outcome.deleted, ids(gitlab, "select user_id from user_statuses")) == (len(due.statuses), stay)


def test_expired_artifacts_go_from_all_partitions_and_their_bytes_and_objects_with_them(gitlab, due):
    stay = all_but(gitlab, "p_ci_job_artifacts", due.artifacts)
    statistics = gitlab_tables.left_over(gitlab, without=due.artifacts)
    found = dict(rows(gitlab, f"select id, file_final_path from {VIEWS}.ci_job_artifacts"))
    gitlab.execute("insert into features (key) values (%s)", (FLAG,))
    gitlab.execute("insert into feature_gates (feature_key, key, value) values (%s, 'boolean', 'true')", (FLAG,))
    buckets.tidy(client, artifacts.BUCKETS)

    destroyed = sum(artifacts.run().destroyed for _ in range(artifacts.BUCKETS))

    assert (destroyed, ids(gitlab, "select id from p_ci_job_artifacts")) == (len(due.artifacts), stay)
    assert gitlab_tables.statistics(gitlab) == statistics
    assert {row.path for row in DeletedObject.select()} == {found[number] for number in due.artifacts} - {""}


def test_an_expired_artifact_whose_path_cannot_be_computed_stays_and_is_counted(gitlab, due):
    waiting = {
        row.id
        for row in JobArtifact.select().where(JobArtifact.expire_at < db.now(), SQL(WAITING_CONDITIONS["no_path"]))
    }

    assert (waiting, len(waiting) > 0) == (due.pathless, True)


def test_an_index_of_paths_that_the_functions_compute_otherwise_today_is_noticed(gitlab):
    for statement in adoption.plan_adoption(ADOPTION_CLASS, gitlab_tables.TABLES, VIEWS, None).find_missing_indexes():
        gitlab.execute(statement)
    day = f"create or replace function {VIEWS}.day(instant timestamptz, form integer) returns text language sql"
    before = JobArtifact.overlooked()
    gitlab.execute(f"{day} immutable return left('2000_01_01', form)")

    def look():
        with db.database.connection_context():
            db.database.execute_sql("set enable_seqscan = off")
            return JobArtifact.overlooked()

    # Another session: the one from before goes on with the expression that the index had.
    with ThreadPoolExecutor(1) as thread:
        after = thread.submit(look).result()

    assert (before, after != set()) == (set(), True)


def test_imports_that_nothing_has_touched_are_given_up_with_their_entities_and_trackers(gitlab, due):
    stay = rows(gitlab, "select id, status from bulk_import_trackers where id <> all(%s)", (list(due.trackers),))

    outcome = bulk_imports.run()

    assert (outcome.imports, outcome.entities, outcome.trackers) == (
        len(due.imports),
        len(due.entities),
        len(due.trackers),
    )
    assert ids(gitlab, "select id from bulk_imports where status = 3") >= due.imports
    assert ids(gitlab, "select id from bulk_import_trackers where status = 4") >= due.trackers
    assert set(stay) <= set(rows(gitlab, "select id, status from bulk_import_trackers"))


def test_refs_that_a_project_wants_deleted_go_from_its_repository(gitlab, settings, tmp_path):
    repository = BareRepository(put_root(tmp_path / "root"), f"@hashed/of/project/{NUMBER}.git")
    wanted = ids(
        gitlab, f"select ref from p_batched_git_ref_updates_deletions where project_id = {NUMBER} and status = 1"
    )
    repository.packed("refs/mr/0", *wanted)
    settings = settings_with(repositories_root=repository.root, dead_after=timedelta(seconds=15))

    child = run_child_as_worker(clean_project_refs, settings, NUMBER, False)

    assert child.outcome.total_deletes == len(wanted) > 0
    assert wanted.isdisjoint(repository.refs())
    assert NUMBER not in {row.project_id for row in GitRefDeletion.select_pending()}


def test_both_flags_are_the_forge_s(gitlab):
    gitlab.execute("insert into features (key) values (%s)", (HIGH_CONCURRENCY_FLAG,))
    artifacts.turn_on(high_concurrency=True)

    assert artifacts.run().stopped == "no_bucket"
    assert rows(gitlab, "select rolsuper from pg_roles where rolname = %s", (KEEPER,)) == [(False,)]


SWAPPED = {
    "a column, as at the end of a conversion to bigint": (
        JobArtifact,
        """
        alter table p_ci_job_artifacts add locked_2 smallint;
        alter table p_ci_job_artifacts rename locked to locked_old;
        alter table p_ci_job_artifacts rename locked_2 to locked
        """,
    ),
    "a table, as at the end of a partitioning": (
        UserStatus,
        "alter table user_statuses rename to user_statuses_old; create table user_statuses (like user_statuses_old)",
    ),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_a_view_that_shows_what_was_renamed_blocks_its_batches_until_it_is_made_again(gitlab, name):
    model, swap = SWAPPED[name]
    batches = [batch for batch in BATCHES.values() if model in batch.tables]
    before = [said for batch in BATCHES.values() for said in preconditions.find_relation_faults(batch)]

    gitlab.execute(swap)

    table = model._meta.table_name
    assert before == []
    assert [next(preconditions.find_relation_faults(batch)).split(" differs")[0] for batch in batches] == [
        f"view {table}"
    ]
    others = [batch for batch in BATCHES.values() if model not in (*batch.tables, *batch.reads)]
    assert [said for batch in others for said in preconditions.find_relation_faults(batch)] == []
    gitlab.execute(f"reset role; {script()}")
    assert list(preconditions.find_relation_faults(*batches)) == []


def script():
    with db.database.connection_context():
        return (
            "begin;"
            + "\n".join(adoption.plan_adoption(ADOPTION_CLASS, gitlab_tables.TABLES, VIEWS, KEEPER).write_statements())
            + "commit"
        )
