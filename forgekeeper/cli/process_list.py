"""`processes` and `leases`: living and silent processes, their work and leases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any

import structlog
import typer
from rich.text import Text

from forgekeeper.api.batches import BATCHES, list_queues
from forgekeeper.audit import acts
from forgekeeper.cli.connection import connect_command, require_redis
from forgekeeper.cli.terminal import (
    CompletedAct,
    Json,
    Problem,
    create_group,
    format_duration,
    format_relative_time,
    format_time,
    format_warning,
    out,
    print_answer,
    print_json,
    print_table,
)
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import client, process_identity
from forgekeeper.platform.coordination import leases as locks
from forgekeeper.platform.database import now
from forgekeeper.platform.settings import Settings
from forgekeeper.platform.settings.cron import BadCron, Cron, parse_schedule

PROCESS_FIELDS = ("kind", "host", "pid", "version", "started_at", "alive_at", "draining", "queues", "timetable")

log = structlog.get_logger(__name__)


def read_schedules(known: Sequence[Process], instant: datetime, settings: Settings) -> tuple[dict[str, str], str]:
    """Return each batch's schedule as text, and whose schedules they are.

    Schedules are read from the first living scheduler, else from the settings. `timetable_conflicts` reports schedulers
    that disagree.
    """
    kept = next((one.timetable for one in known if one.timetable and not one.is_silent(instant)), None)
    if kept is None:
        return {name: str(settings.schedule_of(name) or "off") for name in BATCHES}, "settings"
    return {name: kept.get(name, "off") for name in BATCHES}, "schedulers"


def parse_known_schedule(schedule: str) -> Cron | None:
    """Parse a schedule; None if it is off or uses the syntax of a newer version."""
    try:
        return parse_schedule(schedule)
    except BadCron:
        return None


def processes(json: Json = False) -> None:
    """List running and silent schedulers and workers, and their current work.

    A process is listed once it is ready; a process that waits for its servers is not.  A process that shuts down leaves
    the list at once, a silent process after a day.
    """
    with connect_command("processes"):
        answer = list_facts()
    if json:
        print_json(answer)
        return
    instant, found = answer["at"], answer["processes"]
    for sentence in answer["warnings"]:
        out.print(format_warning(sentence))
    rows = [_process_row(one, instant) for one in found] or [(Text("none", style="dim"), *[""] * 5)]
    print_table(("process", "kind", "version", "up for", "heartbeat", "queues"), rows)
    if work := [row for one in found for row in _list_work_rows(one, instant)]:
        out.print()
        print_table(("work", "for", "run", "process"), work)


def list_facts() -> dict[str, Any]:
    """Return the JSON of `processes`. Needs a connection."""
    instant, known = now(), Process.list_all()
    warnings = list(describe_warnings(known, instant))
    return {"at": instant, "processes": process_facts(known, instant), "warnings": warnings}


def process_facts(known: Sequence[Process], instant: datetime) -> list[dict[str, Any]]:
    """Return the facts of each process. Start times of work use the database's clock."""
    return [
        {name: getattr(one, name) for name in PROCESS_FIELDS}
        | {
            "silent": one.is_silent(instant),
            # Another process has taken over the work of a silent process.
            "at_work": []
            if one.is_silent(instant)
            else [_work_facts(work, one.alive_at) for work in one.at_work or ()],
        }
        for one in known
    ]


def describe_warnings(known: Sequence[Process], instant: datetime) -> Iterator[str]:
    """Yield warnings about the processes. *known* must be all known processes."""
    yield from missing_processes(known, instant)
    yield from timetable_conflicts(known, instant)


def missing_processes(known: Sequence[Process], instant: datetime) -> Iterator[str]:
    """Yield warnings if no scheduler is alive, or if queues lack a worker."""
    living = [one for one in known if not one.is_silent(instant)]
    if not any(one.kind == "scheduler" for one in living):
        yield "no scheduler is running: due runs are not sent; start `forgekeeper scheduler`"
    workers = [one for one in living if one.kind == "worker"]
    served = {queue for one in workers if not one.draining for queue in one.queues or ()}
    if lacking := sorted({*list_queues()} - served):
        which = f"queue{'s' if len(lacking) > 1 else ''} {', '.join(lacking)}"
        yield f"no worker serves {which}: start `forgekeeper worker --queues {','.join(lacking)}`"


def timetable_conflicts(known: Sequence[Process], instant: datetime) -> Iterator[str]:
    """Yield a warning for each batch with different schedules in living schedulers."""
    schedulers = [one for one in known if one.kind == "scheduler" and not one.is_silent(instant)]
    for batch in BATCHES:
        kept: dict[str, list[str]] = {}
        for one in schedulers:
            kept.setdefault((one.timetable or {}).get(batch, "off"), []).append(one.name)
        if len(kept) > 1:
            each = " and ".join(f"{schedule} ({', '.join(names)})" for schedule, names in sorted(kept.items()))
            yield f"schedulers have different schedules of {batch}: {each}; give them the same settings"


