"""The Lua scripts, read from their files: each is one atomic step on the server."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import redis
from redis.commands.core import Script


def call(client: redis.Redis, name: str, *, keys: list[str], args: list[Any]) -> Any:
    """Run the script *name* on *client*; a server that has forgotten it is taught it again."""
    return _script(name)(keys=keys, args=args, client=client)


@cache
def _script(name: str) -> Script:
    source = (files("coordination") / "lua" / f"{name}.lua").read_text(encoding="utf-8")
    # The client given here only supplies the encoding for the digest; nothing is sent.
    return Script(redis.Redis(), source)
