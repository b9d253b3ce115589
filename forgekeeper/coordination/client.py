"""Redis as a process has it: a batch that is asked what goes may only read by it.

The Lua scripts that a package brings are its claims, and may run: each is one atomic step on the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import redis
from redis.client import Pipeline
from redis.commands import READ_COMMANDS
from redis.commands.core import Script

from forgekeeper.database.sessions import engine, insist

READS = READ_COMMANDS | {"INFO", "MULTI", "OBJECT", "PING", "TIME"}
"""Commands that change nothing."""
FOLDERS: list[Traversable] = []
"""Where scripts lie; each is known by its name alone."""


class _Guarded:
    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command; raise `WritesByItself` for what a batch may not."""
        name = str(args[0]).split()[0].upper()
        if name not in READS:
            insist(f"by Redis's {name}")
        return super().execute_command(*args, **options)  # type: ignore[misc]


class _Pipeline(_Guarded, Pipeline):
    pass


class Client(_Guarded, redis.Redis):
    """The client of a process."""

    def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> Pipeline:  # noqa: FBT002, Redis's
        """Return several commands in one request, of which each is looked at."""
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


def add_scripts(package: str) -> None:
    """Add the scripts in the folder `lua` of *package*, a document's."""
    folder = files(package) / "lua"
    if folder not in FOLDERS:
        FOLDERS.append(folder)


def load_scripts() -> None:
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
