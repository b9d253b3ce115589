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
NEED_NO_SERVER = {"demo", "settings", "metrics", "batches", "exporter", "refs", "uploads"}
WAITING = {"scheduler", "worker", "up"}
"""They do not end over what a server says, but wait until it says something else."""
NEED_THE_DATABASE = sorted(set(ALL) - NEED_NO_SERVER - WAITING - {"check", "processes"})
BATCH = "user_status_cleanup"
HELD = 3
"""The exit status where a batch is held: an answer, with its reason on standard error."""

every_command = every("command", sorted(set(ALL) - {"demo"} - WAITING))


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


@pytest.fixture(scope="module")
def without_rights(walked, role):
    return walked(leave_out=WAITING, DATABASE_URL=role())


@every_command
def test_without_rights_a_command_shows_no_trace(without_rights, command):
    assert_fit(without_rights[command])


@every("command", sorted(set(NEED_THE_DATABASE) - {"migrate", "stop"}))
def test_without_rights_a_command_says_what_is_denied_and_what_to_do(without_rights, command):
    result = without_rights[command]

    assert result[:2] == [1, ""]
    assert said(result) == (
        "cannot use PostgreSQL: permission denied for table forgekeeper_migrations; grant that to the user of the"
        " database, or let another run this; `forgekeeper check` lists what is missing"
    )


@pytest.fixture(scope="module")
def read_only(walked, tables):
    return walked(leave_out=SERVING, DATABASE_URL=make_dsn(tables, options="-cdefault_transaction_read_only=on"))


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


def test_a_run_without_the_right_root_sends_to_check_once(main, database, tmp_path):
    result = main("run", "git_ref_cleanup", REPOSITORIES_ROOT=str(tmp_path))

    assert (result.stdout + "\n".join(result.sentences)).count("`forgekeeper check") <= 1


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


@pytest.fixture(scope="module")
def redis_of_others(walked, tables, urls):
    """The walk in a database of Redis where another program has our keys' names for texts."""
    keys = [register.PENDING, register.FAILED, register.DELETING, "forgekeeper:dead"]
    keys += [f"forgekeeper:{queue}{kind}" for queue in ("cron", "git") for kind in ("", ".DQ", ".XQ", ".msgs")]
    with closing(redis.Redis.from_url(_numbered(urls.redis, 9))) as server:
        server.mset(dict.fromkeys(keys, "a text"))
        yield walked(leave_out=SERVING, DATABASE_URL=tables, REDIS_URL=_numbered(urls.redis, 9))
        server.flushdb()


def _numbered(url, number):
    return url.replace("db=0", f"db={number}") if "db=" in url else f"{url.rpartition('/')[0]}/{number}"


def test_a_redis_that_is_full_is_said(main, database, urls):
    with closing(redis.Redis.from_url(urls.redis)) as server:
        server.config_set("maxmemory", "1")
        try:
            result = main("send", BATCH)
        finally:
            server.config_set("maxmemory", "0")

    assert result.status == 1
    assert "give it more memory (maxmemory)" in result.complaint


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
