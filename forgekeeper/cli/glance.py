"""How `status` looks: eighty columns suffice, names are whole, times are relative, trouble has a colour."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forgekeeper.batches import queues as known
from forgekeeper.cli import children
from forgekeeper.cli.console import facts, fill, grid, moment, relative, rough, warning
from forgekeeper.cli.fitting import fits
from metrics.redaction import clean

STATES = {"succeeded": "green", "failed": "red", "failing": "red", "blocked": "red"}


def drawn(found: dict[str, Any], sentences: Sequence[str], width: int) -> RenderableType:
    """Draw what was found: what is wrong, the batches, how their last runs ended, the queues; and *sentences*.

    What does not fit into a table of so many columns is written as lines.
    """
    batches, instant = found["batches"], found["at"]
    notes = [
        Text(clean(f"{name} is paused {_pause(one['paused'])}"), "yellow")
        for name, one in batches.items()
        if one["paused"]
    ]
    if found["timetable_of"] == "settings":
        notes.append(Text("Schedule and next are what this shell's settings say.", "dim"))
    return Group(
        *map(warning, found["warnings"]),
        _fitting(_batches(batches, instant), width),
        *notes,
        "",
        _fitting(_last_runs(batches, instant), width),
        "",
        _fitting(_queues(found["queues"], instant), width),
        "",
        _summary(found, sentences),
    )


def _fitting(table: Table, width: int) -> RenderableType:
    """Draw each row as a line of its own where the table does not fit: the first cell, and what the others say."""
    if fits(table, width):
        return table
    headings = [str(column.header) for column in table.columns]
    lines = []
    for first, *others in zip(*(column.cells for column in table.columns), strict=True):
        line = Text(f"{headings[0]} {first}")
        for heading, cell in zip(headings[1:], others, strict=True):
            if str(cell):
                line.append(f", {heading} ").append(cell)
        lines.append(line)
    return Group(*lines)


def _batches(batches: dict[str, Any], instant: datetime) -> Table:
    columns = ("batch", "schedule", "next", "now", "backlog", "oldest")
    table = grid(*columns, folded=("schedule", "now", "oldest"), right=("backlog",))
    for name, one in batches.items():
        fill(
            table,
            name,
            one["schedule"],
            relative(one["next"], instant) if one["next"] else "",
            _now(one, instant),
            "" if one["backlog"] is None else f"{one['backlog']:,}{'+' if one['backlog_is_more'] else ''}",
            rough(instant - one["backlog_oldest"]) if one["backlog_oldest"] else "",
        )
    return table


def _last_runs(batches: dict[str, Any], instant: datetime) -> Table:
    table = grid("last run of", "ended", "state", "result", folded=("result",))
    for name, one in batches.items():
        last = one["last"]
        if last is None:
            fill(table, name, Text("never", "dim"))
            continue
        blocked = (last["result"] or {}).get("blocked")
        state = "blocked" if blocked else last["state"]
        failing = one["children_failing"] and children.said(one["children_failing"])
        if failing and state == "succeeded":
            state = "failing"
        told = [part for part in (failing, last["error"], blocked or _telling(last["result"])) if part]
        ended = relative(last["finished_at"], instant)
        fill(table, name, ended, Text(state, STATES.get(state, "")), "; ".join(told))
    return table


def _queues(queues: dict[str, Any], instant: datetime) -> Table:
    needed = known()
    figures = ("ready", "in flight", "delayed", "dead", "oldest", "workers")
    table = grid("queue", *figures, right=figures)
    for name, one in queues.items():
        fill(
            table,
            name,
            *(_figure(one[figure]) for figure in ("ready", "in_flight", "delayed")),
            Text(_figure(one["dead"]), "red" if one["dead"] else ""),
            rough(instant - one["oldest"]) if one["oldest"] else "",
            Text(str(one["workers"]), "red" if name in needed and not one["workers"] else ""),
        )
    return table


def _figure(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def _summary(found: dict[str, Any], sentences: Sequence[str]) -> Text:
    processes = found["processes"]
    living = [one["kind"] for one in processes if not one["silent"]]
    silent = len(processes) - len(living)
    leases = None if found["leases"] is None else len(found["leases"])
    return Text.assemble(
        f"Processes: {_count(living, 'scheduler')}, {_count(living, 'worker')}",
        (f", {silent} silent: see `forgekeeper processes`" if silent else "", "yellow"),
        ".\n" + clean(" ".join([*sentences, f"Leases held: {_figure(leases)}."])),
    )


def _count(kinds: list[str], kind: str) -> str:
    number = kinds.count(kind)
    return f"{number} {kind}{'' if number == 1 else 's'}"


def _now(one: dict[str, Any], instant: datetime) -> Text:
    """Say what the batch is at: its open run, which is not the one whose result is shown below."""
    run = one["open"]
    if run is None:
        return _idle(one)
    if run["state"] == "started":
        return Text(f"runs {rough(instant - (run['started_at'] or instant))}", "cyan")
    if run["retry_at"]:
        return Text(f"retry {relative(run['retry_at'], instant)}", "yellow")
    waits = f"{run['state']} {rough(instant - (run['enqueued_at'] or run['claimed_at'] or instant))}"
    return Text(waits, "yellow" if one["paused"] or one["stopped"] or one["held"] else "")


def _idle(one: dict[str, Any]) -> Text:
    """Say what keeps a batch from its next run, if anything does."""
    for why, colour in (("stopped", "red"), ("held", "red"), ("paused", "yellow"), ("blocked", "red")):
        if one[why]:
            return Text(why, colour)
    off = ((one["last"] or {}).get("result") or {}).get("skipped") == "flag_off"
    return Text("off" if off else "", "dim")


def _pause(paused: dict[str, Any]) -> str:
    until = f"until {moment(paused['until'])}" if paused["until"] else "until resumed"
    return until + (f" ({paused['reason']})" if paused["reason"] else "")


def _telling(result: dict[str, Any] | None) -> str:
    """Leave out of a result what is zero or false; `ticks` and `why` have it all."""
    return facts({name: value for name, value in (result or {}).items() if value})