def _process_row(one: dict[str, Any], instant: datetime) -> tuple[object, ...]:
    heard = Text(format_relative_time(one["alive_at"], instant))
    if one["silent"]:
        heard = Text(f"silent for {format_duration(instant - one['alive_at'])}", style="red")
    elif one["draining"]:
        heard = Text(f"{heard}, draining", style="yellow")
    up_for = format_duration(instant - one["started_at"])
    return f"{one['host']}:{one['pid']}", one["kind"], one["version"], up_for, heard, " ".join(one["queues"] or ())


def _list_work_rows(one: dict[str, Any], instant: datetime) -> Iterator[tuple[object, ...]]:
    for work in one["at_work"]:
        yield work["what"], format_duration(instant - work["since"]), work["run"] or "", f"{one['host']}:{one['pid']}"


def _work_facts(work: dict[str, Any], heard: datetime) -> dict[str, Any]:
    since = heard - timedelta(seconds=work["seconds"])
    return {name: work.get(name) for name in ("what", "run", "message_id")} | {"since": since}


def describe_work(batches: Sequence[str] | None = None, run: int | None = None) -> Iterator[str]:
    """Yield a sentence for each run and child at work: of these batches, of a run, or all."""
    instant = now()
    names = {one.name for name in batches or () for one in (BATCHES[name], *BATCHES[name].children)}

    def is_chosen(what: str, run_id: int | None) -> bool:
        return (batches is None or what in names) and run in {None, run_id}

    for one in JobRun.select().where(JobRun.state == "started").order_by(JobRun.id):
        if is_chosen(one.batch, one.id):
            yield (
                f"run {one.id} of {one.batch} has been running on {one.started_by} for"
                f" {format_duration(instant - one.started_at)}"
            )
    for process in process_facts(Process.list_all(), instant):
        for work in process["at_work"]:
            if work["what"] not in BATCHES and is_chosen(work["what"], work["run"]):
                where, since = f"{process['host']}:{process['pid']}", format_duration(instant - work["since"])
                yield f"{work['what']}, a child of run {work['run']}, has been running on {where} for {since}"


def leases_list(json: Json = False) -> None:
    """List the held leases, longest held first."""
    with connect_command("leases"):
        require_redis()
        found = list_held_leases()
    if json:
        print_json({"leases": found})
    else:
        print_table(("lease", "holder", "since", "seconds left"), (one.values() for one in found))


leases = create_group("leases", "List the held leases with their holders, or free a lease.", leases_list)


@leases.command("break")
def leases_break(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The lease's name, as `leases list` shows it.")],
    json: Json = False,
) -> None:
    """Free a lease whose holder hangs.  The holder is not stopped: it notices at its next safe point."""
    with connect_command("leases"):
        freed = free_lease(name)
    print_answer({"lease": name, "broken": True}, freed.sentence, json=json)


def describe_holder(lease: str) -> str:
    """Return who holds a lease, and since when. Raises Redis' error if Redis does not answer."""
    return _say_holder(_find_lease(lease))


def free_lease(lease: str, *, seen: str | None = None) -> CompletedAct:
    """Free a lease and record it. Needs a connection.

    *seen* is the sentence of `describe_holder` that the person has read. Raises `Problem` if nobody holds the lease, or
    if its holder is not the one in *seen*.
    """
    require_redis()
    found = _find_lease(lease)
    if found is not None and seen not in {None, _say_holder(found)}:
        raise Problem(f"{_say_holder(found)} now: nothing was changed; check the holder again")
    if found is not None:
        acts.record_act("leases break", lease, before={"holder": found.holder, "since": found.since})
    if found is None or not locks.break_lease(client, lease, held=found):
        raise Problem(f"nobody holds the lease {lease}; `forgekeeper leases list` lists the held leases")
    log.warning("lease broken", lease=lease, by=process_identity())
    return CompletedAct(f"{lease} is free")


def _find_lease(lease: str) -> locks.HeldLease | None:
    return next((one for one in locks.list_leases(client) if one.name == lease), None)


def _say_holder(found: locks.HeldLease | None) -> str:
    return f"{found.holder} holds it since {format_time(found.since)}" if found else "nobody holds it"


def list_held_leases() -> list[dict[str, Any]]:
    """Return the held leases as facts: name, holder, since, and seconds left unless renewed."""
    return [one._asdict() | {"left": round(one.left.total_seconds(), 1)} for one in locks.list_leases(client)]
