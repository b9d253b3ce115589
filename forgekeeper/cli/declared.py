"""`settings`, `metrics` and `batches` list declarations; `flags` turns flags on and off."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, NamedTuple

import typer

from forgekeeper.api.batches import BATCHES, FLAGS, BatchSpec, Declared, FeatureFlag, all_declared
from forgekeeper.audit import acts
from forgekeeper.cli.connection import batch_named, connected
from forgekeeper.cli.terminal import Done, Json, Problem, answer, emit, group, out, table, wrong_use
from forgekeeper.delivery.boot import load
from forgekeeper.platform.database import database
from forgekeeper.platform.database.naming import shown_name
from forgekeeper.platform.settings import PREFIX, Settings
from forgekeeper.platform.settings.reading import describe
from metrics import catalogue

Flag = Annotated[str, typer.Argument(metavar="NAME", help="The flag's name; `forgekeeper flags` lists them.")]
FROM = {"environment": ", from the environment", ".env": ", from the file .env"}


def settings(json: Json = False) -> None:
    """List every setting with its type, default, present value, where that comes from, and sentence.

    Settings are environment variables, or lines of a file `.env` where the command runs.
    """
    described = describe(load())
    if json:
        emit([asdict(one) for one in described])
    else:
        for one in described:
            default = f", default {one.default}" if one.default else ""
            _show(f"{one.name}={one.value}  ({one.type}{default}{FROM.get(one.source, '')})", one.sentence)


def metrics(json: Json = False) -> None:
    """List every metric with its type, labels, unit and sentence."""
    known = catalogue.table(all_declared())
    if json:
        facts = [asdict(one) | {"labels": one.values, "type": one.type, "unit": one.unit} for one in known.values()]
        emit({"metrics": facts})
    else:
        for one in known.values():
            labels = f"{{{', '.join(one.labels)}}}" if one.labels else ""
            _show(f"{one.name}{labels}  ({one.type}, {one.process})", one.help)


def batches(
    batch: Annotated[str | None, typer.Argument(help="Only this one.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """List the batches; with --json what they have declared, times in seconds."""
    settings, chosen = load(), [batch_named(batch)] if batch else list(BATCHES.values())
    if json:
        emit({"batches": {one.name: _batch(one, settings) for one in chosen}})
        return
    for one in chosen:
        writes = f", writes by itself: {one.writes}" if one.writes else ""
        _show(f"{one.name}  ({settings.cron(one.name) or 'off'}, queue {one.queue}{writes})", one.sentence)


def _show(heading: str, sentence: str) -> None:
    out.print(heading, style="bold")
    out.print(f"    {sentence}")


def _batch(batch: BatchSpec, settings: Settings) -> dict[str, Any]:
    return _declared(batch) | {
        "document": batch.document,
        "module": batch.module,
        "team": batch.team,
        "schedule": str(settings.cron(batch.name) or "off"),
        "flag": batch.flag,
        "tables": [shown_name(table) for table in (*batch.tables, *batch.reads)],
        "deletes_from": batch.deletes_from,
        "writes": batch.writes,
        "settings": [f"{PREFIX}{kind}_{batch.name.upper()}" for kind in ("CRON", "CATCH_UP", "PACE")],
        "children": [_declared(child) for child in batch.children],
    }


def _declared(declared: Declared) -> dict[str, Any]:
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
    """List the flags, and say whose they are."""
    with connected("flags"):
        states, owner = flag_states(), FeatureFlag.owner()
    if json:
        emit({"flags": states, "owner": owner})
        return
    rows = ((name, "on" if state else "off", FLAGS[name]) for name, state in states.items())
    table(("flag", "state", "what it switches"), rows)
    if owner:
        out.print(f"they are the forge's, by {owner}: turn them there")


def flag_states() -> dict[str, bool]:
    """Return the state of every flag."""
    return {name: FeatureFlag.is_on(name) for name in FLAGS}


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
    turn = Turn.named(name, "on" if on else "off")
    with connected("flags"):
        done = turn.do()
    answer({"flags": {name: on}}, done.sentence, json=json)


def _require_ours(name: str) -> None:
    if owner := FeatureFlag.owner():
        raise Problem(
            f"the flags are the forge's, by {owner}: turn {name} on or off there, by its API or its chat commands; what"
            " is done by SQL its processes do not see for as long as they remember flags"
        )


class Turn(NamedTuple):
    """A request to turn a flag on or off for all processes."""

    name: str
    on: bool

    @classmethod
    def named(cls, name: str, to: str) -> Turn:
        """Parse a flag and a state; raise `Problem` if either is unknown."""
        if name not in FLAGS:
            wrong_use(f"there is no flag {name!r}; there are: {', '.join(FLAGS)}")
        if to not in {"on", "off"}:
            wrong_use(f"a flag is on or off, and not {to!r}")
        return cls(name, to == "on")

    def look(self) -> str:
        """Describe the flag's present state. Needs a connection.

        Raises `Problem` if the forge owns the flags.
        """
        _require_ours(self.name)
        return f"{self.name} is {'on' if FeatureFlag.is_on(self.name) else 'off'} now: {FLAGS[self.name]}"

    def do(self) -> Done:
        """Turn the flag and record it. Needs a connection.

        Raises `Problem` if the forge owns the flags.
        """
        _require_ours(self.name)
        word = "on" if self.on else "off"
        with database.atomic():
            was_on = FeatureFlag.turn(self.name, on=self.on)
            acts.record(f"flags {word}", self.name, before={"on": was_on}, after={"on": self.on})
        return Done(f"{self.name} is {word}")
