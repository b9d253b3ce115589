"""Rights that neither the role on the views nor anybody else who uses the database gets by the adopted views."""

import psycopg2
import pytest

from tests.harness.adopted import KEEPER, VIEWS, session
from tests.harness.every import every
from tests.harness.gitlab_tables import TABLES, ids

RECORD = (
    "insert into loose_foreign_keys_deleted_records (fully_qualified_table_name, primary_key_value) values (%s, %s)"
)
OTHER_RECORDS = {
    "a table that the views do not delete from": ("anything.projects", 1),
    "a status that is still there": ("anything.user_statuses", 2),
    "an artifact that is still there": ("anything.p_ci_job_artifacts", 1),
    "a partition": ("anything.ci_job_artifacts_102", 10**9),
    "no table": ("", 1),
}


def refused(keeper, statement, values=None, *, because):
    """See that the statement is refused for that reason, and end the transaction."""
    keeper.execute(f"set search_path = forgekeeper, {VIEWS}")
    with pytest.raises(psycopg2.errors.WithCheckOptionViolation, match=because):
        keeper.execute(statement, values)
    keeper.connection.rollback()


@every("record", OTHER_RECORDS)
def test_gitlab_is_told_of_no_deletion_but_that_of_a_row_which_a_view_has_deleted(keeper, record):
    refused(keeper, RECORD, OTHER_RECORDS[record], because="is told of deletions alone")


CHANGES = {
    "bulk_imports set status = 2": "bulk_imports where status = 0",
    "bulk_imports set status = 3": "bulk_imports where status = 2",
    "bulk_imports set status = 3, has_failures = true": "bulk_imports where status = 0 and updated_at > now() - interval '23 hours'",
    "bulk_import_entities set status = -1": "bulk_import_entities where status = 1",
    "bulk_import_entities set status = 3": "bulk_import_entities where updated_at > now() - interval '23 hours' and status = 1",
    "bulk_import_trackers set status = 3": "bulk_import_trackers where status = 0",
    "bulk_import_trackers set status = 4": "bulk_import_trackers where status = 2",
    "batched_git_ref_updates_deletions set status = 1": "batched_git_ref_updates_deletions where status = 2",
    "batched_git_ref_updates_deletions set status = 4": "batched_git_ref_updates_deletions where status = 1",
}


@every("change", CHANGES)
def test_a_change_that_no_batch_makes_is_refused(keeper, change):
    refused(keeper, f"update {change} where id = (select min(id) from {CHANGES[change]})", because="alone")


@every("change", ["user_statuses set user_id = 999 where user_id = 2", "ci_job_artifacts set id = 999 where id = 4"])
def test_the_right_to_lock_a_row_does_not_change_its_id(keeper, change):
    refused(keeper, f"update {change}", because="they are not changed")


def test_bytes_are_only_taken_off(keeper):
    keeper.execute("update project_statistics set build_artifacts_size = build_artifacts_size + 1 where project_id = 1")

    assert keeper.rowcount == 0


def test_an_object_that_a_live_artifact_names_is_not_handed_over_to_gitlab(keeper):
    keeper.execute("select id, file_final_path from ci_job_artifacts where file_final_path <> '' order by id limit 2")
    (gone, path), (_, named) = keeper.fetchall()
    keeper.execute(f"delete from ci_job_artifacts where id = {gone}")
    hand_over = "insert into ci_deleted_objects (project_id, file_store, store_dir, file) values (1, 2, %s, %s)"

    for one in (path, named):
        keeper.execute(hand_over, one.rsplit("/", 1))

    keeper.execute("select store_dir || '/' || file from ci_deleted_objects")
    assert keeper.fetchall() == [(path,)]


# Others who use the database

# Each fits better than what PostgreSQL has, by its types.  Whoever runs it becomes the owner of a table.
TAKEN = f"""
    create function {TABLES}.taken(text) returns text language plpgsql as $$
    begin
        create table {TABLES}.proof ();
        return $1;
    end $$
"""
ATTACKS = {
    "a function": f"""
        create function {TABLES}.format(text, name) returns text
            return {TABLES}.taken(replace($1, '%I', quote_ident($2)));
        create function {TABLES}.format(text, text, text) returns text
            return {TABLES}.taken(pg_catalog.format($1, variadic array[$2, $3]))
    """,
    "an operator": f"""
        create function {TABLES}.joined(name, text) returns text return {TABLES}.taken(concat($1, $2));
        create operator {TABLES}.|| (leftarg = name, rightarg = text, function = {TABLES}.joined)
    """,
}


@pytest.fixture
def mallory(adopted, urls):
    """A session of a role that may create in the schema of the tables, and nothing else."""
    adopted.execute(f"create role mallory login; grant usage, create on schema {TABLES} to mallory")
    with session(urls.database) as cursor:
        cursor.connection.autocommit = True
        cursor.execute("set session authorization mallory")
        yield cursor
    adopted.execute("drop owned by mallory cascade; drop role mallory")


@every("attack", ATTACKS)
def test_what_another_puts_into_the_tables_schema_does_not_run_as_their_owner(keeper, mallory, attack):
    mallory.execute(f"begin; {TAKEN}; {ATTACKS[attack]}; commit")

    keeper.execute(f"set search_path = forgekeeper, {VIEWS}; delete from user_statuses where user_id = 6")

    keeper.execute("select relowner::regrole::text from pg_class where relname = 'proof'")
    owner = keeper.fetchall()
    keeper.connection.rollback()
    mallory.execute(f"drop function {TABLES}.taken cascade")
    assert owner == []


def test_nobody_but_the_owner_can_put_a_function_of_the_views_on_another_table(adopted):
    definers = f"select oid from pg_proc where pronamespace = '{VIEWS}'::regnamespace and prosecdef"

    assert len(ids(adopted, definers)) == 7
    assert ids(adopted, f"{definers} and has_function_privilege('{KEEPER}', oid, 'execute')") == set()
