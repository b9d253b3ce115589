"""The embedded servers: what they are like, and the folder that they keep their data in."""

import os
import signal
import subprocess

import pytest

from demo.servers import EmbeddedError, servers
from tests.harness.waiting import wait_until

LIMIT = 60.0


@pytest.fixture(scope="module")
def running():
    context = servers()
    yield context.__enter__()
    context.__exit__(None, None, None)


def test_the_database_is_a_new_one_by_code_point_in_utc_on_a_socket(running, query, redis_client):
    settings = ("current_database()", "'z' < 'ä'", "current_setting('TimeZone')", "current_setting('listen_addresses')")
    assert query(running.database_url, f"select {', '.join(settings)}") == [("forgekeeper", True, "UTC", "")]
    assert redis_client(running.redis_url).config_get("port") == {"port": "0"}
    # Nobody else may enter.
    assert running.folder.stat().st_mode & 0o077 == 0


def test_the_environment_of_a_client_reaches_neither_the_servers_nor_their_urls(monkeypatch, query):
    for name, value in {"PGDATA": "/none", "LC_ALL": "tlh", "PGHOST": "nowhere.invalid", "PGPORT": "1"}.items():
        monkeypatch.setenv(name, value)

    with servers() as started:
        # It is asked itself: a container's root may not look into a process that runs as somebody else.
        sql = f"select pg_read_binary_file('/proc/{started.postgres_pid}/environ')"
        environment = bytes(query(started.database_url, sql)[0][0]).split(b"\0")

    assert {b"PGDATA=/none", b"PGHOST=nowhere.invalid"}.isdisjoint(environment)
    assert b"LC_ALL=C" in environment


@pytest.fixture
def folder(temporary_root):
    return temporary_root / ".forgekeeper"


def test_data_in_a_folder_is_durable_and_there_at_the_next_start(folder, query, redis_client):
    with servers(folder) as first:
        assert query(first.database_url, "select current_setting('fsync')") == [("on",)]
        query(first.database_url, "create table kept as select 1 as id")
        redis_client(first.redis_url).set("kept", "1")

    with servers(folder) as second:
        assert query(second.database_url, "select id from kept") == [(1,)]
        assert redis_client(second.redis_url).get("kept") == b"1"


def test_a_folder_in_use_is_refused_in_one_sentence_and_its_servers_go_on(folder, query):
    with servers(folder) as started:
        with pytest.raises(EmbeddedError) as refusal, servers(folder):
            pass

        assert str(refusal.value) == (
            f"{folder} is in use by other embedded servers; stop those, or use another folder."
        )
        assert query(started.database_url, "select 1") == [(1,)]


def test_data_survives_that_everything_is_killed_and_the_process_number_is_used_again(folder, host, query):
    parent = host(folder)
    query(parent.said.strip(), "create table kept as select 1 as id")
    pid_file = folder / "postgres" / "postmaster.pid"

    os.kill(int(pid_file.read_text().split()[0]), signal.SIGKILL)
    parent.kill()

    other = subprocess.Popen(["sleep", "600"])
    pid_file.write_text(f"{other.pid}\n{folder}/postgres\n")

    try:
        with servers(folder) as started:
            assert query(started.database_url, "select id from kept") == [(1,)]
    finally:
        other.kill()
        other.wait()


def test_a_database_whose_making_was_interrupted_is_made_again(folder, host, query):
    parent = host(folder, ready=False)
    assert wait_until((folder / "postgres.unfinished/global").exists, LIMIT)
    parent.ends(signal.SIGKILL)
    assert not (folder / "postgres").exists()

    with servers(folder) as started:
        assert query(started.database_url, "select current_database()") == [("forgekeeper",)]
    assert not (folder / "postgres.unfinished").exists()


@pytest.mark.parametrize("name", ['it\'s "grün" %20?x=1&y#z', "a,b", "d" * 150])
def test_any_folder_name_works(tmp_path, name, query, redis_client):
    with servers(tmp_path / name) as started:
        assert query(started.database_url, "select current_database()") == [("forgekeeper",)]
        assert redis_client(started.redis_url).ping()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(EmbeddedError, match="Not a directory"), servers(tmp_path / "file/x"):
        pass
