"""Whatever a person can cause ends in one sentence: asked of every command there is, by walking the registered ones."""

import os
import socket
import threading
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
import redis
from psycopg2.extensions import make_dsn

from forgekeeper.settings import PREFIX
from tests.harness.every import every
from tests.harness.traps import Traps
from workers.stale_direct_uploads import register

from .every_command import commands, serves, walk

ROOT = Path(__file__).parents[2]
ALL = dict(commands())
SERVING = {name for name, command in ALL.items() if serves(command)}
NEED_NO_SERVER = {"demo", "settings", "metrics", "batches", "exporter", "uploads", "refs"}
WAITING = {"scheduler", "worker", "up"}
"""They do not end over what a server says, but wait until it says something else."""
NEED_THE_DATABASE = sorted(set(ALL) - NEED_NO_SERVER - WAITING - {"check", "processes", "redis", "psql"})
MOST = {"status", "ticks", "why", "run", "send", "pause", "resume", "flags", "flags on", "seed"}
BATCH = "user_status_cleanup"
HELD = 3
"""The exit status where a batch is held: an answer, with its reason on standard error."""

every_command = every("command", sorted(set(ALL) - {"demo"} - WAITING))
every_command_that_ends = every("command", sorted(set(ALL) - SERVING))


@pytest.fixture(scope="module")
def traps(tmp_path_factory):
    """A folder full of traps, in which every command is run."""
    return Traps(tmp_path_factory.mktemp("walk"))


