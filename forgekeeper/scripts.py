"""The Lua scripts, read from their files: each is one atomic step on the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EINVAL
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any

import redis
from redis.exceptions import NoScriptError

from forgekeeper.database.writes import engine

FOLDERS = [files("forgekeeper") / "lua"]
"""Where scripts lie; each is known by its name alone."""


def add(package: str) -> None:
    """Let the scripts in the folder `lua` of *package*, a document's, be known too."""
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
    """Run the script *name* on *client*; a server that has forgotten it is taught it again.

    Raises `redis.RedisError`.
    """
    source, digest = _script(name)
    with engine(), _pointing_to_check():
        try:
            return client.evalsha(digest, len(keys), *keys, *args)
        except NoScriptError:
            # Taught and run in one request: between two it may be forgotten once more.
            return client.eval(source, len(keys), *keys, *args)


@contextmanager
def _pointing_to_check() -> Iterator[None]:
    try:
        yield
    except redis.ResponseError as error:
        # Redis does not say which key it is.
        if "WRONGTYPE" not in str(error):
            raise
        raise redis.ResponseError(f"{error}; `forgekeeper check` says which key it is") from error


@cache
def _script(name: str) -> tuple[str, str]:
    """Return the script's source and the digest by which a server that knows it finds it."""
    file = next(file for folder in FOLDERS if (file := folder / f"{name}.lua").is_file())
    source = file.read_text(encoding="utf-8")
    # A part of a script may be a script, too: one that tells nobody what it has done.
    if not source.rstrip().rpartition("\n")[2].startswith("return"):
        raise OSError(EINVAL, "the script is not whole; install forgekeeper again", str(file))
    return source, sha1(source.encode(), usedforsecurity=False).hexdigest()
