"""GitLab's own tables, kept clean by real schedulers and workers that have rights on the views alone."""

import json
from collections import defaultdict

import pytest

from forgekeeper.api.batches import BATCHES
from forgekeeper.platform import database as db
from forgekeeper.platform.connections import ServerTimeouts, client, configure_clients
from forgekeeper.targets import sentinel
from tests.harness import gitlab_tables
from tests.harness.adopted import VIEWS, adopt, as_keeper, role_of_forgekeeper, tables_of_gitlab
from tests.harness.git_samples import BareRepository
from tests.harness.gitlab_tables import rows
from tests.harness.installation import INSTALLATION
from tests.harness.stale_uploads import STALE
from tests.harness.stores import Folder
from tests.harness.tables import empty
from tests.harness.waiting import wait_until

LIMIT = 240.0
COUNTS = {"artifacts": 20_000, "statuses": 5_000, "imports": 3_000, "deletions": 2_000}
LOCATIONS = {1: "artifacts_local", 2: "artifacts"}
OBJECTS = f"select id, file_store, file_final_path from {VIEWS}.ci_job_artifacts where file_final_path <> ''"
PENDING = """
    select project_id, ref from p_batched_git_ref_updates_deletions where status = 1 and project_id <= {projects} - 3
"""
# An import has failures where it or one of its entities that has some was given up.
FAILED = """
    select id, coalesce(has_failures, false) or exists (
        select from bulk_import_entities as entity
        where bulk_import_id = import.id and (entity.id = any(%(entities)s) or import.id = any(%(imports)s)) and (
            has_failures or exists (select from bulk_import_failures where bulk_import_entity_id = entity.id)
        )
    )
    from bulk_imports as import order by id
"""
SAID_FAILED = "select id, coalesce(has_failures, false) from bulk_imports order by id"
# All of what stays, whatever its columns say.
DIGEST = "select md5(string_agg({row}, ' ' order by {key})) from {table} as row where {key} <> all(%s)"
FLAG_ON = """
    insert into features (key) values ('bulk_delete_job_artifacts');
    insert into feature_gates (feature_key, key, value) values ('bulk_delete_job_artifacts', 'boolean', 'true')
"""
ABANDONED, COMPLETED = "ab/cd/@final/ef/01/abandoned", "ab/cd/@final/ef/01/completed"


@pytest.fixture
def gitlab(settings, urls, _migrated):
    """Tables of GitLab's size and shape with views of them; a cursor of their owner."""
    with tables_of_gitlab(urls.database, **COUNTS) as cursor, role_of_forgekeeper(cursor):
        configure_clients(settings, ServerTimeouts.for_worker(settings), name="tests", connections=2)
        with db.database.connection_context():
            empty()
            client.flushdb()
            adopt()
        db.database.close_all()
        cursor.execute(FLAG_ON)
        yield cursor


@pytest.fixture
def stores(gitlab, fast_folder):
    """Both stores, with the object of each artifact where its row says, and of an upload that nobody completed."""
    made = {code: Folder(fast_folder / location) for code, location in LOCATIONS.items()}
    for code, location in LOCATIONS.items():
        sentinel.Store(location, made[code].url).create_sentinel(INSTALLATION)
    for _id, code, path in rows(gitlab, OBJECTS):
        made[code].put(path)
    made[2].put(ABANDONED)
    client.hset("pending_direct_uploads", f"artifacts:{ABANDONED}", int(client.time()[0] - STALE))
    client.hset("pending_direct_uploads", f"artifacts:{COMPLETED}", client.time()[0])
    return made


@pytest.fixture
def repositories(gitlab, root):
    """The projects' repositories, each with the refs that it wants deleted, and one more."""
    wanted = defaultdict(list)
    for project, ref in rows(gitlab, PENDING.format(projects=gitlab_tables.PROJECTS)):
        wanted[project].append(ref)
    made = [
        BareRepository(root, f"@hashed/of/project/{project}.git") for project in range(1, gitlab_tables.PROJECTS - 2)
    ]
    for project, repository in enumerate(made, 1):
        repository.packed("refs/keep", *wanted[project])
    return made


def left(cursor, table, gone, key="id"):
    row = "concat_ws(' ', id, user_id, status, created_at, updated_at)" if table == "bulk_imports" else "row::text"
    return rows(cursor, DIGEST.format(table=table, key=key, row=row), (list(gone),))


def test_all_five_documents_keep_gitlabs_own_tables_clean(*, gitlab, stores, repositories, root, services, urls):
    due = gitlab_tables.find_due(gitlab)
    gone = {"p_ci_job_artifacts": due.artifacts, "bulk_imports": due.imports, "bulk_import_entities": due.entities}
    gone |= {"bulk_import_trackers": due.trackers, "p_batched_git_ref_updates_deletions": due.refs}
    before = {table: left(gitlab, table, ids) for table, ids in gone.items()}
    statuses = left(gitlab, "user_statuses", due.statuses, "user_id")
    failed = rows(gitlab, FAILED, {"entities": list(due.entities), "imports": list(due.imports)})
    statistics = gitlab_tables.left_over(gitlab, without=due.artifacts)
    kept = {
        code: {path for number, of, path in rows(gitlab, OBJECTS) if of == code and number not in due.artifacts}
        for code in stores
    }

    settings = {f"CRON_{name.upper()}": "*/2 * * * * *" for name in BATCHES} | {
        # It removes what is done with long ago.
        "CRON_PRUNE": "off",
        "DATABASE_URL": as_keeper(urls.database),
        "FORGE_SCHEMA": VIEWS,
        "UPLOADS_REGISTER": "hash",
        "REPOSITORIES_ROOT": str(root),
        "OBJECT_STORES": json.dumps({LOCATIONS[code]: store.url for code, store in stores.items()}),
    }
    running = [services(name, name, **settings) for name in ("scheduler", "worker")]

    def done():
        still = gitlab_tables.find_due(gitlab)
        outbox = rows(gitlab, "select count(*) from forgekeeper.deleted_objects")
        uploads = client.hlen("pending_direct_uploads")
        return not any([*still._replace(pathless=()), outbox != [(0,)], uploads > 1])

    assert wait_until(done, LIMIT), gitlab_tables.find_due(gitlab)
    assert [service.stop() for service in running] == [0, 0]

    assert {table: left(gitlab, table, ids) for table, ids in gone.items()} == before
    assert left(gitlab, "user_statuses", (), "user_id") == statuses
    assert rows(gitlab, SAID_FAILED) == failed
    assert gitlab_tables.statistics(gitlab) == statistics
    assert {code: store.keys() for code, store in stores.items()} == kept
    assert [repository.refs().keys() for repository in repositories] == [{"refs/heads/main", "refs/keep"}] * len(
        repositories
    )
    assert rows(gitlab, "select count(*) from forgekeeper.quarantine") == [(0,)]
