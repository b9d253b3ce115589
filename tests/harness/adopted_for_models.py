"""Views of GitLab's tables that models can insert into, so that tests of the example forge run on them."""

import re
from functools import partial
from pathlib import Path

import pytest

from forgekeeper.platform import database as db
from forgekeeper.platform.connections import ServerTimeouts, configure_clients
from forgekeeper.platform.settings import PREFIX
from tests.harness.adopted import VIEWS, adopt, tables_of_gitlab
from tests.harness.gitlab_tables import TABLES
from tests.harness.settings import settings_with

INSERTS = Path(__file__).with_name("gitlab_inserts.sql")
GUARDS = re.compile(
    r"    if [^\n]*old\.status[^;]*raise exception.*?end if;\n|create or replace trigger refuse .*?;\n| and new\.\w+ <= old\.\w+",
    re.DOTALL,
)
"""SQL that refuses changes other than those of the batches.  It is removed: a test acts as the forge and makes any."""
EMPTY = f"""
    truncate p_ci_job_artifacts, project_statistics, projects, project_repositories, user_statuses, bulk_imports,
        bulk_import_entities, bulk_import_trackers, p_batched_git_ref_updates_deletions, ci_job_artifact_states,
        p_ci_job_artifact_reports, p_ci_build_trace_metadata, bulk_import_failures, {VIEWS}.ref_deletion_notes restart identity;
    alter sequence ci_job_artifacts_id_seq restart;
    alter sequence to_be_deleted_git_refs_id_seq restart
"""


@pytest.fixture(scope="module")
def views_for_models(urls, _migrated):
    """Empty tables of GitLab, with views that models can insert into."""
    with tables_of_gitlab(urls.database) as cursor:
        settings = settings_with(database_url=urls.database, redis_url=urls.redis)
        configure_clients(settings, ServerTimeouts.for_worker(settings), name="tests", connections=2)
        with db.database.connection_context():
            built = list(adopt(partial(GUARDS.sub, ""), role=None).find_missing_indexes())
        db.database.close_all()
        cursor.execute(f"set search_path = {VIEWS}; {INSERTS.read_text()}; set search_path = {TABLES}")
        for statement in built:
            cursor.execute(statement)
        yield cursor


@pytest.fixture
def over_views(views_for_models, monkeypatch, no_settings_of_the_machine):
    """Run a test of the example forge on empty views of GitLab's tables, in every session."""
    views_for_models.execute(EMPTY)
    views_for_models.execute("select format('alter role %I in database %I', current_user, current_database())")
    (role,) = views_for_models.fetchone()
    views_for_models.execute(f"{role} set search_path = forgekeeper, {VIEWS}")
    monkeypatch.setenv(f"{PREFIX}FORGE_SCHEMA", VIEWS)
    yield
    views_for_models.execute(f"{role} reset search_path")
