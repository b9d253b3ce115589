"""Who serves: `processes` lists the schedulers and workers, and what each is at."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import Json, emit, fill, grid, out, relative, rough, warning
from forgekeeper.cli.trouble import warnings
from forgekeeper.database import now
from forgekeeper.runs.processes import Process


def processes(json: Json = False) -> None:
    """List the schedulers and workers that live or fell silent, and what each is at.

    One enters the list when it is ready: what waits for its servers is not in it.  One that ends in an orderly way
    leaves the list at once, one that fell silent after a day.
    """
    with connected("processes"):
        instant, known = now(), Process.known()
        found = {"at": instant, "processes": facts_of(known, instant), "warnings": list(warnings(known, instant))}
    if json:
        emit(found)
    else:
        out.print(drawn(found), soft_wrap=False)


def facts_of(known: Sequence[Process], instant: datetime) -> list[dict[str, Any]]:
    """Return what is known of each process; since when it is at something by the database's clock."""
    return [
        {
            "kind": one.kind,
            "host": one.host,
            "pid": one.pid,
            "version": one.version,
            "started_at": one.started_at,
            "alive_at": one.alive_at,
            "silent": one.is_silent(instant),
            "draining": one.draining,
            "queues": one.queues,
            "timetable": one.timetable,
            # What it was at when it fell silent is another's by now.
            "at_work": [] if one.is_silent(instant) else [_since(work, one.alive_at) for work in one.at_work or ()],
        }
        for one in known
    ]


def drawn(found: dict[str, Any]) -> RenderableType:
    """Draw the list, and below it what is being worked on."""
    instant = found["at"]
    listed = grid(
        "process", "kind", "version", "up for", "heard of", "queues", folded=("process", "heard of", "queues")
    )
    for one in found["processes"]:
        fill(
            listed,
            f"{one['host']}:{one['pid']}",
            one["kind"],
            one["version"],
            rough(instant - one["started_at"]),
            _heard(one, instant),
            " ".join(one["queues"] or ()),
        )
    if not found["processes"]:
        fill(listed, Text("none", style="dim"))
    parts: list[RenderableType] = [*map(warning, found["warnings"]), listed]
    if any(one["at_work"] for one in found["processes"]):
        parts += ["", _at_work(found["processes"], instant)]
    return Group(*parts)


def _at_work(processes: list[dict[str, Any]], instant: datetime) -> Table:
    table = grid("at work on", "for", "run", "process", "message", folded=("process", "message"))
    for one in processes:
        for work in one["at_work"]:
            # A run's message is named as the run.
            message = work["message_id"] if work["message_id"] != str(work["run"]) else ""
            who = f"{one['host']}:{one['pid']}"
            fill(table, work["what"], rough(instant - work["since"]), str(work["run"] or ""), who, message)
    return table


def _heard(one: dict[str, Any], instant: datetime) -> Text:
    if one["silent"]:
        return Text(f"silent since {rough(instant - one['alive_at'])}", style="red")
    heard = relative(one["alive_at"], instant)
    return Text(f"{heard}, draining", style="yellow") if one["draining"] else Text(heard)


def _since(work: dict[str, Any], heard: datetime) -> dict[str, Any]:
    try:
        since = heard - timedelta(seconds=work["seconds"])
    except OverflowError:
        since = heard
    return {name: work.get(name) for name in ("what", "run", "message_id")} | {"since": since}
