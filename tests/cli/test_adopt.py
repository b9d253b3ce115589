"""`adopt`: what it makes, prints and refuses, on tables of GitLab's shape."""

import re
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from psycopg2.errors import FeatureNotSupported

from tests.harness import gitlab_tables
from tests.harness.adopted import KEEPER, SMALL, VIEWS, adopted, session  # noqa: F401
from tests.harness.every import every
from tests.harness.gitlab_tables import PARTITIONS, TABLES, rows

PAGE = Path(__file__).parents[2] / "docs" / "adopting_gitlab.md"
FLAG, ROLE = "bulk_delete_job_artifacts", "reader_of_the_page"
ALL_THERE_IS = f"""
    select 'relation ' || relname, coalesce(pg_get_viewdef(oid), '') || coalesce(relacl::text, '') from pg_class
    where relnamespace = '{VIEWS}'::regnamespace and relkind in ('v', 'r')
    union all
    select 'function ' || proname, pg_get_functiondef(oid) from pg_proc where pronamespace = '{VIEWS}'::regnamespace
    union all
    select 'trigger ' || tgname || ' of ' || relname, pg_get_triggerdef(pg_trigger.oid)
    from pg_trigger join pg_class on pg_class.oid = tgrelid where relnamespace = '{VIEWS}'::regnamespace
    union all
    select 'rule ' || rulename || ' of ' || tablename, definition from pg_rules where schemaname = '{VIEWS}'
    union all
    select 'schema', nspacl::text from pg_namespace where nspname = '{VIEWS}'
    order by 1
"""


@pytest.fixture
def adopt(main, settings):
    """Adopt the tables with these options more; settings as the command's environment has them."""

    def call(*options, tables=TABLES, **settings):
        return main("adopt", "gitlab", "--tables", tables, *options, **{"FORGE_SCHEMA": VIEWS} | settings)

    return call


def test_what_is_printed_is_what_is_done_and_printing_does_nothing(adopt, adopted):  # noqa: F811
    adopted.execute(f"drop schema {VIEWS} cascade")
    printed = adopt("--role", KEEPER, "--print")
    nothing = rows(adopted, f"select to_regnamespace('{VIEWS}')")

    adopted.execute(printed.stdout)
    by_hand = rows(adopted, ALL_THERE_IS)
    adopted.execute(f"drop schema {VIEWS} cascade")
    done = adopt("--role", KEEPER)

    assert (printed.status, nothing, done.status) == (0, [(None,)], 0)
    assert rows(adopted, ALL_THERE_IS) == by_hand


def test_adopting_again_keeps_grants_and_the_reasons_of_refused_refs(adopt, adopted):  # noqa: F811
    (pending,) = rows(adopted, f"select min(id) from {VIEWS}.batched_git_ref_updates_deletions where status = 1")[0]
    refused = f"update {VIEWS}.batched_git_ref_updates_deletions set status = %s, reason = %s where id = {pending}"
    adopted.execute(refused, (3, "protected"))
    # The row of this one was dropped with its partition.
    adopted.execute(f"insert into {VIEWS}.ref_deletion_notes (id, reason) values (0, 'protected')")
    before = rows(adopted, ALL_THERE_IS)

    again = adopt()

    notes = rows(adopted, f"select id, reason from {VIEWS}.ref_deletion_notes")
    adopted.execute(refused, (1, None))
    assert (again.status, rows(adopted, ALL_THERE_IS), notes) == (0, before, [(pending, "protected")])
    assert "no role was granted rights" in again.stdout


def test_gitlab_can_change_a_column_once_the_views_are_dropped_as_the_page_says(adopt, adopted):  # noqa: F811
    (drops,) = re.findall(r"`(select format\('drop view .*?) \\gexec`", PAGE.read_text())
    change = f"alter table {TABLES}.user_statuses alter column message type varchar(200)"
    with pytest.raises(FeatureNotSupported):
        adopted.execute(change)
    before = rows(adopted, ALL_THERE_IS)

    for (statement,) in rows(adopted, drops):
        adopted.execute(statement)
    adopted.execute(change)
    again = adopt("--role", KEEPER)

    assert (again.status, rows(adopted, ALL_THERE_IS)) == (0, before)


