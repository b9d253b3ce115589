"""The rights that docs/security.md lists are enough for everything and no more, and `check` names what is missing.

`python -m tests.system.soak` runs the whole system with them.
"""

import ast
import os
import re
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import dramatiq
import pytest
import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

from forgekeeper.api.batches import BATCHES
from forgekeeper.cli.migrate import OWN_TABLES
from forgekeeper.platform.database import relations, schema
from forgekeeper.targets import sentinel
from models import FORGE_MODELS
from tests.harness.stale_uploads import uploads as register
from tests.harness.thorough import whole_only
from tests.system.soak import rights

MODELS = (*OWN_TABLES, *FORGE_MODELS)
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
    # No more columns either than the contract has.
    for model in FORGE_MODELS:
        for column in model.beside:
            query(own_database, f"alter table {model._meta.table_name} drop column {column}")
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

    lines = [f"grant usage on schema forgekeeper, public to {role};"]
    if process != "exporter":
        lines.append(f"grant select on forgekeeper.{schema.MIGRATIONS_TABLE} to {role};")
    schemas = dict.fromkeys(OWN_TABLES, "forgekeeper.")
    needed = {
        schemas.get(model, "") + model._meta.table_name: ", ".join(relations.list_privileges(model, process))
        for model in MODELS
    }
    lines += [f"grant {wanted} on {table} to {role};" for table, wanted in needed.items() if wanted]
    assert rights.grants()[role].splitlines() == lines


@whole_only
def test_check_finds_nothing_missing_with_these_grants_but_what_redis_does_not_let_it_see(main, role):
    found = main("check", "--json", **role.settings)

    assert [one for one in found.json["findings"] if one["level"] == "error"] == []
    ((level, message),) = found.findings("redis")
    assert (level, "grant +info, or check yourself" in message) == ("warning", True)


@whole_only
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


@whole_only
def test_every_command_works_with_these_grants(main, role, tmp_path):
    # They work on a failed upload, a bad record, and an object that nobody knows.
    with closing(redis.from_url(role.settings["REDIS_URL"], driver_info=None)) as server:
        server.zadd(register.keys.failed, {"artifacts:given/up": 1})
    role.ask(
        "insert into quarantine (batch, record, key, reason, error, failures, since, failed_at)"
        " values ('user_status_cleanup', 'user_status', '7', 'record_failed', 'it is bad', 2, now(), now())"
    )
    file = tmp_path / "objects" / "a" / "b"
    file.parent.mkdir()
    file.write_bytes(b"")
    os.utime(file, (0, 0))

    results = {command: main(*command.split(), **role.settings) for command in COMMANDS}

    assert {command: result.stderr for command, result in results.items() if result.status != 0} == {}


# `grants`, and `check` as a process

PROCESSES = ["scheduler", "worker", "exporter", "console", "person"]


@pytest.fixture
def stranger(role, own_database, new_role):
    """Return the settings of a role with no rights, and a user of Redis for each process."""

    def settings_of(process):
        user = EVERYTHING if process == "person" else f"{EVERYTHING}-{process}"
        url = new_role(own_database, "revoke usage on schema forgekeeper from ROLE;")
        server = role.settings["REDIS_URL"].replace(f"://{EVERYTHING}:", f"://{user}:")
        return role.settings | {"DATABASE_URL": url, "REDIS_URL": server}

    return settings_of


@whole_only
@pytest.mark.parametrize("process", PROCESSES)
def test_what_a_process_is_granted_is_what_check_asks_for_as_that_process(main, role, stranger, own_database, process):
    settings = stranger(process)
    name = urlsplit(settings["DATABASE_URL"]).username

    before = main("check", "--as", process, "--json", **settings)
    granted = main("grants", "--role", name, "--as", process, "--json", DATABASE_URL=own_database)
    after = main("check", "--as", process, "--json", **settings)

    assert (before.status, granted.status, granted.json["granted"]) == (1, 0, True)
    assert [one["message"] for one in after.json["findings"] if one["level"] == "error"] == []


@whole_only
def test_a_scheduler_is_not_told_to_get_rights_of_others(main, role, stranger, own_database):
    settings = stranger("scheduler")
    main(
        "grants", "--role", urlsplit(settings["DATABASE_URL"]).username, "--as", "scheduler", DATABASE_URL=own_database
    )

    assert "user_statuses" not in main("check", "--as", "scheduler", **settings).stdout


