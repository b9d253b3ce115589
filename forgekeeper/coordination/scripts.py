"""The Lua scripts, read from their files: each is one atomic step on the server."""

from __future__ import annotations

from collections.abc import Sequence
from errno import EINVAL
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any

import redis
from redis.exceptions import NoScriptError

from forgekeeper.database.writes import engine

FOLDERS = [files("forgekeeper.coordination") / "lua"]
"""Where scripts lie; each is known by its name alone."""


def add(package: str) -> None:
    """Add the scripts in the folder `lua` of *package*, a document's."""
    folder = files(package) / "lua"
    if folder not in FOLDERS:
        FOLDERS.append(folder)


def load() -> None:
    """Read all scripts, which a process does when it starts: later there may be no descriptor, or another version.

    Raises `OSError` when one cannot be read, or is not whole.
    """
    for folder in FOLDERS:
        for file in folder.iterdir():
            if file.name.endswith(".lua"):
                _script(file.name.removesuffix(".lua"))


def call(client: redis.Redis, name: str, *, keys: Sequence[str | bytes], args: list[Any]) -> Any:
    """Run the script *name* on *client*, also on a server that has forgotten it.  Raises `redis.RedisError`.

    redis-py's own `register_script` would need the right to SCRIPT LOAD, which goes with SCRIPT FLUSH.
    """
    source, digest = _script(name)
    with engine():
        try:
            return client.evalsha(digest, len(keys), *keys, *args)
        except NoScriptError:
            return client.eval(source, len(keys), *keys, *args)


@cache
def _script(name: str) -> tuple[str, str]:
    """Return the script's source and the digest by which a server that knows it finds it."""
    file = next(file for folder in FOLDERS if (file := folder / f"{name}.lua").is_file())
    source = file.read_text(encoding="utf-8")
    # Half a script may run, and return nothing.
    if not source.rstrip().rpartition("\n")[2].startswith("return"):
        raise OSError(EINVAL, "the script is not whole; install forgekeeper again", str(file))
    return source, sha1(source.encode(), usedforsecurity=False).hexdigest()
