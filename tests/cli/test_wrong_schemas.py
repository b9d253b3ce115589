"""A forge whose tables are not what a batch expects: `check` names what and whose, and of the batches that one is blocked.

Each wrong schema is made in a transaction, which is rolled back.
"""

import re
from typing import NamedTuple

import pytest

from forgekeeper.api.batches import BATCHES
from forgekeeper.cli.check import collect_findings
from tests.harness.thorough import whole_only

STATUSES, REFS, IMPORTS = "user_status_cleanup", "git_ref_cleanup", "stale_imports"
READS_ARTIFACTS = "expired_job_artifacts, delete_objects, stale_direct_uploads"
AS_A_ROLE = """
    create role keeper;
    do $$ declare place text; begin
        foreach place in array current_schemas(false) loop
            execute format('grant usage on schema %%I to keeper; grant all on all tables in schema %%I to keeper', place, place);
        end loop;
    end $$;
    {change};
    set local role keeper
"""
PARTITIONED = """
    alter table {0} rename to plain;
    create table {1} (like plain) partition by list (partition_id);
    create table {2} partition of {1} for values in (100);
    create table others partition of {1} default;
"""
TRIGGER = """
    create function {function}() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$;
    create trigger guard before delete on {table} for each row execute function {function}()
"""
VIEW = """
    alter table user_statuses rename to statuses;
    alter table statuses rename clear_status_at to until;
    create view user_statuses as
        select user_id, until as clear_status_at from statuses
"""
FILLED = "truncate {0}; insert into {0} (user_id) select generate_series(1, 7); analyze {0}"
INDEX = "create index concurrently on"
STATUS_INDEX = "(clear_status_at, user_id) where clear_status_at is not null"


class Wrong(NamedTuple):
    """What is made wrong, and what `check` says of it: of which batches, and whether these are blocked."""

    change: str
    of: str
    sentence: str
    level: str = "error"
    blocks: bool = True


