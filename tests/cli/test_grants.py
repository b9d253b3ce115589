"""The grants that docs/security.md lists are enough for everything, and `check` names what is missing.

`python -m tests.system.soak` runs the whole system with them.
"""

import os
from contextlib import closing
from urllib.parse import urlsplit

import pytest
import redis

from forgekeeper.batches import BATCHES
from forgekeeper.cli.migrate import OURS
from forgekeeper.database import schema
from forgekeeper.storage import sentinel
from models import APPLICATION
from tests.system.soak import rights
from workers.stale_direct_uploads import register

MODELS = (*OURS, *APPLICATION)
EVERYTHING = rights.PERSON
SECRET = "swordfish"


class Role:
    """A role, and a user of Redis, that have what the page grants, no more."""

    def __init__(self, query, owner_s, url, folder, redis_url):
        self.name, self._query, self._owner_s = urlsplit(url).username, query, owner_s
        for place in ("objects", "repositories"):
            (folder / place).mkdir(exist_ok=True)
            sentinel.Folder(folder / place).create_sentinel(self.ask("select id::text from installation")[0][0])
        self.settings = {
            "DATABASE_URL": url,
            "REDIS_URL": redis_url.replace("://", f"://{EVERYTHING}:{SECRET}@", 1),
            "REPOSITORIES_ROOT": str(folder / "repositories"),
            "OBJECT_STORES": f'{{"artifacts": "file://{folder}/objects"}}',
        }

    def ask(self, sql):
        return self._query(self._owner_s, sql)


@pytest.fixture
def role(*, own_database, query, new_role, tmp_path, urls, server):
    server.flushdb()
    rights.make_users(server, SECRET)
    server.acl_log_reset()
    url = new_role(own_database, rights.grants()[EVERYTHING].replace(f" to {EVERYTHING};", " to ROLE;"))
    yield Role(query, own_database, url, tmp_path, urls.redis)
    refused = rights.refused(server)
    for name in rights.users():
        server.acl_deluser(name)
    assert refused == []


@pytest.fixture
def errors(main, role):
    return lambda: [
        one["message"] for one in main("check", "--json", **role.settings).json["findings"] if one["level"] == "error"
    ]


@pytest.mark.parametrize("process", [None, "scheduler", "worker", "exporter"])
def test_the_page_grants_what_the_code_says(process):
    role = EVERYTHING if process is None else f"{EVERYTHING}_{process}"

    lines = [f"grant usage on schema public to {role};"]
    if process != "exporter":
        lines.append(f"grant select on {schema.MIGRATIONS} to {role};")
    needed = {model._meta.table_name: ", ".join(schema.needs(model, process)) for model in MODELS}
    lines += [f"grant {wanted} on {table} to {role};" for table, wanted in needed.items() if wanted]
    assert rights.grants()[role].splitlines() == lines


def test_check_finds_nothing_missing_with_these_grants_but_what_redis_does_not_let_it_see(main, role):
    found = main("check", "--json", **role.settings)

    assert [one for one in found.json["findings"] if one["level"] == "error"] == []
    ((level, message),) = found.findings("redis")
    assert (level, "grant it +info, or see to it" in message) == ("warning", True)


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


COMMANDS = (
    *("status", "flags on bulk_delete_job_artifacts", "pause prune", "resume prune", "send prune", "ticks prune"),
    *("quarantine", "quarantine show 1", "quarantine retry 1", "quarantine discard 1", "quarantine retry --all"),
    *("objects", "processes", "buckets", "leases"),
    *("audit", "audit --run 1", "audit --what artifact:1", "audit --what path:a/b"),
    *("why prune", "check"),
    *("uploads reconcile artifacts --prefix a --yes --expect 1", "uploads forget --all"),
)


def plant(role, folder):
    """Leave something for the commands to work on: a bad record, a failed upload, an object that nobody knows."""
    with closing(redis.from_url(role.settings["REDIS_URL"], driver_info=None)) as server:
        server.zadd(register.FAILED, {"artifacts:given/up": 1})
    role.ask(
        "insert into quarantine (batch, record, key, reason, error, failures, since, failed_at)"
        " values ('user_status_cleanup', 'user_status', '7', 'record_failed', 'it is bad', 2, now(), now())"
    )
    file = folder / "objects" / "a" / "b"
    file.parent.mkdir()
    file.write_bytes(b"")
    os.utime(file, (0, 0))


def test_every_command_works_with_these_grants(main, role, tmp_path):
    plant(role, tmp_path)

    results = {command: main(*command.split(), **role.settings) for command in COMMANDS}

    assert {command: result.stderr for command, result in results.items() if result.status != 0} == {}


LACKING = {
    "revoke select on forgekeeper_migrations from {0}": (
        "{0} may not select forgekeeper_migrations: `grant select on forgekeeper_migrations to {0}`"
    ),
    "revoke all on ci_job_artifacts from {0}": (
        "{0} may not select or update or delete ci_job_artifacts:"
        " `grant select, update (id), delete on ci_job_artifacts to {0}`"
    ),
    "create schema forge; alter table projects set schema forge; alter role {0} set search_path = public, forge": (
        "{0} may not use schema forge: `grant usage on schema forge to {0}`"
    ),
}


@pytest.mark.parametrize("change", LACKING, ids=["migrations", "table", "schema"])
def test_check_says_in_one_line_what_is_missing_and_the_grant_that_gives_it(role, errors, change):
    role.ask(change.format(role.name))

    assert errors() == [LACKING[change].format(role.name)]


def test_rows_that_a_policy_hides_are_an_error_and_block_the_batch(main, role, errors):
    role.ask("alter table ci_job_artifacts enable row level security")

    (message,) = errors()
    result = main("run", "delete_objects", "--json", **role.settings)

    assert message == "row security hides rows of ci_job_artifacts from this role: grant it bypassrls"
    assert (result.json["skipped"], result.json["blocked"]) == ("schema", message)
