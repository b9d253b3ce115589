"""`grants`: give a PostgreSQL role the rights that a process needs, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import peewee as pw
import typer

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import acts
from forgekeeper.cli.connection import connect_command
from forgekeeper.cli.migrate import MISSING_RIGHT_SQLSTATE, OWN_TABLES
from forgekeeper.cli.terminal import Json, Problem, print_json, print_sentences, write_line, wrong_use
from forgekeeper.platform.database import Base, database, relations, schema, sqlstate
from forgekeeper.platform.database.naming import name_parts, quote_name, relation_name
from forgekeeper.platform.settings import Settings
from metrics.logs import clean_text, text_of

UNDEFINED_ROLE_SQLSTATE = "42704"


class ProcessRole(StrEnum):
    """A process with its own rights; `person` has the rights of all commands, `console` reads."""

    PERSON = "person"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    EXPORTER = "exporter"
    CONSOLE = "console"


DELETING_PROCESSES = (ProcessRole.PERSON, ProcessRole.WORKER)
"""Processes that claim and delete records."""

ProcessOption = Annotated[
    ProcessRole, typer.Option("--as", help="The process that uses the role; `person` is for all commands.")
]


def grants(
    role: Annotated[str | None, typer.Option("--role", metavar="ROLE", help="The role that gets the rights.")] = None,
    process: ProcessOption = ProcessRole.PERSON,
    print_: Annotated[bool, typer.Option("--print", help="Print the SQL and change nothing.")] = False,
    json: Json = False,
) -> None:
    """Grant a PostgreSQL role the rights of a process, on forgekeeper's tables and on the forge's tables or views.

    Run it as the owner of both, after `migrate`, `adopt` and each upgrade.  It revokes nothing.  If others own the
    forge's tables, give them the output of --print.  `forgekeeper check --as` checks a role for the same rights.
    """
    if role is None and not print_:
        wrong_use("name the role that gets the rights with --role, or show the rights with --print")
    with connect_command("grants", redis_needed=False) as settings:
        statements = list(list_grants(process, role or f"forgekeeper_{process}", settings))
        if not print_:
            assert role is not None
            _execute_grants(role, process, statements)
    if json:
        print_json({"role": role, "as": process, "granted": not print_, "statements": statements})
    elif print_:
        for statement in statements:
            write_line(f"{statement};")
    else:
        print_sentences([f"{role} has the rights of a {process}: {len(statements)} grants"])


def list_grants(process: ProcessRole, role: str, settings: Settings) -> Iterator[str]:
    """Yield GRANT statements for *role* on the existing relations."""
    own, forge = settings.own_schema, settings.forge_schema
    to = f"to {quote_name(role)}"
    yield f"grant usage on schema {', '.join(map(quote_name, dict.fromkeys((own, forge))))} {to}"
    if process is not ProcessRole.EXPORTER:
        yield f"grant select on {quote_name(own)}.{schema.MIGRATIONS_TABLE} {to}"
    found = {one.model: list_privileges(one.model, process, reads=one.reads) for one in _list_forge_relations()}
    wanted = {model: list_privileges(model, process) for model in OWN_TABLES} | found
    there = relations.read_columns([relation_name(model) for model in wanted])
    for model, rights in wanted.items():
        if rights and (relation_name(model) in there or relations.is_ours(model)):
            where = quote_name(name_parts(model)[0] or (own if relations.is_ours(model) else forge))
            yield f"grant {', '.join(rights)} on {where}.{quote_name(name_parts(model)[1])} {to}"


def list_privileges(model: type[Base], process: ProcessRole, *, reads: bool = False) -> list[str]:
    """Return the process's privileges on the model's relation; *reads*: batches only read it."""
    if process is ProcessRole.CONSOLE:
        return ["select"]
    if reads:
        return [] if process in (ProcessRole.SCHEDULER, ProcessRole.EXPORTER) else ["select"]
    return relations.list_privileges(model, None if process is ProcessRole.PERSON else process)


def _list_forge_relations() -> Iterator[relations.Relation]:
    """Yield each relation of the forge once, preferring a batch that changes it."""
    every = [one for batch in BATCHES.values() for one in batch.relations]
    chosen = {one.model: one for one in sorted(every, key=lambda one: not one.reads)}
    yield from (chosen[model] for model in dict.fromkeys(one.model for one in every))


def _execute_grants(role: str, process: ProcessRole, statements: list[str]) -> None:
    """Execute all statements or none, and record it; raise `Problem` for refused rights."""
    try:
        with database.atomic():
            acts.record_act("grants", role, after={"as": process, "statements": statements})
            for statement in statements:
                database.execute_sql(statement)
    except pw.PeeweeException as error:
        refused = clean_text(text_of(error).strip().splitlines()[0])
        if sqlstate(error) == UNDEFINED_ROLE_SQLSTATE:
            raise Problem(
                f"{refused}: create the role first, as with `create role {quote_name(role)} login`"
            ) from error
        if sqlstate(error) == MISSING_RIGHT_SQLSTATE:
            raise Problem(f"{refused}: run this as the owner, or give the owner the output of --print") from error
        raise
