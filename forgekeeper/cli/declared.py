"""`settings`, `metrics` and `batches` list declarations; `flags` turns flags on and off."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, NamedTuple

import typer

from forgekeeper.api.batches import BATCHES, FLAGS, BatchSpec, Declaration, FeatureFlag, all_declared
from forgekeeper.audit import acts
from forgekeeper.cli.connection import batch_named, connect_command
from forgekeeper.cli.terminal import (
    CompletedAct,
    Json,
    Problem,
    create_group,
    out,
    print_answer,
    print_json,
    print_table,
    wrong_use,
)
from forgekeeper.delivery.boot import load_settings
from forgekeeper.platform.database import database
from forgekeeper.platform.database.naming import shown_name
from forgekeeper.platform.settings import PREFIX, Settings
from forgekeeper.platform.settings.reading import list_settings
from metrics import catalogue

FlagName = Annotated[str, typer.Argument(metavar="NAME", help="The flag's name; `forgekeeper flags` lists them.")]
SOURCE_TEXTS = {"environment": ", from the environment", ".env": ", from the file .env"}


def settings(json: Json = False) -> None:
    """List every setting with its type, default, current value, source and description.

    Settings are environment variables, or lines of a file `.env` in the current folder. Append _FILE to the name of a
    URL, or of the object stores, to name a file with the value.
    """
    described = list_settings(load_settings())
    if json:
        print_json([asdict(one) for one in described])
    else:
        for one in described:
            default = f", default {one.default}" if one.default else ""
            _print_entry(
                f"{one.name}={one.value}  ({one.type}{default}{SOURCE_TEXTS.get(one.source, '')})", one.sentence
            )


def metrics(json: Json = False) -> None:
    """List every metric with its type, labels, unit and description."""
    known = catalogue.build_metrics(all_declared())
    if json:
        facts = [asdict(one) | {"labels": one.values, "type": one.type, "unit": one.unit} for one in known.values()]
        print_json({"metrics": facts})
    else:
        for one in known.values():
            labels = f"{{{', '.join(one.labels)}}}" if one.labels else ""
            _print_entry(f"{one.name}{labels}  ({one.type}, {one.process})", one.help)


def batches(
    batch: Annotated[str | None, typer.Argument(help="Only this batch.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """List the batches; with --json their declarations, with times in seconds."""
    settings, chosen = load_settings(), [batch_named(batch)] if batch else list(BATCHES.values())
    if json:
        print_json({"batches": {one.name: batch_facts(one, settings) for one in chosen}})
        return
    for one in chosen:
        writes = f", writes by itself: {one.writes}" if one.writes else ""
        _print_entry(
            f"{one.name}  ({settings.schedule_of(one.name) or 'off'}, queue {one.queue}{writes})", one.sentence
        )


def _print_entry(heading: str, sentence: str) -> None:
    out.print(heading, style="bold")
    out.print(f"    {sentence}")


def batch_facts(batch: BatchSpec, settings: Settings) -> dict[str, Any]:
    """Return the batch's declaration as the JSON of `batches` shows it, with times in seconds."""
    return _declared_facts(batch) | {
        "document": batch.document,
        "module": batch.module,
        "team": batch.team,
        "schedule": str(settings.schedule_of(batch.name) or "off"),
        "flag": batch.flag,
        "tables": [shown_name(table) for table in (*batch.tables, *batch.reads)],
        "deletes_from": batch.deletes_from,
        "writes": batch.writes,
        "settings": [f"{PREFIX}{kind}_{batch.name.upper()}" for kind in ("CRON", "CATCH_UP", "PACE")],
        "children": [_declared_facts(child) for child in batch.children],
    }


def _declared_facts(declared: Declaration) -> dict[str, Any]:
    return {
        "name": declared.name,
        "sentence": declared.sentence,
        "queue": declared.queue,
        "budget": declared.budget.total_seconds(),
        "time_limit": declared.time_limit.total_seconds(),
        "records": [record.name for record in declared.records],
        "thresholds": {threshold.name: threshold.above for threshold in declared.thresholds},
    }


def flags_list(json: Json = False) -> None:
    """List the flags, their states and their owner."""
    with connect_command("flags"):
        states, owner = flag_states(), FeatureFlag.find_forge_relation()
    if json:
        print_json({"flags": states, "owner": owner})
        return
    rows = ((name, "on" if state else "off", FLAGS[name]) for name, state in states.items())
    print_table(("flag", "state", "effect"), rows)
    if owner:
        out.print(f"the forge owns these flags ({owner}): turn them on or off there")


def flag_states() -> dict[str, bool]:
    """Return the state of every flag."""
    return {name: FeatureFlag.is_on(name) for name in FLAGS}


flags = create_group("flags", "List the feature flags, or turn a flag on or off for all processes.", flags_list)


@flags.command("on")
def flags_on(name: FlagName, json: Json = False) -> None:
    """Turn a flag on; first preview its batch with `forgekeeper run BATCH --dry-run`."""
    _turn_flag(name, on=True, json=json)


@flags.command("off")
def flags_off(name: FlagName, json: Json = False) -> None:
    """Turn a flag off."""
    _turn_flag(name, on=False, json=json)


def _turn_flag(name: str, *, on: bool, json: bool) -> None:
    turn = FlagChange.parse(name, "on" if on else "off")
    with connect_command("flags"):
        done = turn.apply()
    print_answer({"flags": {name: on}}, done.sentence, json=json)


def _require_ours(name: str) -> None:
    if owner := FeatureFlag.find_forge_relation():
        raise Problem(
            f"the forge owns the flags ({owner}): turn {name} on or off there, with its API or chat commands; its"
            " processes cache flags, and would notice a change by SQL late"
        )


class FlagChange(NamedTuple):
    """A request to turn a flag on or off for all processes."""

    name: str
    on: bool

    @classmethod
    def parse(cls, name: str, to: str) -> FlagChange:
        """Parse a flag and a state; raise `Problem` if either is unknown."""
        if name not in FLAGS:
            wrong_use(f"there is no flag {name!r}; there are: {', '.join(FLAGS)}")
        if to not in {"on", "off"}:
            wrong_use(f"a flag is on or off, not {to!r}")
        return cls(name, to == "on")

    def describe_state(self) -> str:
        """Describe the flag's present state. Needs a connection.

        Raises `Problem` if the forge owns the flags.
        """
        _require_ours(self.name)
        return f"{self.name} is {'on' if FeatureFlag.is_on(self.name) else 'off'} now: {FLAGS[self.name]}"

    def apply(self) -> CompletedAct:
        """Turn the flag and record it. Needs a connection.

        Raises `Problem` if the forge owns the flags.
        """
        _require_ours(self.name)
        word = "on" if self.on else "off"
        with database.atomic():
            was_on = FeatureFlag.turn(self.name, on=self.on)
            acts.record_act(f"flags {word}", self.name, before={"on": was_on}, after={"on": self.on})
        return CompletedAct(f"{self.name} is {word}")
