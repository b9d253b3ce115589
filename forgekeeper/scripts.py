"""The Lua scripts, read from their files: each is one atomic step on the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EINVAL
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any

import redis
from redis.connection import Connection
from redis.exceptions import NoScriptError

from forgekeeper.database.writes import engine
from forgekeeper.redis_types import misfits

FOLDERS = [files("forgekeeper") / "lua", files("forgekeeper.delivery") / "lua"]
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

    Raises `redis.RedisError`, and says which key it is that is of the wrong type.
    """
    source, digest = _script(name)
    with engine(), _naming_misfits(client, keys):
        try:
            return client.evalsha(digest, len(keys), *keys, *args)
        except NoScriptError:
            # Taught and run in one request: between two it may be forgotten once more.
            return client.eval(source, len(keys), *keys, *args)


def ask(client: redis.Redis, name: str, *, keys: Sequence[str | bytes], args: list[Any]) -> Callable[[], Any]:
    """Run the script while the caller does something else; return what waits for its answer, and has to be called.

    Both raise what `call` does.  What the client says of retries does not hold here.
    """
    connection = client.connection_pool.get_connection()
    with _giving_back(client, connection, always=False):
        connection.send_command("EVALSHA", _script(name)[1], len(keys), *keys, *args)  # type: ignore[no-untyped-call]

    def answer() -> Any:
        with _naming_misfits(client, keys), _giving_back(client, connection), suppress(NoScriptError):
            return connection.read_response()
        return call(client, name, keys=keys, args=args)

    return answer


@contextmanager
def _naming_misfits(client: redis.Redis, keys: Sequence[str | bytes]) -> Iterator[None]:
    try:
        yield
    except redis.ResponseError as error:
        # Redis does not say which key it is.
        if "WRONGTYPE" not in str(error) or (misfit := next(misfits(client, keys), None)) is None:
            raise
        raise redis.ResponseError(f"WRONGTYPE {misfit}") from error


@contextmanager
def _giving_back(client: redis.Redis, connection: Connection, *, always: bool = True) -> Iterator[None]:
    """Give the connection back to its pool, after an error as another one."""
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed:
            connection.disconnect()  # type: ignore[no-untyped-call]
        if failed or always:
            client.connection_pool.release(connection)


@cache
def _script(name: str) -> tuple[str, str]:
    """Return the script's source and the digest by which a server that knows it finds it."""
    file = next(file for folder in FOLDERS if (file := folder / f"{name}.lua").is_file())
    source = file.read_text(encoding="utf-8")
    # A part of a script may be a script, too: one that tells nobody what it has done.
    if not source.rstrip().rpartition("\n")[2].startswith("return"):
        raise OSError(EINVAL, "the script is not whole; install forgekeeper again", str(file))
    return source, sha1(source.encode(), usedforsecurity=False).hexdigest()
