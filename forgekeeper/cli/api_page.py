"""The documentation's page of what a batch is written with (`batches --api`): its names, and their docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import forgekeeper

INTRODUCTION = """# What a batch is written with

All of it is imported from `forgekeeper`; each name is loaded when it is used first.
[Writing a batch](writing_a_batch.md) shows them at work.

This page is printed by `forgekeeper batches --api`, from the docstrings.
"""


def page() -> str:
    """Write the page."""
    return INTRODUCTION + "".join(_section(name, getattr(forgekeeper, name)) for name in forgekeeper.__all__)


def _section(name: str, found: Any) -> str:
    said = inspect.cleandoc(found.__doc__ or "").replace("``", "`").replace("*", "_")
    rows = "".join(f"| `{parameter}` | {default} |\n" for parameter, default in _parameters(found))
    table = f"\n| takes | default |\n|---|---|\n{rows}" if rows else ""
    return f"\n## {name}\n\n{said}\n{table}"


def _parameters(found: Any) -> Iterator[tuple[str, str]]:
    """Yield what it is called with; a model is not called."""
    if inspect.isclass(found) and (issubclass(found, forgekeeper.Table) or issubclass(found, Exception)):
        return
    for one in inspect.signature(found).parameters.values():
        yield one.name, _default(one)


def _default(parameter: inspect.Parameter) -> str:
    if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        return "any number"
    if parameter.default is parameter.empty:
        return "needed"
    shown = getattr(parameter.default, "__name__", None) or str(parameter.default)
    return "none" if shown in ("None", "", "()", "tuple", "<factory>") else f"`{shown}`"
