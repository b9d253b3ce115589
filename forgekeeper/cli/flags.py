"""`flags`: switches in the database that hold for all processes."""

from __future__ import annotations

from typing import Annotated

import typer

from forgekeeper.audit import acts
from forgekeeper.batches import FLAGS, FeatureFlag
from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import Json, answer, emit, group, table, wrong_use
from forgekeeper.database import database

Flag = Annotated[str, typer.Argument(metavar="NAME", help="The flag's name; `forgekeeper flags` lists them.")]


def flags_list(json: Json = False) -> None:
    """List the flags."""
    with connected("flags"):
        states = {name: FeatureFlag.is_on(name) for name in FLAGS}
    if json:
        emit({"flags": states})
        return
    rows = ((name, "on" if state else "off", FLAGS[name]) for name, state in states.items())
    table("", ("flag", "state", "what it switches"), rows)


flags = group("flags", "Feature flags: list them, or turn one on or off for all processes.", flags_list)


@flags.command("on")
def flags_on(name: Flag, json: Json = False) -> None:
    """Turn a flag on; `forgekeeper run BATCH --dry-run` shows before what its batch would do."""
    _turn(name, on=True, json=json)


@flags.command("off")
def flags_off(name: Flag, json: Json = False) -> None:
    """Turn a flag off."""
    _turn(name, on=False, json=json)


def _turn(name: str, *, on: bool, json: bool) -> None:
    if name not in FLAGS:
        wrong_use(f"there is no flag {name!r}; there are: {', '.join(FLAGS)}")
    word = "on" if on else "off"
    with connected("flags"), database.atomic():
        was_on = FeatureFlag.turn(name, on=on)
        acts.record(f"flags {word}", name, before={"on": was_on}, after={"on": on})
    answer({"flags": {name: on}}, f"{name} is {word}", json=json)