def test_the_indexes_that_it_names_can_be_built_and_are_named_no_more(adopt, adopted):  # noqa: F811
    advice = adopt("--json").json["indexes"]
    for statement in advice:
        adopted.execute(statement)

    after = adopt("--json").json["indexes"]

    parts = rows(
        adopted, f"select count(*) from pg_indexes where schemaname = '{PARTITIONS}' and indexdef like '%%mod(%%'"
    )
    adopted.execute("drop index forgekeeper_expired, forgekeeper_paths")
    assert (len(advice), after, parts) == (10, [], [(1,)])


def test_the_role_may_ask_which_views_have_changed_where_nobody_may_execute_functions_by_default(adopt, adopted):  # noqa: F811
    function = f"{VIEWS}.find_changed_views(oid[])"
    adopted.execute(f"revoke execute on function {function} from public, {KEEPER}")

    adopt("--role", KEEPER)

    assert rows(adopted, f"select has_function_privilege('{KEEPER}', '{function}', 'execute')") == [(True,)]


def test_it_says_which_refs_are_left_to_gitlab(adopt):
    assert "as on nfs2, are left to GitLab" in adopt().stdout


HALF_DETACHED = (
    "update pg_inherits set inhdetachpending = {} where inhparent = 'p_batched_git_ref_updates_deletions'::regclass"
)
SPOILT = {
    f"is half detached from {TABLES}.p_batched_git_ref_updates_deletions, which hides its rows": (
        HALF_DETACHED.format("true"),
        HALF_DETACHED.format("false"),
    ),
}


@every("sentence", SPOILT)
def test_tables_that_the_views_do_not_fit_are_refused(adopt, adopted, sentence):  # noqa: F811
    spoil, restore = SPOILT[sentence]
    adopted.execute(spoil)
    try:
        result = adopt()
    finally:
        adopted.execute(restore)

    assert result.status == 1
    assert sentence in result.complaint


IN_PART = {
    "schema gitlab lacks table features": (
        "alter table features rename to gone",
        "alter table gone rename to features",
        {"forge_flags"},
        set(),
    ),
    "table gitlab.user_statuses lacks column clear_status_at": (
        "alter table user_statuses rename clear_status_at to clear_at",
        "alter table user_statuses rename clear_at to clear_status_at",
        {"user_statuses"},
        {"user_status_cleanup"},
    ),
    "table project_statistics is in GitLab's other database": (
        "create trigger gitlab_schema_write_trigger_for_project_statistics before delete on project_statistics execute function assign_p_ci_job_artifacts_id_value()",
        "drop trigger gitlab_schema_write_trigger_for_project_statistics on project_statistics",
        {"ci_job_artifacts", "ci_pathless_artifacts", "project_statistics"},
        {"expired_job_artifacts", "delete_objects", "stale_direct_uploads"},
    ),
}


@every("reason", IN_PART)
def test_what_is_there_is_adopted_and_what_is_not_is_named_with_the_batches_that_it_blocks(adopt, adopted, reason):  # noqa: F811
    spoil, restore, views, blocked = IN_PART[reason]
    adopted.execute(spoil)
    try:
        result = adopt("--role", KEEPER, "--json")
        made = rows(adopted, f"select viewname from pg_views where schemaname = '{VIEWS}'")
    finally:
        adopted.execute(restore)
        adopt("--role", KEEPER)

    (left_out,) = [one for one in result.json["left_out"] if one["why"] == reason]
    assert (result.status, set(left_out["views"]), set(left_out["blocks"])) == (0, views, blocked)
    assert views.isdisjoint(view for (view,) in made)
    assert "bulk_imports" in {view for (view,) in made}


REFUSED = {
    "schema gitlab has GitLab's own tables: set FORGEKEEPER_FORGE_SCHEMA": {"FORGE_SCHEMA": TABLES},
    "schema nowhere lacks GitLab's tables: name their schema with --tables": {"tables": "nowhere"},
}


@every("sentence", REFUSED)
def test_schemas_that_cannot_be_are_refused(adopt, adopted, sentence):  # noqa: F811
    result = adopt(**REFUSED[sentence])

    assert result.status == 1
    assert sentence in result.complaint


def test_a_role_that_is_not_there_is_refused(adopt, adopted):  # noqa: F811
    assert adopt("--role", "nobody").complaint == "there is no role nobody: create it first, `create role nobody login`"