@pytest.fixture(scope="module")
def walked(urls, new_database, traps):
    """Run every command with these settings on a database of its own; return what each came to, by its words."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    machine = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    ports = {f"METRICS_PORT_{process}": "0" for process in ("WORKER", "SCHEDULER", "EXPORTER")}

    def run(*, leave_out=(), **settings):
        given = {"DATABASE_URL": urls.database, "REDIS_URL": urls.redis, **ports, **settings}
        environment = {**machine, "PYTHONPATH": path, **{PREFIX + name: value for name, value in given.items()}}
        return walk(environment, traps.folder, {"demo", *leave_out})

    return run


@pytest.fixture(scope="module")
def tables(new_database, walked, query):
    """The URL of a database with all tables."""
    url = new_database()
    walked(leave_out=set(ALL) - {"migrate", "seed"}, DATABASE_URL=url)
    # A new installation holds every batch that deletes; `run` and `send` of this one are to get as far as their work.
    query(url, f"delete from holds where batch = '{BATCH}'")
    return url


@pytest.fixture(scope="module")
def role(tables, query):
    """Make users of that database who may do nothing but what the statement grants; return its URL as each."""
    made = []

    def make(grants=""):
        name = f"test_{uuid4().hex}"
        made.append(name)
        query(tables, f"create role {name} login password 'x'; {grants.format(name=name)}")
        return make_dsn(tables, user=name, password="x")

    yield make
    for name in made:
        query(tables, f"drop owned by {name}; drop role {name}")


def said(result):
    """The sentence of a command that was refused or has failed, in what it wrote to standard error."""
    _status, _out, err = result
    (line,) = [line for line in err.splitlines() if line.startswith("forgekeeper: ")]
    assert err.splitlines()[-1] == line
    return line.removeprefix("forgekeeper: ")


def assert_fit(result):
    status, out, err = result
    assert "Traceback" not in out + err
    assert status in {0, 1, 2, 3}
    if status == HELD:
        assert err.strip()
        return
    # A finding of `check`, and a `--check` of others, is an answer: it stands on standard output.
    assert status == 0 or out or said(result)


# Without rights


@pytest.fixture(scope="module")
def without_rights(walked, role):
    return walked(leave_out=WAITING, DATABASE_URL=role())


@pytest.fixture(scope="module")
def with_few_rights(walked, role):
    # Which migrations were applied can be read, and nothing else.
    return walked(leave_out=set(ALL) - MOST, DATABASE_URL=role("grant select on forgekeeper_migrations to {name}"))


@every_command
def test_without_rights_a_command_shows_no_trace(without_rights, command):
    assert_fit(without_rights[command])


@every("command", sorted(set(NEED_THE_DATABASE) - {"migrate"}))
def test_without_rights_a_command_says_what_is_denied_and_what_to_do(without_rights, command):
    result = without_rights[command]

    assert result[:2] == [1, ""]
    assert said(result) == (
        "cannot use PostgreSQL: permission denied for table forgekeeper_migrations; grant that to the user of the"
        " database, or let another run this; `forgekeeper check` lists what is missing"
    )


@every("command", sorted(MOST))
def test_with_few_rights_a_command_names_the_table(with_few_rights, command):
    assert with_few_rights[command][0] == 1
    assert "permission denied for table " in said(with_few_rights[command])


# A database that gives no more


@pytest.fixture(scope="module")
def read_only(walked, tables):
    return walked(leave_out=SERVING, DATABASE_URL=make_dsn(tables, options="-cdefault_transaction_read_only=on"))


@every_command_that_ends
def test_where_nothing_may_be_written_a_command_shows_no_trace(read_only, command):
    assert_fit(read_only[command])


@pytest.mark.parametrize(
    "command", ["pause", "resume", "flags on", "run", "send", "migrate", "seed", "quarantine retry"]
)
def test_where_nothing_may_be_written_a_change_says_where_it_could_be(read_only, command):
    if read_only[command][0] == 0:
        pytest.skip("it had nothing to change")

    assert said(read_only[command]).endswith(
        " in a read-only transaction; point FORGEKEEPER_DATABASE_URL at the primary,"
        " or turn default_transaction_read_only off for its user"
    )


@pytest.fixture(scope="module")
def without_time(walked, tables):
    return walked(leave_out=set(ALL) - MOST - {"check"}, DATABASE_URL=tables, DATABASE_STATEMENT_TIMEOUT="0.001")


@every("command", sorted(MOST | {"check"}))
def test_where_each_statement_takes_too_long_a_command_shows_no_trace(without_time, command):
    assert_fit(without_time[command])


@pytest.fixture(scope="module")
def without_schema(walked, tables):
    leave_out = set(ALL) - MOST - {"check", "migrate"}
    return walked(leave_out=leave_out, DATABASE_URL=make_dsn(tables, options="-csearch_path=elsewhere"))


@every("command", sorted(MOST | {"check", "migrate"}))
def test_where_the_schema_does_not_exist_a_command_shows_no_trace(without_schema, command):
    assert_fit(without_schema[command])


def test_where_the_schema_does_not_exist_migrate_says_how_to_name_one(without_schema):
    assert said(without_schema["migrate"]).endswith(
        "create the schema that the user's search_path names, or set search_path in FORGEKEEPER_DATABASE_URL"
        " (?options=-csearch_path%3DNAME)"
    )


@pytest.mark.parametrize(
    ("state", "hint"),
    [
        ("53100", "free space on the database's disk, then try again"),
        ("53200", "give the server more of what it lacks, then try again"),
        ("53300", "wait until others have left, or raise its max_connections"),
        ("55P03", "another session holds what this needs: try again, or raise FORGEKEEPER_DATABASE_LOCK_TIMEOUT"),
        ("40001", "another session was in the way: try again"),
        ("57P01", "somebody has stopped the server or ended this session: try again"),
        ("42883", "run `forgekeeper check`"),
        ("P0001", "`forgekeeper check` looks for the cause"),
        ("XX001", "`forgekeeper check` looks for the cause"),
    ],
)
def test_what_the_database_refuses_is_said_with_what_to_do(main, own_database, query, state, hint):
    query(
        own_database,
        f"create function refuse() returns trigger language plpgsql as $$ begin raise 'refused' using errcode = '{state}';"
        " end $$; create trigger refuse before insert or update on batches execute function refuse()",
    )

    result = main("pause", BATCH, "--reason", "a test", DATABASE_URL=own_database)

    assert (result.status, result.complaint) == (1, f"cannot use PostgreSQL: refused; {hint}")


@pytest.mark.parametrize("command", ["pause", "stop", "resume"])
def test_what_the_database_refuses_of_every_batch_is_said_once(main, own_database, command):
    url = make_dsn(own_database, options="-cdefault_transaction_read_only=on")

    result = main(command, "--all", "--reason", "a test", DATABASE_URL=url)

    assert result.status == 1
    assert result.complaint.endswith(" or turn default_transaction_read_only off for its user")


def test_a_run_that_is_refused_says_once_what_to_do(main, own_database, query):
    query(
        own_database,
        "create function refuse() returns trigger language plpgsql as $$ begin raise 'refused' using errcode = '53100';"
        " end $$; create trigger refuse before delete on user_statuses execute function refuse()",
    )

    result = main("run", BATCH, DATABASE_URL=own_database)

    assert result.status == 1
    assert result.sentences[-1].startswith(f"forgekeeper: {BATCH} failed: cannot use PostgreSQL: refused; free space")


def test_a_run_without_the_right_root_sends_to_check_once(main, database, tmp_path):
    result = main("run", "git_ref_cleanup", REPOSITORIES_ROOT=str(tmp_path))

    assert (result.stdout + "\n".join(result.sentences)).count("`forgekeeper check") <= 1


@pytest.mark.parametrize("setting", ["user", "dbname"])
def test_a_database_or_user_that_does_not_exist_is_named(main, settings, urls, setting):
    result = main("status", DATABASE_URL=make_dsn(urls.database, **{setting: "nobody"}))

    assert result.status == 1
    assert result.complaint.endswith('"nobody" does not exist; check FORGEKEEPER_DATABASE_URL')


# A Redis that gives no more


@contextmanager
def answering(answer):
    """Something that is no Redis of ours: it answers whatever is sent with the same; yield its port."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve():
            while True:
                try:
                    connection, _address = server.accept()
                except OSError:
                    return
                threading.Thread(target=reply, args=(connection,), daemon=True).start()

        def reply(connection):
            with closing(connection):
                try:
                    while connection.recv(4096):
                        connection.sendall(answer)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def redis_without_rights(walked, tables, urls):
    with closing(redis.Redis.from_url(urls.redis)) as server:
        server.execute_command("ACL", "SETUSER", "weak", "reset", "on", ">x")
        separator = "://weak:x@"
        yield walked(leave_out=WAITING, DATABASE_URL=tables, REDIS_URL=urls.redis.replace("://", separator, 1))
        server.execute_command("ACL", "DELUSER", "weak")


