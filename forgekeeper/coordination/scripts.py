"""The Lua scripts, read from their files: each is one atomic step on the server."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import redis
from redis.commands.core import Script

from forgekeeper.database.writes import engine

FOLDERS: list[Traversable] = []
"""Where scripts lie; each is known by its name alone."""


def add(package: str) -> None:
    """Add the scripts in the folder `lua` of *package*, a document's."""
    folder = files(package) / "lua"
    if folder not in FOLDERS:
        FOLDERS.append(folder)


def load() -> None:
    """Read all scripts, which a process does when it starts: later there may be no descriptor, or another version.

    Raises `OSError` when one cannot be read.
    """
    for folder in FOLDERS:
        for file in folder.iterdir():
            if file.name.endswith(".lua"):
                _script(file.name.removesuffix(".lua"))


def call(client: redis.Redis, name: str, *, keys: Sequence[str | bytes], args: list[Any]) -> Any:
    """Run the script *name* on *client*, also on a server that has forgotten it.  Raises `redis.RedisError`."""
    with engine():
        return _script(name)(keys=keys, args=args, client=client)


@cache
def _script(name: str) -> Script:
    file = next(file for folder in FOLDERS if (file := folder / f"{name}.lua").is_file())
    return redis.Redis().register_script(file.read_text(encoding="utf-8"))
