"""Redis as a process has it: a batch that is asked what goes may only read by it.

Scripts that a package brings are its claims, and may run: see `forgekeeper.coordination.scripts`.
"""

from __future__ import annotations

from typing import Any

import redis
from redis.client import Pipeline
from redis.commands import READ_COMMANDS

from forgekeeper.database.writes import insist

READS = READ_COMMANDS | {"INFO", "MULTI", "OBJECT", "PING", "TIME"}
"""Commands that change nothing."""


def _insist(command: Any) -> None:
    name = str(command).split()[0].upper()
    if name not in READS:
        insist(f"by Redis's {name}")


class Client(redis.Redis):
    """The client of a process."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command; raise `WritesByItself` for what a batch may not."""
        _insist(args[0])
        return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> Pipeline:  # noqa: FBT002, Redis's
        """Return several commands in one request, of which each is looked at."""
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _Pipeline(Pipeline):
    def execute_command(self, *args: Any, **options: Any) -> Any:
        _insist(args[0])
        return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