@whole_only
def test_grants_that_are_printed_are_not_made(main, role, stranger, own_database, query):
    name = urlsplit(stranger("worker")["DATABASE_URL"]).username

    printed = main("grants", "--role", name, "--as", "worker", "--print", DATABASE_URL=own_database)

    assert (
        f'grant select, update ("user_id"), delete on "public"."user_statuses" to "{name}";'.replace(
            '"user_id"', "user_id"
        )
        in printed.stdout
    )
    assert query(own_database, f"select has_table_privilege('{name}', 'user_statuses', 'delete')") == [(False,)]


def test_grants_for_a_role_that_does_not_exist_are_refused_with_what_to_do(main, own_database):
    refused = main("grants", "--role", "nobody", "--as", "worker", DATABASE_URL=own_database)

    assert (refused.status, 'create the role first, as with `create role "nobody" login`' in refused.complaint) == (
        1,
        True,
    )


@pytest.fixture
def five_roles(own_database, query):
    """The database of the tests; the five roles are dropped at the end."""
    yield own_database
    there = [
        name for (name,) in query(own_database, "select rolname from pg_roles where rolname ~ '^forgekeeper(_|$)'")
    ]
    for name in {"forgekeeper_scheduler", "forgekeeper_worker", "forgekeeper_exporter", "forgekeeper_console"} & {
        *there
    }:
        query(own_database, f"drop owned by {name}; drop role {name}")


def test_one_command_creates_five_roles_that_may_do_what_their_processes_do(main, five_roles, query):
    granted = main("grants", "--all", "--json", DATABASE_URL=five_roles)

    assert granted.status == 0, granted.stderr
    for process in ("scheduler", "worker", "exporter", "console"):
        url = urlsplit(five_roles)
        mine = url._replace(netloc=f"forgekeeper_{process}@{url.netloc.rpartition('@')[2]}").geturl()
        checked = main("check", "--as", process, "--json", DATABASE_URL=mine)
        assert checked.findings("privileges") == [], process
    again = main("grants", "--all", "--json", DATABASE_URL=five_roles)
    assert (again.status, again.json["created"]) == (0, [])


def test_all_roles_are_printed_and_nothing_is_created(main, five_roles, query):
    printed = main("grants", "--all", "--print", DATABASE_URL=five_roles)

    assert "create role forgekeeper_worker login;" in printed.stdout.replace('"', "")
    assert query(five_roles, "select from pg_roles where rolname = 'forgekeeper_worker'") == []


def test_a_role_that_may_create_no_roles_is_told_who_may(main, five_roles, new_role):
    url = new_role(five_roles, "grant all on all tables in schema forgekeeper, public to ROLE;")

    refused = main("grants", "--all", DATABASE_URL=url)

    assert (refused.status, "a superuser creates roles: `create role" in refused.complaint) == (1, True)


def test_all_roles_exclude_one_role(main, own_database):
    assert main("grants", "--all", "--role", "x", DATABASE_URL=own_database).status == 2


LACKING = {
    "revoke select on forgekeeper_migrations from {0}": (
        "{0} may not select forgekeeper_migrations: `grant select on forgekeeper.forgekeeper_migrations to {0}`"
    ),
    "revoke all on user_statuses from {0}": (
        "user_status_cleanup: {0} may not select or update or delete user_statuses:"
        " `grant select, update (user_id), delete on user_statuses to {0}`"
    ),
    "revoke usage on schema public from public, {0}": (
        "{0} may not use schema public: `grant usage on schema public to {0}`"
    ),
}


@whole_only
@pytest.mark.parametrize("change", LACKING, ids=["migrations", "table", "schema"])
def test_check_says_in_one_line_what_is_missing_and_the_grant_that_gives_it(role, errors, change):
    role.ask(change.format(role.name))

    assert errors() == [LACKING[change].format(role.name)]


# Redis, command by command

