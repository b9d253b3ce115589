"""The grants that docs/security.md lists are enough for everything, each is needed, and `check` names what is missing.

`python -m tests.system.soak` runs the whole system with them.
"""

import os
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from uuid import uuid4

import peewee as pw
import pytest
import redis

from forgekeeper import collectors, migrations
from forgekeeper.audit.deletions import Audit
from forgekeeper.batches import BATCHES
from forgekeeper.connections import Limits, client, connect
from forgekeeper.database import database, now, privileges, sqlstate, use
from forgekeeper.installation.row import Installation
from forgekeeper.process.broker import NAMESPACE, broker
from forgekeeper.process.rows import Process
from forgekeeper.process.run_messages import RunMessages
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import JobRun, Started
from forgekeeper.runs.passed_over import PassedOver
from forgekeeper.runs.quarantine import Quarantined
from forgekeeper.runs.reconcile import reconcile
from forgekeeper.runs.totals import RunTotal
from forgekeeper.storage import sentinel
from forgekeeper.storage.settled import SettledUpload
from forgekeeper.tables import OURS
from models import APPLICATION, GitRefDeletion
from tests.harness.settings import settings_with
from tests.system.soak import rights
from workers.git_ref_cleanup.deletions import Closed, settle
from workers.git_ref_cleanup.repositories import paths
from workers.stale_direct_uploads import register

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


def test_check_says_what_redis_does_not_let_it_see_and_sees_what_it_does(main, role):
    def redis_is():
        found = main("check", "--json", **role.settings).json["findings"]
        return [(f["level"], f["message"].partition(":")[0]) for f in found if f["subject"] == "redis"]

    (version, unseen) = redis_is()
    with closing(redis.from_url(role.settings["REDIS_URL"].replace(f"{EVERYTHING}:{SECRET}@", ""))) as server:
        server.execute_command("ACL", "SETUSER", EVERYTHING, "+info")
    seen = redis_is()

    assert (version[0], unseen) == ("ok", ("warning", "maxmemory-policy and appendonly cannot be seen"))
    assert version in seen
    assert unseen not in seen


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


# Each is needed


@contextmanager
def acting(role):
    """Let this process be the role."""
    pointed, pool = database.obj, client.connection_pool
    settings = settings_with(**{name.lower(): value for name, value in role.settings.items()})
    connect(settings, Limits.of_worker(settings), name="tests", connections=5)
    try:
        with database.connection_context():
            yield settings
    finally:
        database.close_all()
        client.connection_pool.disconnect()
        if pointed is not None:
            database.initialize(pointed)
        client.connection_pool = pool


def refused(ask):
    """Say whether PostgreSQL refuses something that is asked for."""
    try:
        ask()
    except pw.ProgrammingError as error:
        return sqlstate(error) == DENIED
    return False


def presence():
    a_second = timedelta(seconds=1)
    kind = {"kind": "worker", "host": "h", "pid": 1, "version": "1"}
    entry = Process.enrol(dead_after=a_second, said={}, started_at=now(), **kind)
    Process.keep_alive(entry, dead_after=a_second, said={})
    Process.withdraw(entry)


def pending():
    migrations.pending(database.obj)


def of_scheduler(settings):
    yield from (pending, Installation.ensure, presence, partial(Batch.register, BATCHES))
    yield lambda: JobRun.claim("prune", now(), by="somebody", reason=None)
    for name, batch in BATCHES.items():
        yield partial(reconcile, name, settings, RunMessages(batch), by="somebody")


def of_exporter(settings):
    asked = collectors.all_collectors(settings)
    yield from (partial(_read, one.look, settings) for name, one in asked.items() if name != "roots")
    yield Installation.ensure


def _read(collect, settings):
    list(collect(settings))


def of_worker(settings):
    yield from (pending, Installation.ensure, presence, partial(Batch.move_to, "git_ref_cleanup", 0))
    yield partial(PassedOver.fail, "delete_objects", "deleted_object", 1, "it is bad")
    yield partial(PassedOver.forget_old, now())
    yield partial(Hold.why, "prune")
    yield partial(JobRun.hold, Started(0, str(uuid4()), 1), {}, kind="breaker", sentence="it is too much")
    yield partial(Quarantined.fail, "git_ref_cleanup", "clean_project_refs", "1", "it failed", run=1)
    yield partial(Quarantined.end, "git_ref_cleanup", "clean_project_refs", "1")
    yield JobRun.delete().where(JobRun.closed_before(now() - timedelta(days=1))).execute
    yield partial(paths, [1])
    yield partial(settle, 1, [Closed(0, "refs/mr/1")])
    yield partial(Audit("prune", on=True).intent, "a", ids=[1])
    yield partial(RunTotal.add, "prune", 1)
    yield partial(RunTotal.delete_old, now(), limit=1)
    yield partial(SettledUpload.reap, "artifacts", ["a"], None)
    yield partial(SettledUpload.delete_old, now() + timedelta(days=1), limit=1)
    yield GitRefDeletion.delete().where(GitRefDeletion.processed_before(now() - timedelta(days=99))).execute
    audit = Audit("prune", on=True)
    yield partial(audit.done, "ref", ids=[1])
    yield partial(audit.unclosed, "ref")


@pytest.mark.parametrize(("process", "probes"), [("scheduler", of_scheduler), ("exporter", of_exporter)])
def test_each_grant_of_a_process_is_needed(make_role, process, probes):
    role = make_role(process)
    needs = [*privileges.needs(MODELS, process)]

    with acting(role) as settings:
        asks = [partial(refused, ask) for ask in probes(settings)]
        assert not any(ask() for ask in asks)
        superfluous = [need for need in needs if not role.refuses(need, asks)]

    assert superfluous == []


RUNS = {
    "feature_flags": ("expired_job_artifacts",),
    "ci_job_artifacts": ("expired_job_artifacts",),
    "project_statistics": ("expired_job_artifacts",),
    "ci_deleted_objects": ("expired_job_artifacts", "delete_objects"),
    "user_statuses": ("user_status_cleanup",),
    "bulk_imports": ("stale_imports",),
    "bulk_import_entities": ("stale_imports",),
    "bulk_import_trackers": ("stale_imports",),
}
"""Which batches' runs do what a worker does to a table; the rest is done beside them."""


def test_each_grant_of_a_worker_is_needed(main, make_role):
    role = make_role("worker")
    # A person's run opens its own row, and is an act; a worker's was opened by a scheduler.
    role.ask(f"grant insert on job_runs to {role.name}; grant insert on audit_acts to {role.name}")
    role.ask("insert into feature_flags values ('bulk_delete_job_artifacts', true)")

    def run(batch):
        result = main("run", batch, "--json", **role.settings)
        return "permission denied" in result.stdout + result.stderr

    with acting(role) as settings:
        asks = [partial(refused, ask) for ask in of_worker(settings)]
        superfluous = [
            need
            for need in privileges.needs(MODELS, "worker")
            if not role.refuses(need, [*asks, *(partial(run, batch) for batch in RUNS.get(need.table, ()))])
        ]

    assert superfluous == []