WRONG = {
    "one partition alone": Wrong(
        PARTITIONED.format("ci_job_artifacts", "whole", "ci_job_artifacts"),
        READS_ARTIFACTS,
        "ci_job_artifacts is a part of whole, and lookups miss the rest of whole",
    ),
    "a child that inherits": Wrong(
        "create table larger (like ci_job_artifacts); alter table ci_job_artifacts inherit larger",
        READS_ARTIFACTS,
        "ci_job_artifacts is a part of larger",
    ),
    "a missing relation": Wrong("drop table projects", REFS, "table projects is missing"),
    "a missing column": Wrong(
        "alter table bulk_imports drop has_failures", IMPORTS, "column bulk_imports.has_failures is missing"
    ),
    "text for integer": Wrong(
        "alter table bulk_import_trackers alter status drop default, alter status type text",
        IMPORTS,
        "column bulk_import_trackers.status is text, should be smallint",
    ),
    "times without a zone": Wrong(
        "alter table user_statuses alter clear_status_at type timestamp",
        STATUSES,
        "column user_statuses.clear_status_at is timestamp without time zone, should be timestamp with time zone",
    ),
    "a key that may be NULL": Wrong(
        "alter table ci_job_artifacts alter job_id drop not null",
        READS_ARTIFACTS,
        "column ci_job_artifacts.job_id may be NULL",
    ),
    "NULL in rows": Wrong(
        "alter table bulk_import_trackers alter status drop not null;"
        "insert into bulk_import_trackers (bulk_import_entity_id, relation, status) values (1, 'a', 0), (1, 'b', null)",
        IMPORTS,
        "column bulk_import_trackers.status has NULL in some rows",
        blocks=False,
    ),
    "a view with a key that comes twice": Wrong(
        "alter table projects rename to p; insert into p values (7, 'a'), (8, 'b');"
        "create view projects as select p.id, p.disk_path from p, generate_series(1, id - 6)",
        REFS,
        "several rows of projects have the same id",
        blocks=False,
    ),
    "a missing grant": Wrong(
        AS_A_ROLE.format(change="revoke delete on user_statuses from keeper"),
        STATUSES,
        "keeper may not delete user_statuses: `grant delete on user_statuses to keeper`",
    ),
    "row security": Wrong(
        AS_A_ROLE.format(change="alter table user_statuses enable row level security"),
        STATUSES,
        "row security hides rows of user_statuses",
    ),
    "a materialized view": Wrong(
        "alter table projects rename to p; create materialized view projects as select * from p",
        REFS,
        "projects is a materialized view",
    ),
    "a view that joins tables": Wrong(
        "alter table user_statuses rename to statuses; create table users (id) as select 7::bigint;"
        "create view user_statuses as select user_id, clear_status_at from statuses join users on id = user_id",
        STATUSES,
        "rows of view user_statuses cannot be deleted",
    ),
    "a view without a table": Wrong(
        "drop table user_statuses;"
        "create view user_statuses as select 1::bigint as user_id, now() as clear_status_at where false",
        STATUSES,
        "rows of view user_statuses cannot be deleted",
    ),
    "a view whose column is computed": Wrong(
        "alter table bulk_imports rename to imports; create view bulk_imports as"
        " select id, user_id, source_type, abs(status) as status, has_failures, created_at, updated_at from imports",
        IMPORTS,
        "column bulk_imports.status cannot be changed",
    ),
    "a view that no trigger for updates mends": Wrong(
        "alter table bulk_imports rename to imports; create table numbers (n) as select 1;"
        "create view bulk_imports as select imports.* from imports, numbers",
        IMPORTS,
        "column bulk_imports.status cannot be changed",
    ),
    "a view whose rows cannot be locked, though a trigger deletes them": Wrong(
        "alter table user_statuses rename to statuses;"
        "create view user_statuses as select distinct user_id, clear_status_at from statuses;"
        "create function forget() returns trigger language plpgsql as $$ begin return old; end $$;"
        "create trigger forget instead of delete on user_statuses for each row execute function forget()",
        STATUSES,
        "rows of view user_statuses cannot be locked (FOR UPDATE is not allowed with DISTINCT",
    ),
    "the other half of a forge with two databases": Wrong(
        TRIGGER.format(table="ci_job_artifacts", function="gitlab_schema_prevent_write"),
        READS_ARTIFACTS,
        "ci_job_artifacts is the locked copy of a table that this GitLab keeps in another database",
    ),
    "a trigger that raises": Wrong(
        TRIGGER.format(table="user_statuses", function="refuse"),
        STATUSES,
        "trigger guard of user_statuses runs refuse on delete, with this role's rights and search_path",
        level="warning",
        blocks=False,
    ),
    "a trigger below a view that a function of its owner changes": Wrong(
        f"{VIEW}; {TRIGGER.format(table='statuses', function='refuse')};"
        "create function forget() returns trigger language plpgsql security definer as $$ begin return old; end $$;"
        "create trigger forget instead of delete on user_statuses for each row execute function forget()",
        STATUSES,
        "trigger guard of statuses runs refuse on delete, with the view owner's rights and search_path",
        level="warning",
        blocks=False,
    ),
    "a missing index": Wrong(
        "drop index user_statuses_clear_status_at",
        STATUSES,
        f"`{INDEX} user_statuses {STATUS_INDEX}`",
        level="warning",
        blocks=False,
    ),
    "a missing index below a view": Wrong(
        f"{VIEW}; drop index user_statuses_clear_status_at",
        STATUSES,
        f"`{INDEX} statuses (until, user_id) where (until IS NOT NULL)`",
        level="warning",
        blocks=False,
    ),
    "a missing index of a partitioned table": Wrong(
        PARTITIONED.format("ci_job_artifacts", "ci_job_artifacts", "one"),
        READS_ARTIFACTS,
        "in the order of file_final_path, run these statements: `create index forgekeeper_",
        level="warning",
        blocks=False,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_schema_is_named_and_its_batch_blocked_and_no_other(change, found, blocked, name):
    wrong = WRONG[name]

    change(wrong.change)

    said = [one.message for one in found("contract") if one.level == wrong.level and wrong.sentence in one.message]
    assert ", ".join(message.split(": ")[0] for message in said) == wrong.of
    sentences = blocked()
    assert set(sentences) == (set(wrong.of.split(", ")) if wrong.blocks else set())
    assert all(reason == "schema" and wrong.sentence in said for reason, said in sentences.values())


def test_of_tables_as_they_are_expected_check_says_so_batch_by_batch(settings, found):
    said = [one for one in collect_findings(settings) if one.subject == "contract"]

    assert found("contract", "schema", "privileges", "forge") == []
    named = {name for one in said for name in one.message.split(":")[0].split(", ")}
    assert named == {name for name, batch in BATCHES.items() if batch.relations}


@whole_only
@pytest.mark.parametrize(
    "changed",
    [
        VIEW,
        "drop index user_statuses_clear_status_at; create index x on user_statuses (clear_status_at, user_id)",
        "alter table user_statuses alter user_id type int",
        "alter table user_statuses add likes int not null default 0",
    ],
    ids=["a view of other names", "an index of all rows", "smaller numbers", "more columns"],
)
def test_what_only_looks_different_is_as_good(change, found, blocked, changed):
    change(changed)

    assert (found("contract"), blocked()) == ([], {})


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        (f"{VIEW}; {FILLED.format('statuses')}", "user_statuses (a view of statuses, about 7 rows)"),
        (FILLED.format("user_statuses"), "user_statuses (about 7 rows, rows are deleted by ctid)"),
    ],
    ids=["view", "table"],
)
def test_check_names_the_tables_of_a_view_how_many_rows_they_have_and_whether_these_go_by_ctid(
    change, settings, changed, shown
):
    change(changed)

    said = [one.message for one in collect_findings(settings)]

    assert f"{STATUSES}: as expected: {shown}" in said


def test_check_says_of_a_gitlab_which_of_its_cron_jobs_do_the_same_work(change, found):
    change("create table p_ci_job_artifacts (); create table feature_gates ()")

    (one,) = found("forge")

    assert (one.level, "bulk_imports_stale_import_worker (stale_imports)" in one.message) == ("warning", True)
    assert "ExpireBuildArtifactsWorker" in one.message


def test_the_statements_for_an_index_of_a_partitioned_table_can_be_executed_and_are_asked_for_no_more(change, found):
    change(PARTITIONED.format("ci_job_artifacts", "ci_job_artifacts", "one"))
    wanted = [one.message for one in found("contract") if "in the order of file_final_path" in one.message]

    # No transaction can build an index concurrently, and the test is one.
    for statement in re.findall(r"`([ca][^`]*)`", wanted[0]):
        change(statement.replace(" concurrently", ""))

    assert len(wanted) == 1
    assert [one for one in found("contract") if "in the order of file_final_path" in one.message] == []