ROOT = Path(__file__).parents[2]
DRAMATIQ = {"dispatch": Path(dramatiq.__file__).parent / "brokers" / "redis" / "dispatch.lua"}
LUA = DRAMATIQ | {path.stem: path for top in ("forgekeeper", "workers") for path in (ROOT / top).rglob("*.lua")}
CALLERS = [*ROOT.glob("forgekeeper/**/*.py"), *ROOT.glob("workers/**/*.py"), *ROOT.glob("metrics/*.py")]
ON_SAMPLES = {"demo", "sample"}
"""Modules that only ever meet a Redis of their own."""
CONNECTING = {"ping", "select", "evalsha", "script|load"}
"""Commands that connecting and running scripts send."""
CLIENTS = {"client", "pipe", "broker.client", "self.client", "self._client"}
OPTIONAL = {"info"}
NO_COMMANDS = {"execute", "execute_command"}
AS = {"pipeline": {"multi", "exec"}, "delete": {"del"}, "scan_iter": {"scan"}, "script_load": {"script|load"}}
"""What the client's methods are on the wire, where that is not their name."""
ALL = {"allkeys", "allcommands", "allchannels"}
DANGEROUS = {"keys", "flushall", "flushdb", "config", "debug", "info", "acl", "sort", "restore", "migrate", "script"}
OF = {"uploads": {"upload_prepare"}, "worker": LUA.keys() - {"upload_adopt", "upload_prepare"}}
"""Which scripts each runs; a scheduler runs a part of Dramatiq's."""
SENDS = ("forgekeeper", "forgekeeper-scheduler", "forgekeeper-worker")
MAINTAINS = {"forgekeeper", "forgekeeper-worker"}
"""Who may list keys: Dramatiq's maintenance does."""


def commands(user):
    """Name the commands that a user has been granted."""
    return {rule[1:] for rule in rights.users()[user] if rule.startswith("+")}


def in_scripts(names):
    return {call for name in names for call in re.findall(r"redis\.p?call\([\"'](\w+)[\"']", LUA[name].read_text())}


def in_code():
    for path in CALLERS:
        if path.stem in ON_SAMPLES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) in CLIENTS
            ):
                # The first argument of a postponed command is its name.
                name = node.args[0].value.lower() if node.func.attr == "postpone" else node.func.attr
                yield from AS.get(name, {name})
                if node.func.attr == "zrange" and any(keyword.arg == "desc" for keyword in node.keywords):
                    yield "zrevrange"


@whole_only
def test_whoever_may_do_everything_may_do_what_the_code_does_and_no_more():
    asked = in_scripts(LUA) | set(in_code()) | CONNECTING

    assert commands(EVERYTHING) == asked - NO_COMMANDS - OPTIONAL


@pytest.mark.parametrize("who", OF)
def test_everybody_may_do_what_their_scripts_do(who):
    assert in_scripts(OF[who]) - commands(f"{EVERYTHING}-{who}") == set()


@pytest.mark.parametrize("user", sorted(set(rights.users()) - {EVERYTHING}))
def test_nobody_may_do_more_than_who_may_do_everything(user):
    # Producers in other languages load their script.
    assert commands(user) - commands(EVERYTHING) <= {"script|load"}


@pytest.mark.parametrize("user", sorted(rights.users()))
def test_nobody_is_granted_a_category_or_a_dangerous_command_or_every_key_or_channel(user):
    rules = rights.users()[user]

    assert not [rule for rule in rules if rule.startswith(("+@", "~*", "%", "&*")) or rule in ALL]
    assert commands(user).isdisjoint(DANGEROUS - ({"keys"} if user in MAINTAINS else set()))


@pytest.fixture
def connect(database, urls):
    """Connect as a user of the page."""
    with redis.from_url(urls.redis) as server:
        rights.make_users(server, "secret")

        def client(user):
            return redis.from_url(urls.redis, username=user, password="secret", driver_info=None)

        yield client
        server.execute_command("ACL", "DELUSER", *rights.users())


def broker(client, **options):
    return RedisBroker(client=client, namespace="forgekeeper", middleware=[], **options)


@pytest.mark.parametrize("user", SENDS)
def test_who_sends_may_do_what_dramatiq_does_to_send(connect, user):
    sending = broker(connect(user), maintenance_chance=0)
    connect(user).script_load("return 1")

    sending.declare_queue("cron")
    sending.enqueue(Message("cron", "prune", (), {}, {}))

    assert sending.client.type("forgekeeper:cron") == b"list"


def test_a_worker_may_do_what_dramatiq_does_with_messages(connect):
    mine, other = (broker(connect("forgekeeper-worker"), maintenance_chance=1_000_000) for _ in range(2))
    for one in (mine, other):
        one.declare_queue("cron")
    for _ in range(4):
        mine.enqueue(Message("cron", "prune", (), {}, {}))

    first, second, third, _ = (Message.decode(body) for body in mine.do_fetch("cron", 4))
    for command, message in (("ack", first), ("nack", second), ("requeue", third)):
        getattr(mine, f"do_{command}")("cron", message.options["redis_message_id"])
    mine.client.zadd("forgekeeper:__heartbeats__", {mine.broker_id: 1})

    assert len(other.do_fetch("cron", 4)) == 2
    assert other.do_qsize("cron") >= 2
