import os
import signal
import stat
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from forgekeeper.embedded import EmbeddedError, servers

QUERY = "SELECT current_setting('fsync'), current_setting('full_page_writes')"


@pytest.fixture
def folder(short_folder):
    return short_folder / ".forgekeeper"


def test_the_data_is_there_at_the_next_start(folder, query, redis_client):
    with servers(folder) as first:
        query(first.database_url, "CREATE TABLE kept AS SELECT 1 AS id")
        redis_client(first.redis_url).set("kept", "1")

    with servers(folder) as second:
        assert query(second.database_url, "SELECT id FROM kept") == (1,)
        assert redis_client(second.redis_url).get("kept") == b"1"


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Run the servers in a folder that is found there, named from the current folder."""
    parent = tmp_path_factory.mktemp("private")
    (parent / "found").mkdir()
    parent.chmod(0o700)
    (parent / "found").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(parent)
        context = servers(Path("found"))
        started = context.__enter__()
    yield started
    context.__exit__(None, None, None)


def test_a_persistent_database_is_durable(running, query):
    assert query(running.database_url, QUERY) == ("on", "on")


def test_the_folder_is_named_in_full(running):
    assert running.folder.is_absolute()


def test_permissions_of_folders_we_found_stay_as_they_were(running):
    folders = (running.folder.parent, running.folder)

    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700, 0o755]


def test_a_folder_in_use_is_refused_in_one_sentence(running):
    with pytest.raises(EmbeddedError) as refusal, servers(running.folder):
        pass

    assert str(refusal.value) == (
        f"{running.folder} is in use by other embedded servers; stop those, or use another folder."
    )


def test_a_refused_start_leaves_the_running_servers_alone(running, query):
    with pytest.raises(EmbeddedError), servers(running.folder):
        pass

    assert query(running.database_url, "SELECT 1") == (1,)


def test_a_start_right_after_the_parent_was_killed_waits_for_the_old_servers(folder, host, query):
    host(folder).ready().die()

    with servers(folder) as started:
        assert query(started.database_url, "SELECT 1") == (1,)


def test_the_data_survives_the_death_of_everything(folder, host, query, eventually, gone):
    parent = host(folder).ready()
    query(parent.database_url, "CREATE TABLE kept AS SELECT 1 AS id")

    for pid in [parent.keeper_pid, *parent.server_pids, parent.process.pid]:
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: all(map(gone, parent.server_pids)))

    with servers(folder) as started:
        assert query(started.database_url, "SELECT id FROM kept") == (1,)


def test_a_pid_file_whose_number_another_process_has_now_does_not_prevent_the_start(folder, query):
    with servers(folder):
        pass
    (folder / "postgres/postmaster.pid").write_text(f"{os.getpid()}\n{folder}/postgres\n")

    with servers(folder) as started:
        assert query(started.database_url, "SELECT 1") == (1,)


def test_an_empty_pid_file_does_not_prevent_the_start(folder, query):
    with servers(folder):
        pass
    (folder / "postgres/postmaster.pid").write_text("")

    with servers(folder) as started:
        assert query(started.database_url, "SELECT 1") == (1,)


def test_an_unfinished_database_is_made_anew(folder, host, query, eventually):
    parent = host(folder)
    assert eventually((folder / "postgres.unfinished/global").exists)
    os.kill(parent.starting_keeper_pid, signal.SIGKILL)
    parent.process.wait()
    assert not (folder / "postgres").exists()

    with servers(folder) as started:
        assert query(started.database_url, "SELECT current_database()") == ("forgekeeper",)
    assert not (folder / "postgres.unfinished").exists()


@pytest.mark.parametrize("name", ['it\'s "grün" %20?x=1&y#z', "a,b", "d" * 150])
def test_any_folder_name_works(tmp_path, name, query, redis_client):
    with servers(tmp_path / name) as started:
        assert query(started.database_url, "SELECT current_database()") == ("forgekeeper",)
        assert redis_client(started.redis_url).ping()


def test_sockets_of_a_deep_folder_are_removed_with_a_killed_keeper(tmp_path, host):
    parent = host(tmp_path / ("d" * 150)).ready()
    sockets = Path(urlsplit(parent.redis_url).path).parent
    assert sockets.is_dir()

    os.kill(parent.keeper_pid, signal.SIGKILL)
    parent.leave()

    assert not sockets.exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(EmbeddedError, match="Not a directory"), servers(tmp_path / "file/x"):
        pass