@every_command
def test_without_rights_on_redis_a_command_shows_no_trace(redis_without_rights, command):
    assert_fit(redis_without_rights[command])


@every("command", ["send", "buckets", "leases"])
def test_without_rights_on_redis_a_command_says_what_to_grant(redis_without_rights, command):
    assert redis_without_rights[command][0] == 1
    assert said(redis_without_rights[command]).endswith(
        "; grant that to its user with ACL SETUSER, or name another user in FORGEKEEPER_REDIS_URL"
    )


@pytest.fixture(scope="module")
def redis_of_others(walked, tables, urls):
    """The walk in a database of Redis where another program has our keys' names for texts."""
    keys = [register.PENDING, register.FAILED, register.DELETING, register.ADOPTED]
    keys += [f"forgekeeper:{queue}{kind}" for queue in ("cron", "git") for kind in ("", ".DQ", ".XQ", ".msgs")]
    with closing(redis.Redis.from_url(_numbered(urls.redis, 9))) as server:
        server.mset(dict.fromkeys(keys, "a text"))
        yield walked(leave_out=SERVING, DATABASE_URL=tables, REDIS_URL=_numbered(urls.redis, 9))
        server.flushdb()


def _numbered(url, number):
    return url.replace("db=0", f"db={number}") if "db=" in url else f"{url.rpartition('/')[0]}/{number}"


