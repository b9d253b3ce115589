"""What a role may do with the views of GitLab's tables that has no rights on the tables, and what comes of it there."""

from concurrent.futures import ThreadPoolExecutor

import psycopg2
import pytest

from forges.adoption import MODELS_WITH_VIEWS
from forges.gitlab.adoption import DELETION_RECORD_TABLES
from forges.gitlab.parts import GITLAB_PARTS
from tests.harness import gitlab_tables
from tests.harness.adopted import KEEPER, VIEWS, as_keeper, session
from tests.harness.every import every
from tests.harness.gitlab_tables import PROJECTS, TABLES, ids, rows
from tests.harness.programs import eventually

LOCKED = [model._meta.table_name for model in MODELS_WITH_VIEWS if "update" in model.grants]
FIRST = "(select min(id) from bulk_imports where status = 0 and updated_at < now() - interval '1 day')"
ONE_DELETION = "(select min(id) from batched_git_ref_updates_deletions where status = 1)"
CHANGES = [
    "delete from user_statuses where user_id = 2 returning user_id, clear_status_at",
    "delete from ci_job_artifacts where id = 4 returning id, file_final_path",
    "update project_statistics set build_artifacts_size = build_artifacts_size - 5 where project_id = 1 returning project_id",
    f"update batched_git_ref_updates_deletions set status = 2, reason = null, updated_at = now() where id = {ONE_DELETION} returning status",
    f"delete from batched_git_ref_updates_deletions where id = {ONE_DELETION} returning id, reason",
    f"update bulk_imports set status = 3, updated_at = now(), has_failures = true where id = {FIRST} returning has_failures",
    "update bulk_import_entities set status = 3, updated_at = now() where id = 6 returning source_full_path",
    *(
        "update bulk_import_trackers set status = 4, updated_at = now() where id = (select min(id) from bulk_import_trackers"
        f" where status in (0, 1, 3) and mod(bulk_import_entity_id, 3) = {one}) returning id"
        for one in range(3)
    ),
    "insert into ci_deleted_objects (project_id, file_store, store_dir, file, pick_up_at) values (1, 2, 'a', 'b', now())",
]
WAITING = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and usename = %s"


@every("view", [view for part in GITLAB_PARTS if part.unless_table is None for view in part.views])
def test_the_role_reads_each_view(keeper, view):
    keeper.execute(f"select * from {VIEWS}.{view} limit 1")


@every("view", LOCKED)
def test_the_role_locks_rows_of_each_view_that_is_changed(keeper, view):
    keeper.execute(f"select * from {VIEWS}.{view} limit 2 for update skip locked")

    assert keeper.rowcount == 2


@every("statement", CHANGES)
def test_the_role_changes_what_the_batches_change_one_row_at_a_time(keeper, statement):
    keeper.connection.rollback()
    keeper.execute(f"set search_path = forgekeeper, {VIEWS}; {statement}")

    assert keeper.rowcount == 1


def test_the_role_may_use_no_table_below_the_views(owner):
    owner.execute(
        "select relname from pg_class where relnamespace = any(array[%s, %s]::regnamespace[]) and relkind in ('r', 'p')"
        " and has_table_privilege(%s, oid, 'select, insert, update, delete, truncate')",
        (TABLES, gitlab_tables.PARTITIONS, KEEPER),
    )

    assert owner.fetchall() == []


def ending(number, path, file, location, file_type):
    """Return how the path of an artifact ends; '' of one that has no file, or of which nobody knows where it is."""
    if path or not file:
        return path or ""
    if file_type == 3 or location in {None, 2}:
        return f"/{number}/{file}"
    return f"/{file}" if location == 1 else ""


def test_each_artifact_is_shown_whatever_its_partition_with_its_own_path_or_a_computed_one(keeper, owner):
    keeper.execute("select id, partition_id, file_final_path from ci_job_artifacts")
    shown = {(number, partition): path for number, partition, path in keeper}

    owner.execute("select id, partition_id, file_final_path, file, file_location, file_type from p_ci_job_artifacts")
    for number, partition, *facts in owner:
        found, expected = shown.pop((number, partition)), ending(number, *facts)
        assert found == expected if expected in {"", facts[0]} else found.endswith(expected)
    assert shown == {}


def test_two_sessions_at_once_take_both_their_bytes_off(adopted, urls):
    before = rows(adopted, "select build_artifacts_size, storage_size from project_statistics where project_id = 3")[0]
    with session(as_keeper(urls.database)) as one, session(as_keeper(urls.database)) as two:
        take = f"update {VIEWS}.project_statistics set build_artifacts_size = build_artifacts_size - %s where project_id = 3"
        one.execute(take, (1000,))
        with ThreadPoolExecutor(1) as thread:
            waits = thread.submit(two.execute, f"{take} returning build_artifacts_size, storage_size", (500,))
            eventually(lambda: rows(adopted, WAITING, (KEEPER,)) == [(1,)])
            one.connection.commit()
            waits.result()
        said = two.fetchone()
        two.connection.commit()

    after = rows(adopted, "select build_artifacts_size, storage_size from project_statistics where project_id = 3")[0]
    assert after == said == (before[0] - 1500, before[1] - 1500)


MOVED_ON = {
    "bulk_imports": ("bulk_imports", 3),
    "bulk_import_entities": ("bulk_import_entities", 3),
    "bulk_import_trackers": ("bulk_import_trackers", 4),
    "batched_git_ref_updates_deletions": ("p_batched_git_ref_updates_deletions", 3),
}


