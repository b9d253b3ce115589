"""Declarations of endpoints: each is a function that returns the JSON of a command.

As for pages, the function is called in a thread of the reader, and its answer is valid for everybody who asks the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib import import_module
from typing import Any, NamedTuple

from pydantic import BaseModel

from forgekeeper.api.batches import BatchSpec
from forgekeeper.cli.connection import batch_named
from forgekeeper.cli.console.pages import PageRequest
from forgekeeper.cli.terminal import Problem, read_number, read_time, wrong_use
from forgekeeper.platform.database import now

DEFAULT_ENTRIES_PER_ANSWER, MAX_ENTRIES_PER_ANSWER = 100, 500
PATH_PARAMETER = re.compile(r"{(\w+)}")
ReadFunction = Callable[[PageRequest], dict[str, Any]]
INTEGER, TEXT = {"type": "integer", "minimum": 1}, {"type": "string"}


class ServerAway(Problem):
    """Redis does not answer, or belongs to another installation."""


class Parameter(NamedTuple):
    """A parameter of an address or of a query, with its JSON schema."""

    name: str
    description: str
    schema: Mapping[str, Any] = TEXT


class Endpoint(NamedTuple):
    """An endpoint: its address below the API's root, the model of its answer, and its query parameters."""

    address: str
    answer: type[BaseModel]
    read_facts: ReadFunction
    query: tuple[Parameter, ...]

    @property
    def path_parameters(self) -> list[Parameter]:
        """Parameters in the address."""
        return [PATH_PARAMETERS[name] for name in PATH_PARAMETER.findall(self.address)]


BATCH = Parameter("batch", "The name of a batch.")
SINCE = Parameter("since", "Only entries since a time in UTC, or an age: 2026-11-20T08:30, 90m, 2h, 3d.")
LIMIT = Parameter(
    "limit",
    "Maximum number of entries.",
    {"type": "integer", "minimum": 1, "maximum": MAX_ENTRIES_PER_ANSWER, "default": DEFAULT_ENTRIES_PER_ANSWER},
)
CURSOR = Parameter("cursor", "The value of `next` in the previous answer: continue after its last entry.")
PATH_PARAMETERS = {
    "batch": BATCH,
    "run": Parameter("run", "The number of a run.", INTEGER),
    "id": Parameter("id", "The id of an entry of the quarantine."),
}
DECLARED_ENDPOINTS: list[Endpoint] = []


def endpoint(
    address: str, answer: type[BaseModel], *, query: tuple[Parameter, ...] = ()
) -> Callable[[ReadFunction], ReadFunction]:
    """Declare an endpoint; the first line of the function's docstring is its summary."""

    def register_endpoint(function: ReadFunction) -> ReadFunction:
        DECLARED_ENDPOINTS.append(Endpoint(address, answer, function, query))
        return function

    return register_endpoint


def load_endpoints() -> None:
    """Import all modules that declare endpoints."""
    for module in ("batches", "runs", "audit", "holds", "quarantine", "installation"):
        import_module(f"forgekeeper.cli.console.web_api.{module}")


def read_limit(request: PageRequest) -> int:
    """Return the requested number of entries; raise `Problem` for another value."""
    text = request.query.get(LIMIT.name)
    number = DEFAULT_ENTRIES_PER_ANSWER if text is None else read_number(text, "entries")
    if number > MAX_ENTRIES_PER_ANSWER:
        wrong_use(f"an answer has at most {MAX_ENTRIES_PER_ANSWER} entries: follow `next` for more")
    return number


def read_cursor(request: PageRequest) -> int | None:
    """Return the number in the cursor, or None without a cursor."""
    text = request.query.get(CURSOR.name)
    return None if text is None else read_number(text, "the last answer's `next`", least=0)


def read_since(request: PageRequest) -> datetime | None:
    """Return the requested time."""
    text = request.query.get(SINCE.name)
    return None if text is None else read_time(text, now(), ahead=False)


def require_batch(request: PageRequest) -> BatchSpec:
    """Return the batch in the address; raise `Problem` with the status of a missing thing."""
    try:
        return batch_named(request.path[BATCH.name])
    except Problem as unknown:
        raise Problem(str(unknown)) from None
