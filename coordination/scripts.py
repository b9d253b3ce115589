"""The Lua scripts, read from their files: each is one atomic step on the server."""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any

import redis
from redis.exceptions import NoScriptError


def call(client: redis.Redis, name: str, *, keys: list[str], args: list[Any]) -> Any:
    """Run the script *name* on *client*; a server that has forgotten it is taught it again."""
    source, digest = _script(name)
    try:
        return client.evalsha(digest, len(keys), *keys, *args)
    except NoScriptError:
        # Taught and run in one request: between two it may be forgotten once more.
        return client.eval(source, len(keys), *keys, *args)


@cache
def _script(name: str) -> tuple[str, str]:
    """Return the script's source and the digest by which a server that knows it finds it."""
    source = (files("coordination") / "lua" / f"{name}.lua").read_text(encoding="utf-8")
    return source, sha1(source.encode(), usedforsecurity=False).hexdigest()
