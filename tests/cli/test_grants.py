"""The grants that docs/grants.md lists are enough for everything, and `check` names each that is missing."""

import re
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest
import redis

from models import APPLICATION, OURS, privileges
from storage import sentinel
from workers import BATCHES

PAGE = Path(__file__).parents[2] / "docs" / "grants.md"
MODELS = (*OURS, *APPLICATION)


def block():
    """Return what the page grants."""
    (sql,) = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return sql


class Role:
    """A role that has what the page grants, no more."""

    def __init__(self, query, owner_s, name, folder):
        self.name, self._query, self._owner_s = name, query, owner_s
        self.ask(f"create role {name} login password '{name}'; {block().replace('to forgekeeper;', f'to {name};')}")
        for place in ("objects", "repositories"):
            (folder / place).mkdir()
            sentinel.Folder(folder / place).create_sentinel(self.ask("select id::text from installation")[0][0])
        self.settings = {
            "DATABASE_URL": f"{owner_s}{'&' if '?' in owner_s else '?'}user={name}&password={name}",
            "REPOSITORIES_ROOT": str(folder / "repositories"),
            "OBJECT_STORES": f'{{"artifacts": "file://{folder}/objects"}}',
        }

    def ask(self, sql):
        return self._query(self._owner_s, sql)


@pytest.fixture
def role(own_database, query, tmp_path, urls):
    with closing(redis.from_url(urls.redis)) as server:
        server.flushdb()
    role = Role(query, own_database, f"r{uuid4().hex}", tmp_path)
    yield role
    role.ask(f"drop owned by {role.name}; drop role {role.name}")


@pytest.fixture
def errors(main, role):
    def call():
        found = main("check", "--json", **role.settings).json["findings"]
        return [f["message"] for f in found if f["level"] == "error"]

    return call


def test_the_page_grants_what_the_code_says():
    assert block() == privileges.grants(MODELS, "forgekeeper")


def test_check_finds_nothing_missing_with_these_grants(role, errors):
    assert errors() == []


def test_every_batch_runs_with_these_grants(main, role, query):
    role.ask("insert into feature_flags values ('bulk_delete_job_artifacts', true)")
    role.ask("insert into batched_git_ref_updates_deletions (project_id, ref) values (999, 'refs/x')")
    role.ask("update batched_git_ref_updates_deletions set status = 2, processed_at = '2026-01-01' where id % 2 = 0")
    role.ask(
        "insert into job_runs (batch, state, finished_at) select 'prune', 'failed', '2026-01-01' from generate_series(1, 3)"
    )

    results = {}
    for batch in BATCHES:
        result = main("run", batch, "--json", **role.settings)
        assert result.status == 0, f"{batch}: {result.stderr}"
        results[batch] = result.json

    assert {batch for batch, result in results.items() if "blocked" in result} == set()
    assert results["user_status_cleanup"]["deleted"] == 2_000
    assert sum(child["destroyed"] for child in results["expired_job_artifacts"]["children"]) == 600
    assert results["delete_objects"]["failed"] == 0
    assert results["stale_imports"]["trackers"] > 0
    assert results["prune"]["runs"] > 0


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("flags", "on", "bulk_delete_job_artifacts"),
        ("pause", "prune"),
        ("resume", "prune"),
        ("send", "prune"),
        ("refs", "retry", "--all"),
        ("objects", "retry", "--all"),
    ],
    ids=" ".join,
)
def test_every_command_works_with_these_grants(main, role, command):
    result = main(*command, **role.settings)

    assert result.status == 0, result.stderr


REVOKED = [
    (need.table, need.privilege, f"{need.privilege} ({', '.join(need.columns)})" if need.columns else need.privilege)
    for need in privileges.needs(MODELS)
]


def test_check_names_each_grant_that_is_missing(role, errors):
    for table, privilege, grant in REVOKED:
        role.ask(f"revoke {grant} on {table} from {role.name}")

        assert f"{role.name} may not {privilege} {table}: `grant {grant} on {table} to {role.name}`" in errors()

        role.ask(f"grant {grant} on {table} to {role.name}")


def test_check_says_that_it_may_not_read_what_was_migrated(role, errors):
    role.ask(f"revoke select on forgekeeper_migrations from {role.name}")

    assert errors() == [
        f"{role.name} may not select forgekeeper_migrations: `grant select on forgekeeper_migrations to {role.name}`"
    ]


def test_what_is_missing_of_one_table_is_one_line(role, errors):
    role.ask(f"revoke all on ci_job_artifacts from {role.name}")

    assert errors() == [
        (
            f"{role.name} may not select or update or delete ci_job_artifacts:"
            f" `grant select, update (id), delete on ci_job_artifacts to {role.name}`"
        )
    ]


def test_a_schema_that_may_not_be_used_is_named_and_not_its_tables(role, errors):
    role.ask("create schema forge")
    role.ask("alter table projects set schema forge")
    role.ask(f"alter role {role.name} set search_path = public, forge")

    assert errors() == [f"{role.name} may not use schema forge: `grant usage on schema forge to {role.name}`"]


def test_rows_that_a_policy_hides_are_an_error_and_block_the_batch(main, role, errors):
    role.ask("alter table ci_job_artifacts enable row level security")

    (message,) = errors()
    result = main("run", "delete_objects", "--json", **role.settings)

    assert message == "row security hides rows of ci_job_artifacts from this role: grant it bypassrls"
    assert (result.json["skipped"], result.json["blocked"]) == ("schema", message)
