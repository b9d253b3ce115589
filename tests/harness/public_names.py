"""The page of public names, written from the docstrings: `python -m tests.harness.public_names` prints it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from doctest import DocTestParser
from pathlib import Path

import forgekeeper

PAGE = Path(__file__).parents[2] / "docs" / "public_names.md"
MODELS = '''\
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from peewee import BigAutoField, BigIntegerField, BooleanField, IntegerField, TextField, fn
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper import Rows, Table


class Project(Table):
    id = BigAutoField()
    path = TextField()
    pipeline_bytes = BigIntegerField()
    locked = BooleanField()


class Pipeline(Table):
    project_id = BigIntegerField()
    updated_at = DateTimeTZField()
    status = IntegerField()
    bytes = BigIntegerField()


class Parcel(Table):
    due_at = DateTimeTZField()
    attempts = IntegerField()
    created_at = DateTimeTZField()
    store = IntegerField()
    path = TextField()


class Package(Table):
    store = IntegerField()
    path = TextField()


class Branch(Table):
    project_id = BigIntegerField()
    ref = TextField()
    expected = TextField(null=True)
    state = IntegerField()
    reason = TextField(null=True)
    created_at = DateTimeTZField()
    updated_at = DateTimeTZField()
    deleted_at = DateTimeTZField(null=True)


class Label:
    """Rows of another table that name parcels."""

    locations = ["parcels"]
    sentence = "a label names it"

    @staticmethod
    def named(paths: list[str]) -> set[str]:
        return set()


@dataclass
class Counted:
    children_enqueued: int = 0
    pipelines: int = 0


def find_stale(now: datetime) -> Rows[Pipeline]:
    return Rows(Pipeline, since=Pipeline.updated_at, older_than=timedelta(days=365))
'''
HEAD = f"""\
# Public names

This page is a reference for authors of batches: each name that a batch imports from `forgekeeper`, with its contract and an example. [Writing a batch](writing_a_batch.md) is the tutorial. `python -m tests.harness.public_names` writes this page from the docstrings.

The examples use these models:

```python
{MODELS}```
"""


def name_all() -> list[str]:
    """Return the public names in alphabetical order."""
    return sorted(forgekeeper._HOMES, key=str.lower)


def read_contract(name: str) -> tuple[str, str]:
    """Return the prose of a name's docstring, and its example without prompts."""
    text = inspect.getdoc(getattr(forgekeeper, name)) or ""
    found = DocTestParser().get_examples(text)
    prose = re.sub(r"(?m)^(>>>|\.\.\.).*\n?", "", text).strip()
    return re.sub("``(.+?)``", r"`\1`", prose), "".join(one.source for one in found)


def write_examples() -> str:
    """Return a module with all examples."""
    imports = f"from forgekeeper import {', '.join(name_all())}\n"
    return "\n".join([imports, MODELS, *(read_contract(name)[1] for name in name_all())])


def write_page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *_write_sections()])


def _write_sections() -> Iterator[str]:
    for name in name_all():
        prose, example = read_contract(name)
        yield f"## `{name}`\n\n{prose}\n"
        if written := _write_signature(name):
            yield f"```text\n{written}\n```\n"
        yield f"```python\n{example}```\n"


def _write_signature(name: str) -> str | None:
    """Return the call with a line for each parameter; None for a class that nobody calls with parameters."""
    parameters = list(inspect.signature(getattr(forgekeeper, name)).parameters.values())
    if not parameters or name == "Table":
        return None
    lines = [line for one in parameters for line in _write_parameter(one)]
    keywords = [place for place, one in enumerate(parameters) if one.kind is one.KEYWORD_ONLY]
    if keywords and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        lines.insert(keywords[0], "*")
    return "\n".join([f"{name}(", *(f"    {line}," for line in lines), ")"])


def _write_parameter(one: inspect.Parameter) -> list[str]:
    options = re.fullmatch(r"Unpack\[(\w+)\]", str(one.annotation))
    if options:
        from forgekeeper.engine import decorators

        hints = inspect.get_annotations(getattr(decorators, options[1]))
        return [f"{name}: {_read_type(kind)} = …" for name, kind in hints.items()]
    kind = _read_type(one.annotation)
    name = f"**{one.name}" if one.kind is one.VAR_KEYWORD else one.name
    if one.default is one.empty:
        return [f"{name}: {kind}"]
    default = "…" if str(one.default) == "<factory>" else repr(one.default)
    return [f"{name}: {kind} = {default}"]


def _read_type(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__forward_arg__", str(annotation))


if __name__ == "__main__":
    sys.stdout.write(write_page())
