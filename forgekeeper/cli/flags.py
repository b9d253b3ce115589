"""`flags`: switches in the database that hold for all processes."""

from __future__ import annotations

from typing import Annotated

import typer

from forgekeeper.audit import acts
from forgekeeper.cli import previews
from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import Json, answer, emit, table, wrong_use
from forgekeeper.database import database
from forgekeeper.declaring.flags import FLAGS, FeatureFlag

flags = typer.Typer(help="Feature flags: list them, or turn one on or off for all processes.")
Flag = Annotated[str, typer.Argument(metavar="NAME", help="The flag's name; `forgekeeper flags` lists them.")]


@flags.callback(invoke_without_command=True)
def flags_default(context: typer.Context, json: Json = False) -> None:
    """List the flags when no command is given."""
    if context.invoked_subcommand is None:
        flags_list(json=json)


@flags.command("list")
def flags_list(json: Json = False) -> None:
    """List the flags."""
    with connected("flags"):
        states = {name: FeatureFlag.is_on(name) for name in FLAGS}
    if json:
        emit({"flags": states})
        return
    rows = ((name, "on" if state else "off", FLAGS[name]) for name, state in states.items())
    table("", ("flag", "state", "what it switches"), rows)


@flags.command("on")
def flags_on(
    name: Flag, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False, json: Json = False
) -> None:
    """Turn a flag on.

    First shows on standard error what the batch would do that it switches on, as `run --dry-run` does, and asks
    where there is a terminal.
    """
    _known(name)
    with connected("flags") as settings:
        shown = previews.before_switching_on(name, settings, ask=not yes)
        _turn(name, on=True)
    answer({"flags": {name: True}} | ({"preview": shown} if shown else {}), f"{name} is on", json=json)


@flags.command("off")
def flags_off(name: Flag, json: Json = False) -> None:
    """Turn a flag off."""
    _known(name)
    with connected("flags"):
        _turn(name, on=False)
    answer({"flags": {name: False}}, f"{name} is off", json=json)


def _known(name: str) -> None:
    if name not in FLAGS:
        wrong_use(f"there is no flag {name!r}; there are: {', '.join(FLAGS)}")


def _turn(name: str, *, on: bool) -> None:
    with database.atomic():
        was_on = FeatureFlag.turn(name, on=on)
        acts.record(f"flags {'on' if on else 'off'}", name, before={"on": was_on}, after={"on": on})
