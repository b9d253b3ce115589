"""`processes`: the schedulers and workers, and what each works on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from rich.text import Text

from forgekeeper.cli import warnings
from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import Json, emit, lasting, out, relative, table, warning
from forgekeeper.database import now
from forgekeeper.runs.processes import Process

Row = tuple[object, ...]


def processes(json: Json = False) -> None:
    """List the schedulers and workers that live or fell silent, and what each works on.

    A process is in the list from when it is ready: one that waits for its servers is not.  One that ends in an orderly
    way leaves the list at once, one that fell silent after a day.
    """
    with connected("processes"):
        instant, known = now(), Process.known()
        found = facts_of(known, instant)
        wrong = list(warnings.of_processes(known, instant))
    if json:
        emit({"at": instant, "processes": found, "warnings": wrong})
        return
    for sentence in wrong:
        out.print(warning(sentence))
    table(
        "",
        ("process", "kind", "version", "up for", "heard of", "queues"),
        [_row(one, instant) for one in found] or [(Text("none", style="dim"), *[""] * 5)],
    )
    if work := [row for one in found for row in _at_work(one, instant)]:
        out.print()
        table("", ("at work on", "for", "run", "process", "message"), work)


def facts_of(known: Sequence[Process], instant: datetime) -> list[dict[str, Any]]:
    """Return what is known of each process; since when it works on something by the database's clock."""
    fields = ("kind", "host", "pid", "version", "started_at", "alive_at", "draining", "queues", "timetable")
    return [
        {name: getattr(one, name) for name in fields}
        | {
            "silent": one.is_silent(instant),
            # What a silent process worked on belongs to another by now.
            "at_work": [] if one.is_silent(instant) else [_since(work, one.alive_at) for work in one.at_work or ()],
        }
        for one in known
    ]


def _row(one: dict[str, Any], instant: datetime) -> Row:
    if one["silent"]:
        heard = Text(f"silent since {lasting(instant - one['alive_at'])}", style="red")
    elif one["draining"]:
        heard = Text(f"{relative(one['alive_at'], instant)}, draining", style="yellow")
    else:
        heard = Text(relative(one["alive_at"], instant))
    up_for = lasting(instant - one["started_at"])
    return f"{one['host']}:{one['pid']}", one["kind"], one["version"], up_for, heard, " ".join(one["queues"] or ())


def _at_work(one: dict[str, Any], instant: datetime) -> Iterator[Row]:
    for work in one["at_work"]:
        # A run's message is named as the run.
        message = work["message_id"] if work["message_id"] != str(work["run"]) else ""
        yield work["what"], lasting(instant - work["since"]), work["run"] or "", f"{one['host']}:{one['pid']}", message


def _since(work: dict[str, Any], heard: datetime) -> dict[str, Any]:
    try:
        since = heard - timedelta(seconds=work["seconds"])
    except OverflowError:
        since = heard
    return {name: work.get(name) for name in ("what", "run", "message_id")} | {"since": since}
