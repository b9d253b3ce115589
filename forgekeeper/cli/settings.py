"""`settings`: every setting, and the page of documentation about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from forgekeeper.boot import load
from forgekeeper.cli.console import Json, emit, markdown_table, out
from forgekeeper.settings.reading import Described, describe

INTRODUCTION = """# Settings

Settings are environment variables, or lines of a file `.env` where the command runs; the
environment wins. An unknown name that begins with `FORGEKEEPER_`, or a value that does not
fit, stops the start and is named. `forgekeeper settings` shows the present values.

This page is printed by `forgekeeper settings --markdown`.

"""
FROM = {"environment": "the environment", ".env": "the file .env"}


def settings(
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/settings.md.")] = False,
) -> None:
    """List every setting with its type, default, present value, where that comes from, and sentence.

    Settings are environment variables, or lines of a file `.env` where the command runs.
    """
    described = describe(load())
    if json:
        emit([asdict(setting) for setting in described])
    elif markdown:
        out.print(page(described), end="")
    else:
        for setting in described:
            default = f", default {setting.default}" if setting.default else ""
            source = "" if setting.source == "default" else f", from {FROM[setting.source]}"
            out.print(f"{setting.name}={setting.value}  ({setting.type}{default}{source})", style="bold")
            out.print(f"    {setting.sentence}")


def page(described: Sequence[Described]) -> str:
    """Write the documentation's page of settings."""
    rows = (
        (f"`{one.name}`", one.type.replace("|", "or"), f"`{one.default}`" if one.default else "", one.sentence)
        for one in described
    )
    return INTRODUCTION + markdown_table(("name", "type", "default", "what it is for"), rows)
