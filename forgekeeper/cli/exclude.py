"""`exclude`: keep batches from projects, groups or names before anything is deleted."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any

import typer

from forgekeeper.api.batches import BATCHES, BatchSpec
from forgekeeper.audit import acts
from forgekeeper.cli.connection import batch_named, connect_command
from forgekeeper.cli.holding import UntilOption
from forgekeeper.cli.terminal import (
    Json,
    Problem,
    create_group,
    format_time,
    print_answer,
    print_json,
    print_table,
    read_time,
    wrong_use,
)
from forgekeeper.platform.database import database, exclusions, now
from forgekeeper.platform.database.exclusions import BadExclusion, Exclusion, ExclusionSubject

ExclusionArgument = Annotated[
    str, typer.Argument(metavar="WHAT", help="project:7, group:9, or a pattern of names: 'pattern:uploads/*'.")
]
RequiredReason = Annotated[str, typer.Option(help="The reason, for the audit.")]
NEEDED_COLUMNS = {"project": "project", "group": "project", "pattern": "name"}
"""Column that a record needs for an exclusion of each kind."""


def exclude_list(json: Json = False) -> None:
    """List the exclusions in force, each with its batch, person, times and reason."""
    with connect_command("exclude", redis_needed=False):
        standing = Exclusion.list_in_force()
    if json:
        print_json(list_facts(standing))
        return
    columns = ("id", "what", "batch", "by", "since", "until", "reason")
    print_table(columns, ((one.id, one.what, one.batch or "all", *_exclusion_cells(one)) for one in standing))


def list_facts(standing: Iterable[Exclusion]) -> dict[str, Any]:
    """Return the JSON of `exclude list`."""
    return {"exclusions": [_exclusion_facts(one) for one in standing]}


exclude = create_group(
    "exclude",
    "Keep records from deletion: of a project, of a group, or with a name that a pattern matches.",
    exclude_list,
)


@exclude.command("add")
def exclude_add(
    what: ExclusionArgument,
    reason: RequiredReason,
    until: UntilOption = None,
    batch: Annotated[str | None, typer.Option("--batch", metavar="BATCH", help="Only for this batch.")] = None,
    json: Json = False,
) -> None:
    """Keep the records of a project or of a group's projects, or with a name that a pattern matches.

    The exclusion applies from the next chunk, also to current runs.  A pattern must match the whole name of a record,
    as previews show it: * matches any text, ? one character.
    """
    subject = _parse_subject(what)
    reached, reason = _list_affected_batches(subject, batch), _require_reason(reason)
    with connect_command("exclude add", redis_needed=False):
        made = add_exclusion(subject, batch, until=until, reason=reason)
    end = f"until {format_time(made.until)}" if made.until else f"until `forgekeeper exclude remove {made.id}`"
    said = f"{made.what} is excluded from {', '.join(reached)} {end}"
    print_answer(_exclusion_facts(made) | {"reaches": reached}, said, json=json)


@exclude.command("remove")
def exclude_remove(
    what: Annotated[
        str,
        typer.Argument(
            metavar="ID|WHAT", help="The exclusion's id, as `list` shows it, or project:7 for all its exclusions."
        ),
    ],
    reason: RequiredReason,
    json: Json = False,
) -> None:
    """Remove an exclusion by its id, or all exclusions of a project, group or pattern."""
    reason, number = _require_reason(reason), what.strip()
    which = Exclusion.id == int(number) if number.isascii() and number.isdecimal() and len(number) < 19 else None
    if which is None:
        subject = _parse_subject(what)
        which = (Exclusion.kind == subject.kind) & (Exclusion.subject == subject.subject)
    with connect_command("exclude remove", redis_needed=False), database.atomic():
        removed = list(Exclusion.delete().where(which).returning(Exclusion).execute())
        for one in removed:
            acts.record_act("exclude remove", one.what, batch=one.batch, reason=reason, before=_exclusion_facts(one))
        if not removed:
            raise Problem(f"there is no exclusion {what}; `forgekeeper exclude list` lists the exclusions")
    said = ", ".join(f"{one.what} (exclusion {one.id})" for one in removed)
    print_answer({"removed": [_exclusion_facts(one) for one in removed]}, f"no longer excluded: {said}", json=json)


def add_exclusion(subject: ExclusionSubject, batch: str | None, *, until: str | None, reason: str) -> Exclusion:
    """Add the exclusion and record it. Needs a connection.

    Raises `Problem` if it could exclude nothing.
    """
    since = now()
    end = None if until is None else read_time(until, since, ahead=True)
    if end is not None and end <= since:
        wrong_use(f"{format_time(end)} has passed; give a future time, in UTC")
    if subject.kind == "group" and (lacks := exclusions.why_no_groups()):
        raise Problem(f"no group can be excluded: {lacks}; create that table or view (docs/exclusions.md)")
    with database.atomic():
        made = Exclusion.add(subject, batch=batch, reason=reason, by=acts.name_actor(), since=since, until=end)
        acts.record_act("exclude add", made.what, batch=batch, reason=reason, after=_exclusion_facts(made))
    return made


def _parse_subject(what: str) -> ExclusionSubject:
    try:
        return ExclusionSubject.from_text(what)
    except BadExclusion as unclear:
        wrong_use(str(unclear))


def _list_affected_batches(subject: ExclusionSubject, batch: str | None) -> list[str]:
    """Return the batches that the exclusion affects; raise `Problem` if it affects nothing."""
    asked: list[BatchSpec] = [*BATCHES.values()] if batch is None else [batch_named(batch)]
    reached = [one.name for one in asked if one.can_exclude(subject.kind)]
    if not reached:
        who, lacks = batch or "every batch", NEEDED_COLUMNS[subject.kind]
        wrong_use(f"{subject.kind}:{subject.subject} would exclude nothing: no record of {who} has a {lacks}")
    return reached


def _require_reason(reason: str) -> str:
    return reason if reason.strip() else wrong_use("give a --reason, for the audit")


def _exclusion_facts(one: Exclusion) -> dict[str, Any]:
    fields = ("id", "kind", "subject", "batch", "reason", "by", "since", "until")
    return {field: getattr(one, field) for field in fields}


def _exclusion_cells(one: Exclusion) -> tuple[str, datetime, str, str]:
    return one.by, one.since, format_time(one.until) if one.until else "it is removed", one.reason
