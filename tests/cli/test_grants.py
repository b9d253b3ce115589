"""The grants that docs/security.md lists are enough for everything, each is needed, and `check` names what is missing.

`python -m tests.system.soak --acl` runs the whole system with them.
"""

import os
from contextlib import closing
from uuid import uuid4

import peewee as pw
import pytest
import redis

from forgekeeper.batches import BATCHES
from forgekeeper.database import privileges, sqlstate, use
from forgekeeper.process.broker import NAMESPACE, broker
from forgekeeper.storage import sentinel
from forgekeeper.tables import OURS
from models import APPLICATION
from workers.stale_direct_uploads import register

from ..system import rights  # noqa: TID252, pytest puts no folder on the path

MODELS = (*OURS, *APPLICATION)
DENIED = "42501"
EVERYTHING = rights.PERSON
SECRET = "swordfish"


class Role:
    """A role, and a user of Redis, that have what the page grants, no more."""

    def __init__(self, query, owner_s, name, folder, redis_url, process=None):  # noqa: PLR0917
        self.name, self._query, self._owner_s = name, query, owner_s
        page = EVERYTHING if process is None else f"{EVERYTHING}_{process}"
        self.ask(f"create role {name} login password '{name}'; {self._named(rights.grants()[page], page)}")
        for place in ("objects", "repositories"):
            (folder / place).mkdir(exist_ok=True)
            sentinel.Folder(folder / place).create_sentinel(self.ask("select id::text from installation")[0][0])
        self.settings = {
            "DATABASE_URL": f"{owner_s}{'&' if '?' in owner_s else '?'}user={name}&password={name}",
            "REDIS_URL": redis_url.replace("://", f"://{EVERYTHING}:{SECRET}@", 1),
            "REPOSITORIES_ROOT": str(folder / "repositories"),
            "OBJECT_STORES": f'{{"artifacts": "file://{folder}/objects"}}',
        }

    def _named(self, sql, page):
        return sql.replace(f" to {page};", f" to {self.name};")

    def ask(self, sql):
        return self._query(self._owner_s, sql)

    def refuses(self, need, probes):
        """Say whether one of the *probes* is refused something without that privilege, which is given back then."""
        privilege = f"{need.privilege} ({', '.join(need.columns)})" if need.columns else need.privilege
        self.ask(f"revoke {privilege} on {need.table} from {self.name}")
        found = any(probe() for probe in probes)
        self.ask(f"grant {privilege} on {need.table} to {self.name}")
        return found


@pytest.fixture
def make_role(own_database, query, tmp_path, urls):
    made = []

    def make(process=None):
        made.append(Role(query, own_database, f"r{uuid4().hex}", tmp_path, urls.redis, process))
        return made[-1]

    with closing(redis.from_url(urls.redis)) as server:
        server.flushdb()
        rights.make_users(server, SECRET)
        server.acl_log_reset()
        yield make
        refused = rights.refused(server)
        for name in rights.users():
            server.acl_deluser(name)
    for role in made:
        role.ask(f"drop owned by {role.name}; drop role {role.name}")
    assert refused == []


@pytest.fixture
def role(make_role):
    return make_role()


@pytest.fixture
def errors(main, role):
    def call():
        found = main("check", "--json", **role.settings).json["findings"]
        return [f["message"] for f in found if f["level"] == "error"]

    return call


@pytest.mark.parametrize("process", [None, *use.PROCESSES])
def test_the_page_grants_what_the_code_says(process):
    role = EVERYTHING if process is None else f"{EVERYTHING}_{process}"

    assert rights.grants()[role] == privileges.grants(MODELS, role, process)


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


COMMANDS = (
    *("status", "flags on bulk_delete_job_artifacts", "pause prune", "resume prune", "send prune", "ticks prune"),
    *("refs retry --all", "objects retry --all", "records", "records retry --all", "processes", "buckets", "leases"),
    *("audit", "audit --run 1", "audit --what artifact:1", "audit --what path:a/b"),
    *("uploads", "uploads failed", "uploads retry --all", "why prune", "check"),
    *("uploads reconcile artifacts --prefix a --yes --expect 1", "uploads forget --all"),
    *("dead list", "dead list --oldest", "dead show 1", "dead replay 1", "dead purge 2 --yes"),
)


def plant(role, folder):
    """Leave something for the commands to work on: dead letters, failed uploads, an object that nobody knows."""
    with closing(redis.from_url(role.settings["REDIS_URL"], driver_info=None)) as server:
        message = broker.actors["clean_project_refs"].message(1)
        for number in ("1", "2"):
            server.zadd(f"{NAMESPACE}:git.XQ", {number: 1})
            server.hset(f"{NAMESPACE}:git.XQ.msgs", number, message.copy(message_id=number).encode())
        server.zadd(register.FAILED, {"artifacts:given/up": 1})
    file = folder / "objects" / "a" / "b"
    file.parent.mkdir()
    file.write_bytes(b"")
    os.utime(file, (0, 0))


def test_every_command_works_with_these_grants(main, role, tmp_path):
    plant(role, tmp_path)

    results = {command: main(*command.split(), **role.settings) for command in COMMANDS}

    assert {command: result.stderr for command, result in results.items() if result.status != 0} == {}


REVOKED = [
    (need.table, need.privilege, f"{need.privilege} ({', '.join(need.columns)})" if need.columns else need.privilege)
    for need in privileges.needs(MODELS)
]


def test_check_names_each_grant_that_is_missing(role, errors):
    for table, privilege, grant in REVOKED:
        role.ask(f"revoke {grant} on {table} from {role.name}")

        assert f"{role.name} may not {privilege} {table}: `grant {grant} on {table} to {role.name}`" in errors()

        role.ask(f"grant {grant} on {table} to {role.name}")


def test_rows_that_a_policy_hides_are_an_error_and_block_the_batch(main, role, errors):
    role.ask("alter table ci_job_artifacts enable row level security")

    (message,) = errors()
    result = main("run", "delete_objects", "--json", **role.settings)

    assert message == "row security hides rows of ci_job_artifacts from this role: grant it bypassrls"
    assert (result.json["skipped"], result.json["blocked"]) == ("schema", message)


def refused(ask):
    """Say whether PostgreSQL refuses something that is asked for."""
    try:
        ask()
    except pw.ProgrammingError as error:
        return sqlstate(error) == DENIED
    return False