@every_command_that_ends
def test_where_a_key_holds_something_else_a_command_shows_no_trace(redis_of_others, command):
    assert_fit(redis_of_others[command])


@every("command", ["uploads forget"])
def test_where_a_key_holds_something_else_another_program_is_suspected(redis_of_others, command):
    assert said(redis_of_others[command]) == (
        "cannot use Redis: WRONGTYPE Operation against a key holding the wrong kind of value; another program may use"
        " the same database, and a key of forgekeeper's in it; `forgekeeper check` names it: move it away, or name"
        " another database in FORGEKEEPER_REDIS_URL"
    )


def test_a_wrong_password_of_redis_is_said(main, database, urls):
    result = main("leases", REDIS_URL=urls.redis.replace("://", "://nobody:hunter2@", 1))

    assert result.status == 1
    assert result.complaint.endswith("; check the user and the password in FORGEKEEPER_REDIS_URL")


def test_a_redis_that_is_full_is_said(main, database, urls):
    with closing(redis.Redis.from_url(urls.redis)) as server:
        server.config_set("maxmemory", "1")
        try:
            result = main("send", BATCH)
        finally:
            server.config_set("maxmemory", "0")

    assert result.status == 1
    assert "give it more memory (maxmemory)" in result.complaint


def test_a_redis_that_is_a_replica_is_said(main, database, urls):
    with closing(redis.Redis.from_url(urls.redis)) as server:
        server.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            result = main("leases", "break", "x")
        finally:
            server.execute_command("REPLICAOF", "NO", "ONE")

    assert result.status == 1
    assert result.complaint.endswith("; this is a replica: point FORGEKEEPER_REDIS_URL at its master")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        ("-NOAUTH Authentication required.", "give its password in FORGEKEEPER_REDIS_URL, before the host"),
        ("-LOADING Redis is loading the dataset in memory", "try again when it has read its data"),
        (
            "-MISCONF Redis is configured to save RDB snapshots",
            "free space on the disk of Redis, or mend what its log says",
        ),
        ("-ERR max number of clients reached", "wait until others have left, or raise its maxclients"),
        ("-MASTERDOWN Link with MASTER is down", "try again when its master is there"),
        (
            "-CLUSTERDOWN Hash slot not served",
            "a Redis Cluster does not do: point FORGEKEEPER_REDIS_URL at a single Redis",
        ),
        ("HTTP/1.1 400 Bad Request\r\n", "what listens there is not Redis: check FORGEKEEPER_REDIS_URL"),
    ],
)
def test_what_redis_answers_is_said_with_what_to_do(main, database, answer, hint):
    with answering(answer.encode() + b"\r\n") as port:
        result = main("leases", REDIS_URL=f"redis://127.0.0.1:{port}/0")

    assert result.status == 1
    assert result.complaint.startswith("cannot use Redis: ")
    assert result.complaint.endswith(f"; {hint}")


def test_a_port_where_no_postgresql_listens_is_said(main, settings):
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        result = main("status", DATABASE_URL=f"postgresql://u@127.0.0.1:{port}/d")

    assert result.status == 1
    assert result.complaint.endswith("; what listens there may not be PostgreSQL: check FORGEKEEPER_DATABASE_URL")


def test_no_command_runs_what_lies_in_the_folder_where_it_is_started(
    traps, without_rights, read_only, redis_without_rights, redis_of_others
):
    # Those that serve wait for what they lack, and have tests of their own for this.
    assert set(ALL) - set(without_rights) == {"demo", "scheduler", "up", "worker"}
    assert traps.sprung() == []


def test_a_mistake_of_our_own_keeps_its_trace(main, own_database, monkeypatch):
    # A statement that is no SQL is nobody's to mend but ours: without its trace nobody could.
    monkeypatch.setattr("forgekeeper.cli.status.now", _syntax_error)

    assert "Traceback" in main("status", DATABASE_URL=own_database).stderr


def _syntax_error():
    from forgekeeper.database import database

    database.execute_sql("selec 1")