@every("view", MOVED_ON)
def test_a_row_that_moves_on_while_the_statement_waits_for_it_stays_as_it_is(adopted, urls, view):
    (table, given_up), finished = MOVED_ON[view], 2
    pending = 1 if view.startswith("batched") else 0
    with session(urls.database) as forge, session(as_keeper(urls.database)) as keeper:
        oldest = f"select id from {table} where status = {pending} order by updated_at, id limit 1"
        forge.execute(f"set search_path = {TABLES}; {oldest}")
        (number,) = forge.fetchone()
        forge.execute(f"update {table} set status = {finished} where id = {number}")
        with ThreadPoolExecutor(1) as thread:
            change = f"update {VIEWS}.{view} set status = {given_up}, updated_at = now() where id = {number} and status = {pending}"
            waits = thread.submit(keeper.execute, change)
            eventually(lambda: rows(adopted, WAITING, (KEEPER,)) == [(1,)])
            forge.connection.commit()
            waits.result()
        changed = keeper.rowcount

    assert (changed, rows(adopted, f"select status from {table} where id = {number}")) == (0, [(finished,)])


def test_an_import_has_failures_where_an_entity_that_was_given_up_has_any(adopted, keeper):
    failed, other = sorted(ids(adopted, "select id from bulk_import_entities where id in (9, 6)"), reverse=True)
    keeper.execute("update bulk_import_entities set status = 3, updated_at = now() where id in (6, 9)")

    keeper.execute("select id, has_failures from bulk_import_entities where id in (6, 9)")
    assert dict(keeper.fetchall()) == {failed: True, other: False}
    keeper.execute("select id, has_failures from bulk_imports where id in (6, 9)")
    assert dict(keeper.fetchall()) == {failed: True, other: False}


def test_a_refused_ref_has_its_reason_until_it_is_tried_again_and_its_partition_can_go(keeper, owner):
    keeper.execute(
        "update batched_git_ref_updates_deletions set status = 3, reason = 'protected', updated_at = now()"
        f" where id = {ONE_DELETION} returning id"
    )
    (number,) = keeper.fetchone()
    look = f"select status, reason, processed_at from batched_git_ref_updates_deletions where id = {number}"
    keeper.execute(look)
    refused = keeper.fetchone()
    keeper.execute(f"update batched_git_ref_updates_deletions set status = 1, reason = null where id = {number}")
    keeper.execute(look)

    assert (refused, keeper.fetchone()) == ((3, "protected", None), (1, None, None))
    owner.execute(
        "select count(*) from pg_constraint where contype = 'f' and confrelid = 'p_batched_git_ref_updates_deletions'::regclass"
    )
    assert owner.fetchone() == (0,)


def test_refs_whose_repository_nobody_here_can_find_stay_hidden_and_those_of_no_project_are_shown(keeper):
    keeper.execute("select distinct project_id from batched_git_ref_updates_deletions")
    shown = {number for (number,) in keeper}

    assert shown == set(range(1, PROJECTS + 2)) - {PROJECTS - 2, PROJECTS}
    keeper.execute("select id, disk_path from projects where id in (1, %s)", (PROJECTS - 1,))
    keeper_s = dict(keeper.fetchall())
    assert keeper_s[1] == "@hashed/of/project/1.git"
    assert keeper_s[PROJECTS - 1].startswith("@hashed/")
    assert keeper_s[PROJECTS - 1].endswith(".git")


GATES = {
    "on": [("boolean", "true")],
    "on_here": [("actors", "FlipperGitlabInstance:gitlab.example")],
    "off": [],
    "off_for_all": [("boolean", "false")],
    "for_a_project": [("actors", "Project:7"), ("percentage_of_actors", "99")],
    "opted_out": [("boolean", "true"), ("actors", "FlipperGitlabInstance:gitlab.example:opt_out")],
}


def test_a_flag_is_on_where_gitlab_has_it_on_for_the_whole_instance(owner, keeper):
    with owner.connection, keeper.connection:
        for name, gates in GATES.items():
            owner.execute("insert into features (key) values (%s)", (name,))
            for gate in gates:
                owner.execute("insert into feature_gates (feature_key, key, value) values (%s, %s, %s)", (name, *gate))
    keeper.execute("select name, enabled from forge_flags")

    assert dict(keeper.fetchall()) == {name: name in {"on", "on_here"} for name in GATES}
    with owner.connection:
        owner.execute("delete from features; delete from feature_gates")


def test_what_the_forge_s_triggers_write_of_a_deletion_names_the_forge_s_own_table(keeper):
    keeper.execute("delete from user_statuses where user_id = 6")

    keeper.execute(
        "select fully_qualified_table_name from loose_foreign_keys_deleted_records where primary_key_value = 6"
    )
    assert keeper.fetchall() == [(f"{TABLES}.user_statuses",)]
    assert DELETION_RECORD_TABLES.fullmatch("loose_foreign_keys_merge_request_diff_commits_deleted_records")


def test_an_object_that_is_left_to_gitlab_is_in_its_outbox(keeper):
    keeper.execute(
        "insert into ci_deleted_objects (project_id, file_store, store_dir, file, pick_up_at)"
        " values (7, 2, 'a/b', 'c', '2026-11-20') returning 1"
    )

    keeper.execute("select project_id, file_store, store_dir, file, pick_up_at::date::text from ci_deleted_objects")
    assert keeper.fetchall() == [(7, 2, "a/b", "c", "2026-11-20")]


def test_a_group_s_projects_are_those_of_its_subgroups_too(keeper):
    keeper.execute("select group_id, count(*) from project_groups group by group_id")

    assert dict(keeper.fetchall()) == {1: PROJECTS, 2: PROJECTS / 2}


def test_a_change_that_the_grants_do_not_name_is_refused(keeper):
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        keeper.execute("update ci_job_artifacts set expire_at = null")
