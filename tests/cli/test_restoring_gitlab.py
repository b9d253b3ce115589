"""Artifacts of a GitLab that were destroyed wrongly come back as they were, in all tables, or not at all."""

from datetime import timedelta

import psycopg2
import pytest

from forgekeeper.audit.deletions import Audit
from forgekeeper.cli.console.pages import PageRequest
from forgekeeper.cli.console.undo import show_undo
from forgekeeper.platform import database as db
from models import CLASS_COUNT
from tests.harness import gitlab_tables
from tests.harness.adopted import VIEWS
from tests.harness.artifacts import destroy_chunk
from tests.harness.gitlab_tables import rows
from tests.harness.settings import settings_with

RUN = 17
TABLES = (
    *("p_ci_job_artifacts", "ci_job_artifact_states", "p_ci_job_artifact_reports", "p_ci_build_trace_metadata"),
    *("project_statistics", "ci_deleted_objects"),
)
# Columns that no batch reads, and rows that PostgreSQL deletes with artifacts.
OF_THE_FORGE_ALONE = """
    update p_ci_job_artifacts set accessibility = mod(id, 3), file_format = mod(id, 4),
        file_sha256 = case when mod(id, 5) > 0 then sha256(id::text::bytea) end;
    insert into ci_job_artifact_states select id, partition_id from p_ci_job_artifacts where mod(id, 3) = 0;
    insert into p_ci_job_artifact_reports select id, partition_id from p_ci_job_artifacts where mod(id, 4) = 0;
    insert into p_ci_build_trace_metadata select id * 10 + more, partition_id, id
        from p_ci_job_artifacts, generate_series(0, 1) as more where mod(id, 7) = 0
"""


def whole(cursor):
    return {
        table: rows(cursor, f"select tableoid::regclass::text, line::text from {table} as line order by 1, 2")
        for table in TABLES
    }


@pytest.fixture
def destroyed(gitlab, store):
    """Destroy what has expired; yield what all tables were like before."""
    gitlab.execute(OF_THE_FORGE_ALONE)
    before, due = whole(gitlab), gitlab_tables.find_due(gitlab).artifacts
    audit = Audit("expired_job_artifacts", on=True, run=RUN)
    for number in range(CLASS_COUNT):
        destroy_chunk(number, db.now(), limit=1_000, grace=timedelta(days=1), audit=audit)
    assert len(whole(gitlab)["p_ci_job_artifacts"]) == len(before["p_ci_job_artifacts"]) - len(due)
    return before


def restore(main, cursor):
    cursor.execute("\n".join(main("objects", "hold", "--run", str(RUN), "--json").json["statements"]))


def test_all_tables_are_as_they_were_also_if_it_is_done_twice(main, gitlab, destroyed):
    for _twice in range(2):
        restore(main, gitlab)
        assert whole(gitlab) == destroyed


def test_while_gitlab_recounts_a_project_nothing_comes_back(main, gitlab, destroyed):
    left = whole(gitlab)
    gitlab.execute("insert into project_build_artifacts_size_refreshes (project_id, state) values (9, 4)")

    with pytest.raises(psycopg2.Error, match="GitLab recounts the artifacts of project 9"):
        restore(main, gitlab)
    gitlab.execute("rollback")

    assert whole(gitlab) == left


def test_an_artifact_of_which_the_audit_lacks_columns_does_not_come_back_public(main, gitlab, destroyed):
    left = whole(gitlab)
    statements = "\n".join(main("objects", "hold", "--run", str(RUN), "--json").json["statements"])

    with pytest.raises(psycopg2.Error, match="did not record all of its columns"):
        gitlab.execute(statements.replace('"as_stored"', '"other"'))
    gitlab.execute("rollback")

    assert whole(gitlab) == left


def test_nothing_is_restored_by_a_role_that_has_rights_on_the_views_alone(main, gitlab, destroyed):
    with pytest.raises(Exception, match="permission denied for function restore_artifacts"):
        db.database.execute_sql(f"select {VIEWS}.restore_artifacts('[]')")


def test_without_the_forge_s_function_it_is_said_that_nothing_can_come_back(main, gitlab, destroyed):
    due = gitlab_tables.ids(
        gitlab, "select unnest(ids) from forgekeeper.audit_deletions where record = 'expired_artifact'"
    )
    gitlab.execute(f"drop function {VIEWS}.restore_artifacts(jsonb)")

    result = main("objects", "hold", "--run", str(RUN))

    assert (result.status, "restore_artifacts" in result.stdout) == (1, False)
    preview, checked = main("run", "expired_job_artifacts", "--dry-run").stdout, main("check").stdout
    told = main("audit", "--what", f"artifact:{min(due)}").stdout.lower()
    kinds = show_undo(PageRequest({}, {}, settings_with()))["kinds"]
    (shown,) = (obstacle for kind, obstacle, _ in kinds if kind.called == "artifact")
    for said in (result.stderr, preview, checked, told, shown):
        assert "destroyed artifacts cannot be restored" in said
