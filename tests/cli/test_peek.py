"""`peek` counts in a forge's own tables what would be deleted, by a role that may only read, and creates nothing."""

from urllib.parse import urlsplit

import pytest

from tests.cli.test_adopting_forgejo import SECONDS
from tests.cli.test_adopting_forgejo import TABLES as FORGEJO
from tests.cli.test_adopting_gisia import DUE as DUE_IN_GISIA
from tests.cli.test_adopting_gisia import TABLES as GISIA
from tests.harness import gitlab_tables
from tests.harness.adopted import SMALL, session

NOWHERE = {"REDIS_URL": None, "DATABASE_URL": None}
CREATED = "select 'relation', count(*) from pg_class union all select 'function', count(*) from pg_proc order by 1"
READS = "grant usage on schema {0} to ROLE; grant select on all tables in schema {0} to ROLE"
SLOW = """
    create table states as
        select n as user_id, now() - interval '1 day' as clear_status_at from generate_series(1, 1000) as n;
    analyze states;
    create view user_statuses as
        select states.*, 'x' as emoji, 'x' as message, 'x' as message_html, 0::smallint as availability
        from states, lateral (select pg_sleep(0.01 + user_id * 0)) as waited
"""
OBJECTS = ("expired_job_artifacts", "delete_objects", "stale_direct_uploads")


@pytest.fixture
def gitlab(settings, new_database, new_role):
    """GitLab's tables; a cursor of their owner, and the URL of a role that may only read them."""
    url = new_database()
    with session(url) as cursor:
        cursor.connection.autocommit = True
        gitlab_tables.build(cursor)
        gitlab_tables.fill(cursor, **SMALL)
        yield cursor, new_role(url, READS.format("gitlab"))


@pytest.fixture
def reader(settings, new_database, new_role, query):
    """Make a database by SQL; return the URL of its owner and of a role that may only read there."""

    def make(sql):
        url = new_database()
        query(url, sql)
        return url, new_role(url, READS.format("public"))

    return make


def counted(result):
    """Return how many of each record would be deleted."""
    assert result.status == 0, result.stderr
    return {one["record"]: one["records"] for batch in result.json["batches"] for one in batch["records"]}


def test_a_gitlab_is_counted_as_its_adopted_views_would_be(main, gitlab):
    cursor, url = gitlab
    due = gitlab_tables.find_due(cursor)

    result = main("peek", url, "--tables", "gitlab", "--json", **NOWHERE)

    expected = {"user_status": due.statuses, "git_ref_deletion": due.refs, "expired_artifact": due.artifacts}
    expected |= {"bulk_import": due.imports, "entity": due.entities}
    assert counted(result) == {record: len(found) for record, found in expected.items()}
    ((batch, artifacts),) = [
        (batch, batch["records"][0]) for batch in result.json["batches"] if batch["batch"] == "expired_job_artifacts"
    ]
    ((size, oldest),) = gitlab_tables.rows(
        cursor,
        "select sum(coalesce(size, 0)), min(expire_at) from p_ci_job_artifacts where id = any(%s)",
        (list(due.artifacts),),
    )
    assert (artifacts["bytes"], artifacts["oldest"]) == (size, oldest.isoformat())
    assert artifacts["kept"]["no_path"] == len(due.pathless)
    assert batch["missing"] == ["the forge's flag bulk_delete_job_artifacts is off"]


def test_nothing_is_created_and_no_redis_is_needed(main, gitlab):
    cursor, url = gitlab
    before = gitlab_tables.rows(cursor, CREATED)

    assert main("peek", url, "--tables", "gitlab", **NOWHERE).status == 0

    assert gitlab_tables.rows(cursor, CREATED) == before


def test_a_table_that_the_role_may_not_read_is_named_and_the_other_batches_are_counted(main, gitlab):
    cursor, url = gitlab
    cursor.execute(f"revoke select on user_statuses from {urlsplit(url).username}")

    result = main("peek", url, "--tables", "gitlab", "--json", **NOWHERE)

    assert counted(result)["expired_artifact"] == len(gitlab_tables.find_due(cursor).artifacts)
    (lack,) = next(one["missing"] for one in result.json["batches"] if one["batch"] == "user_status_cleanup")
    assert "permission denied for table user_statuses" in lack


def test_a_forgejo_is_recognized_and_what_it_lacks_is_said(main, reader, query):
    url, role = reader(FORGEJO.read_text())
    ((due,),) = query(
        url,
        f"select count(*) from action_artifact where status = 2 and expired_unix < {SECONDS} or status = 5"
        f" or status = 1 and updated_unix < {SECONDS} - 86400",
    )

    result = main("peek", role, "--json", **NOWHERE)

    assert (result.json["forge"], counted(result)) == ("Forgejo", {"expired_artifact": due})
    assert [one["batch"] for one in result.json["batches"] if one["records"] or one["note"]] == list(OBJECTS)
    assert "user_statuses: Forgejo has no such table" in main("peek", role, **NOWHERE).stdout


def test_locks_of_a_gisia_are_resolved_if_the_settings_say_so(main, reader, query):
    url, role = reader(GISIA.read_text())

    result = main("peek", role, "--json", UNKNOWN_LOCKS="resolve", **NOWHERE)

    assert counted(result) == {"expired_artifact": len(query(url, DUE_IN_GISIA))}


def test_of_tables_as_the_batches_expect_them_as_many_are_counted_as_a_preview_does(main, settings, new_database):
    url = new_database()
    for words in ("migrate", "seed"):
        assert main(*words.split(), DATABASE_URL=url, OWN_SCHEMA="public").status == 0, words

    peeked = counted(main("peek", url, "--json", **NOWHERE))

    previewed = {}
    for batch in ("user_status_cleanup", "expired_job_artifacts", "stale_imports"):
        parts = main("run", batch, "--dry-run", "--json", DATABASE_URL=url, OWN_SCHEMA="public").json["parts"]
        previewed |= {one["record"]: one["records"] for one in parts if one["verb"] in {"deleted", "given up"}}
    assert {record: peeked[record] for record in previewed} == previewed
    assert sum(previewed.values()) > 0


def test_what_cannot_be_counted_in_time_is_an_estimate_and_marked(main, reader):
    _url, role = reader(SLOW)

    result = main("peek", role, "--seconds", "1", "--json", **NOWHERE)

    (status,) = result.json["batches"][0]["records"] or [None]
    assert (status["record"], status["estimate"], status["records"] > 0) == ("user_status", True, True)
    assert "~" in main("peek", role, "--seconds", "1", **NOWHERE).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--forge", "svn"), "there is no forge 'svn'; there are: gitlab, forgejo, gitea, example"),
        (("--forge", "gitlab"), "schema public lacks GitLab's tables: name their schema with --tables"),
        ((), "schema public has no tables that a batch could delete from"),
    ],
    ids=["unknown", "another", "none"],
)
def test_a_database_without_the_tables_is_refused_with_what_to_do(main, reader, arguments, said):
    _url, role = reader("select")

    assert said in main("peek", role, *arguments, **NOWHERE).complaint


def test_without_a_database_it_says_what_to_write(main, settings):
    assert main("peek", **NOWHERE).complaint.startswith("name a database: `forgekeeper peek postgresql://")
