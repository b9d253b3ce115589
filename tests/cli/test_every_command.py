"""What servers refuse ends in one sentence that says what to do: asked of every command there is."""

import socketserver
import threading
from contextlib import contextmanager, suppress

import pytest

from forgekeeper.platform import database as db
from tests.harness.every import every
from tests.harness.thorough import whole_only

from .every_command import arguments, commands, serves

ALL = dict(commands())
SERVING = {name for name, command in ALL.items() if serves(command)}
NEED_NO_TABLE = {"settings", "metrics", "batches", "contract", "refs", "uploads", "check", "migrate", "adopt", "files"}
NEED_NO_TABLE |= {name for name in ALL if name.startswith(("console user", "console token"))}
NEED_NO_TABLE |= {"webhook test"}
BATCH = "user_status_cleanup"
DENIED = (
    "; grant that right to the database user, or run this as another user; `forgekeeper check` lists the missing rights"
)
REFUSED = {
    "53100": "free space on the database's disk, then try again",
    "53200": "give the server more of that resource, then try again",
    "53300": "wait until other connections have ended, or raise its max_connections",
    "55P03": "another session holds a lock that this needs: try again, or raise FORGEKEEPER_DATABASE_LOCK_TIMEOUT",
    "40001": "this conflicted with another session: try again",
    "57P01": "try again",
    "42883": "run `forgekeeper check`",
    "P0001": "run `forgekeeper check` to find the cause",
}
ANSWERS = {
    "-NOAUTH Authentication required.": "write the password into FORGEKEEPER_REDIS_URL, before the host",
    "-LOADING Redis is loading the dataset in memory": "try again when it is ready",
    "-MISCONF Redis is configured to save RDB snapshots": "free space on the disk of Redis, or fix the error in its log",
    "-ERR max number of clients reached": "wait until other connections have ended, or raise its maxclients",
    "-MASTERDOWN Link with MASTER is down": "try again when it is ready",
    "-CLUSTERDOWN Hash slot not served": "Redis Cluster is not supported: name a single Redis in FORGEKEEPER_REDIS_URL",
    "HTTP/1.1 400 Bad Request\r\n": "the server at that address is not Redis: check FORGEKEEPER_REDIS_URL",
}


@pytest.fixture
def without_rights(own_database, new_role):
    """The URL of a database with all tables, as a user who may do nothing in it."""
    return new_role(own_database)


@whole_only
@every("command", sorted(set(ALL) - SERVING))
def test_without_rights_a_command_says_what_is_denied_and_what_to_do(main, without_rights, command):
    result = main(*command.split(), *arguments(command, ALL[command]), DATABASE_URL=without_rights)

    assert "Traceback" not in result.stdout + result.stderr
    assert result.status in {0, 1, 2}
    if command not in NEED_NO_TABLE:
        assert (result.status, result.stdout) == (1, "")
        assert result.stderr.startswith("forgekeeper: cannot use PostgreSQL: permission denied for table ")
        assert result.stderr.rstrip().endswith(DENIED)


@whole_only
def test_what_a_command_may_not_read_page_by_page_is_said_too(main, own_database, new_role):
    url = new_role(
        own_database,
        "grant select, insert, update, delete on all tables in schema public, forgekeeper to ROLE;"
        " revoke select on audit_deletions from ROLE; grant execute on function pg_control_system() to ROLE",
    )

    result = main("objects", "hold", "--run", "1", DATABASE_URL=url)

    denied = f"cannot use PostgreSQL: permission denied for table audit_deletions{DENIED}"
    assert (result.status, result.complaint) == (1, denied)


@whole_only
@every("state", REFUSED)
def test_what_the_database_refuses_is_said_with_what_to_do(main, own_database, query, state):
    query(
        own_database,
        f"create or replace function refuse() returns trigger language plpgsql as $$ begin"
        f" raise 'refused' using errcode = '{state}'; end $$;"
        " create or replace trigger refuse before insert or update on batches execute function refuse()",
    )

    result = main("pause", BATCH, "--reason", "a test", DATABASE_URL=own_database)

    assert (result.status, result.complaint) == (1, f"cannot use PostgreSQL: refused; {REFUSED[state]}")


@contextmanager
def answering(answer):
    """Something that is no Redis of ours: it answers whatever is sent with the same; yield its port."""

    class Answering(socketserver.BaseRequestHandler):
        def handle(self):
            with suppress(OSError):
                while self.request.recv(4096):
                    self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answering) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever).start()
        yield server.server_address[1]
        server.shutdown()


@whole_only
@every("answer", ANSWERS)
def test_what_redis_answers_is_said_with_what_to_do(main, database, answer):
    with answering(answer.encode() + b"\r\n") as port:
        result = main("leases", REDIS_URL=f"redis://127.0.0.1:{port}/0")

    assert result.status == 1
    assert result.complaint.startswith("cannot use Redis: ")
    assert result.complaint.endswith(f"; {ANSWERS[answer]}")


@whole_only
def test_a_mistake_of_our_own_keeps_its_trace(main, own_database, monkeypatch):
    # A statement that is no SQL is nobody's to mend but ours: without its trace nobody could.
    monkeypatch.setattr("forgekeeper.cli.status.now", lambda: db.database.execute_sql("selec 1"))

    assert "Traceback" in main("status", DATABASE_URL=own_database).stderr
