"""`grants`: give a PostgreSQL role the rights that a process needs, and no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated, NamedTuple

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
SELECT_MISSING_ROLES = """
    select name from unnest(%s) with ordinality as wanted (name, place)
    where not exists (select from pg_roles where rolname = name) order by place
"""


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


class RoleRights(NamedTuple):
    """The rights of a role: the statements that grant them, for the process that uses the role."""

    role: str
    process: ProcessRole
    statements: list[str]


def grants(
    role: Annotated[str | None, typer.Option("--role", metavar="ROLE", help="The role that gets the rights.")] = None,
    process: ProcessOption = ProcessRole.PERSON,
    everybody: Annotated[
        bool,
        typer.Option("--all", help="Grant the five roles of the documentation their rights; create missing roles."),
    ] = False,
    print_: Annotated[bool, typer.Option("--print", help="Print the SQL and change nothing.")] = False,
    json: Json = False,
) -> None:
    """Grant a PostgreSQL role the rights of a process, on forgekeeper's tables and on the forge's tables or views.

    Run it as the owner of both, after `migrate`, `adopt` and each upgrade.  It revokes nothing.  If others own the
    forge's tables, give them the output of --print.  `forgekeeper check --as` checks a role for the same rights.

    With --all, the roles are forgekeeper, forgekeeper_scheduler, forgekeeper_worker, forgekeeper_exporter and
    forgekeeper_console.  A role that is created may log in and has no password.
    """
    if everybody and (role is not None or process is not ProcessRole.PERSON):
        wrong_use("use --all, or --role and --as, not both")
    if role is None and not (print_ or everybody):
        wrong_use("name the role that gets the rights with --role, use --all, or show the rights with --print")
    with connect_command("grants", redis_needed=False) as settings:
        names = {one: _name_role(one) for one in ProcessRole} if everybody else {process: role or _name_role(process)}
        rights = [RoleRights(name, one, list(list_grants(one, name, settings))) for one, name in names.items()]
        missing = list(_find_missing_roles(list(names.values()))) if everybody else []
        created = [f"create role {quote_name(name)} login" for name in missing]
        if not print_:
            _execute_grants(rights, created)
    statements = [*created, *(statement for one in rights for statement in one.statements)]
    if json:
        which = {"role": None, "as": None} if everybody else {"role": role, "as": process}
        print_json(which | {"granted": not print_, "created": missing, "statements": statements})
    elif print_:
        for statement in statements:
            write_line(f"{statement};")
    else:
        said = [f"{name} was created: it may log in, and has no password" for name in missing]
        said += [f"{one.role} has the rights of the {one.process}: {len(one.statements)} grants" for one in rights]
        print_sentences(said)


def _name_role(process: ProcessRole) -> str:
    """Return the name of the process's role in the documentation."""
    return "forgekeeper" if process is ProcessRole.PERSON else f"forgekeeper_{process}"


def _find_missing_roles(names: list[str]) -> Iterator[str]:
    yield from (name for (name,) in database.execute_sql(SELECT_MISSING_ROLES, (names,)).fetchall())


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


def _execute_grants(rights: Sequence[RoleRights], created: Sequence[str]) -> None:
    """Create roles and execute all grants or nothing, and record each; raise `Problem` for refused rights."""
    try:
        with database.atomic():
            for statement in created:
                database.execute_sql(statement)
            for one in rights:
                acts.record_act("grants", one.role, after={"as": one.process, "statements": one.statements})
                for statement in one.statements:
                    database.execute_sql(statement)
    except pw.PeeweeException as error:
        refused = clean_text(text_of(error).strip().splitlines()[0])
        if sqlstate(error) == UNDEFINED_ROLE_SQLSTATE:
            raise Problem(
                f"{refused}: create the role first, as with `create role {quote_name(rights[0].role)} login`"
            ) from error
        if sqlstate(error) == MISSING_RIGHT_SQLSTATE:
            remedy = "run this as the owner, or give the owner the output of --print"
            if created:
                remedy += f"; a superuser creates roles: `{'; '.join(created)}`"
            raise Problem(f"{refused}: {remedy}") from error
        raise