def test_another_forge_is_refused(main, settings):
    refused = main("adopt", "bitbucket")

    assert (refused.status, refused.complaint) == (
        2,
        "there is no forge 'bitbucket'; there are: forgejo, gitea, gitlab",
    )


def test_who_does_not_own_the_tables_may_print_and_not_adopt(adopt, adopted, new_role, urls):  # noqa: F811
    url = new_role(urls.database, "grant usage on schema forgekeeper to ROLE")

    printed, refused = adopt("--print", DATABASE_URL=url), adopt(DATABASE_URL=url)

    assert (printed.status, refused.status) == (0, 1)
    assert f"the tables belong to {urlsplit(urls.database).username}: run this as that role" in refused.complaint


def test_flags_of_the_forge_are_shown_as_its_and_cannot_be_turned_here(adopted, main, settings, query, urls):  # noqa: F811
    query(urls.database, f"insert into feature_flags values ('{FLAG}', true) on conflict do nothing")
    there = {"FORGE_SCHEMA": VIEWS}

    before = main("flags", "list", "--json", **there).json
    refused = main("flags", "on", FLAG, **there)
    preview = main("run", "expired_job_artifacts", "--dry-run", **there).stdout
    adopted.execute(
        f"insert into features (key) values ('{FLAG}'); insert into feature_gates (feature_key, key, value)"
        f" values ('{FLAG}', 'boolean', 'true')"
    )
    after = main("flags", "list", **there).stdout

    assert (before["flags"][FLAG], before["owner"]) == (False, f"{VIEWS}.forge_flags")
    assert (refused.status, refused.complaint.split(":")[0]) == (
        1,
        f"the forge owns the flags ({VIEWS}.forge_flags)",
    )
    assert f"flag {FLAG} is off: runs do nothing until the forge turns it on" in preview
    assert after.splitlines()[1].split()[:2] == [FLAG, "on"]
    assert after.splitlines()[-1] == f"the forge owns these flags ({VIEWS}.forge_flags): turn them on or off there"


def test_an_adoption_is_in_the_audit(adopt, adopted, database):  # noqa: F811
    adopt("--role", KEEPER)

    assert database.execute_sql("select act, what, after from audit_acts").fetchall() == [
        ("adopt", VIEWS, {"tables": TABLES, "role": KEEPER})
    ]


@pytest.fixture
def gitlab_of_its_own(new_database, query, urls):
    """GitLab's tables in a database of their own: as their owner and as the page's role, and a cursor of the owner."""
    url = new_database()
    with session(url) as cursor:
        cursor.connection.autocommit = True
        gitlab_tables.build(cursor)
        gitlab_tables.fill(cursor, **SMALL)
        cursor.execute("update bulk_import_trackers set updated_at = null where mod(id, 5) = 0")
        parts = urlsplit(url)
        role = parts._replace(netloc=f"{ROLE}@{parts.netloc.rpartition('@')[2]}").geturl()
        yield tuple({"DATABASE_URL": one, "FORGE_SCHEMA": VIEWS} for one in (url, role)), cursor
    query(urls.database, f"drop database {parts.path[1:]} with (force)")
    query(urls.database, f"drop role {ROLE}")


def test_the_commands_of_the_page_adopt_a_gitlab_of_which_check_finds_nothing_wrong(main, settings, gitlab_of_its_own):
    (owner, role), cursor = gitlab_of_its_own
    (block,) = re.findall(r"```\n(export FORGEKEEPER_FORGE_SCHEMA.*?)```", PAGE.read_text(), re.DOTALL)
    done = []
    for line in block.splitlines()[1:]:
        program, *words = shlex.split(line.replace("forgekeeper login", f"{ROLE} login"), comments=True)
        if program == "psql":
            cursor.execute(words[1])
            continue
        words = [ROLE if word == "forgekeeper" else word for word in words]
        more = ["--tables", TABLES] if words[0] == "adopt" else []
        done.append(main(*words, *more, **(role if words[0] == "check" else owner)))
    for statement in done[2].stdout.splitlines():
        if statement.startswith(("create index", "alter index")):
            cursor.execute(statement)

    checked = main("check", "--json", **role).json["findings"]

    assert [one.status for one in done] == [0] * 5
    about = ("contract", "forge", "privileges", "schema", "postgresql")
    assert [one["message"] for one in checked if one["level"] != "ok" and one["subject"] in about] == []
