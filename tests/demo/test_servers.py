"""The embedded servers: what they are like, the folder of their data, and that they end with who started them."""

import os
import signal
import subprocess

import pytest

from demo.servers import EmbeddedError, run_servers
from tests.harness.thorough import whole_only
from tests.harness.waiting import wait_until

LIMIT = 60.0
LONG_LIVED_FORK = """
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print("forked", flush=True)
"""
SURVIVE_AN_INTERRUPT = """
try:
    print("waiting", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_the_database_is_a_new_one_by_code_point_in_utc_on_a_socket(query, redis):
    settings = ("current_database()", "'z' < 'ä'", "current_setting('TimeZone')", "current_setting('listen_addresses')")

    with run_servers() as running:
        assert query(running.database_url, f"select {', '.join(settings)}") == [("forgekeeper", True, "UTC", "")]
        assert redis(running.redis_url, "config", "get", "port") == {b"port": b"0"}
        # Nobody else may enter.
        assert running.folder.stat().st_mode & 0o077 == 0


@whole_only
def test_the_environment_of_a_client_reaches_neither_the_servers_nor_their_urls(monkeypatch, query):
    for name, value in {"PGDATA": "/none", "LC_ALL": "tlh", "PGHOST": "nowhere.invalid", "PGPORT": "1"}.items():
        monkeypatch.setenv(name, value)

    with run_servers() as started:
        # It is asked itself: a container's root may not look into a process that runs as somebody else.
        sql = f"select pg_read_binary_file('/proc/{started.postgres_pid}/environ')"
        environment = bytes(query(started.database_url, sql)[0][0]).split(b"\0")

    assert {b"PGDATA=/none", b"PGHOST=nowhere.invalid"}.isdisjoint(environment)
    assert b"LC_ALL=C" in environment


@pytest.fixture
def folder(temporary_root):
    return temporary_root / ".forgekeeper"


@pytest.fixture
def patiently(monkeypatch):
    """Wait longer for the servers of a process that was killed: they end when the machine lets them."""
    monkeypatch.setattr("demo.servers.server.FOLDER_LOCK_SECONDS", LIMIT)


@whole_only
def test_data_in_a_folder_is_durable_and_there_at_the_next_start(folder, query, redis):
    with run_servers(folder) as first:
        assert query(first.database_url, "select current_setting('fsync')") == [("on",)]
        query(first.database_url, "create table kept as select 1 as id")
        redis(first.redis_url, "set", "kept", "1")

    with run_servers(folder) as second:
        assert query(second.database_url, "select id from kept") == [(1,)]
        assert redis(second.redis_url, "get", "kept") == b"1"


@whole_only
@pytest.mark.usefixtures("patiently")
def test_data_survives_that_everything_is_killed_and_the_process_number_is_used_again(folder, host, query):
    parent = host(folder)
    query(parent.said.strip(), "create table kept as select 1 as id")
    pid_file = folder / "postgres" / "postmaster.pid"

    os.kill(int(pid_file.read_text().split()[0]), signal.SIGKILL)
    parent.kill()

    other = subprocess.Popen(["sleep", "600"])
    pid_file.write_text(f"{other.pid}\n{folder}/postgres\n")

    try:
        with run_servers(folder) as started:
            assert query(started.database_url, "select id from kept") == [(1,)]
    finally:
        other.kill()
        other.wait()


@whole_only
@pytest.mark.usefixtures("patiently")
def test_a_database_whose_making_was_interrupted_is_made_again(folder, host, query):
    parent = host(folder, ready=False)
    assert wait_until((folder / "postgres.unfinished/global").exists, LIMIT)
    parent.ends(signal.SIGKILL)

    with run_servers(folder) as started:
        assert query(started.database_url, "select current_database()") == [("forgekeeper",)]
    assert not (folder / "postgres.unfinished").exists()


@whole_only
@pytest.mark.parametrize("name", ['it\'s "grün" %20?x=1&y#z', "a,b", "d" * 150])
def test_any_folder_name_works(tmp_path, name, query, redis):
    with run_servers(tmp_path / name) as started:
        assert query(started.database_url, "select current_database()") == [("forgekeeper",)]
        assert redis(started.redis_url, "ping")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(EmbeddedError, match="Not a directory"), run_servers(tmp_path / "file/x"):
        pass


def servers_of(program):
    """Name the processes below the program whose titles are a server's."""
    return [line for line in program.process_table() if "redis-server" in line or "postgres" in line]


@whole_only
@pytest.mark.parametrize("deadly", [signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_its_killed_parent(host, deadly):
    parent = host()
    assert servers_of(parent)

    parent.ends(deadly)

    assert parent.leaves_no_process(), parent.process_table()


@whole_only
@pytest.mark.usefixtures("patiently")
def test_a_fork_that_outlives_the_parent_does_not_keep_the_folder(host, temporary_root):
    parent = host(temporary_root / "folder", then=LONG_LIVED_FORK)
    assert parent.says("forked")

    parent.ends(signal.SIGKILL)

    with run_servers(temporary_root / "folder"):
        pass


def test_an_interrupt_at_the_terminal_does_not_reach_the_servers(host, query):
    parent = host(then=SURVIVE_AN_INTERRUPT)
    assert parent.says("waiting")

    os.killpg(parent.process.pid, signal.SIGINT)

    assert parent.says("interrupted")
    assert query(parent.said.splitlines()[0], "select 1") == [(1,)]


@whole_only
@pytest.mark.parametrize("sudden", [signal.SIGKILL, signal.SIGSTOP])
def test_leaving_works_after_the_servers_were_killed_or_paused(sudden, temporary_root):
    with run_servers() as started:
        os.kill(started.postgres_pid, sudden)
        os.kill(started.redis_pid, sudden)

    assert list(temporary_root.iterdir()) == []


@whole_only
def test_a_server_that_does_not_start_is_an_error_with_the_end_of_its_log_and_leaves_nothing(temporary_root):
    with pytest.raises(EmbeddedError) as raised, run_servers(postgres_options={"work_mem": "much"}):
        pass

    assert str(raised.value).startswith("The embedded PostgreSQL did not start; the end of its log:\n")
    assert 'invalid value for parameter "work_mem": "much"' in str(raised.value)
    assert list(temporary_root.iterdir()) == []
