"""Views of a forge's tables in the form that the batches expect.

A view has the name of the example forge's table. Functions and rules make changes that a view cannot, with the rights
of the tables' owner: forgekeeper's role has rights on the views only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import ClassVar, TypeVar

from forgekeeper.platform.database import database, definers
from forgekeeper.platform.database.integrity import reasons_to_miss_rows
from forgekeeper.platform.database.relations import list_privileges
from forges.parts import AdoptedPart
from forges.templates import read_template, write_version_comment
from models import FORGE_MODELS, OPTIONAL_MODELS

MODELS_WITH_VIEWS = (*FORGE_MODELS, *OPTIONAL_MODELS)
"""Models whose tables may have views."""
VIEW_PRIVILEGES = {"forge_flags": "select", "ci_deleted_objects": "select, insert"}
"""Privileges on views without a model."""
SELECT_TABLE_COLUMNS = """
    select c.relname, a.attname, format_type(a.atttypid, null) from pg_class c join pg_attribute a on a.attrelid = c.oid
    where c.relnamespace = to_regnamespace(quote_ident(%s)) and c.relkind in ('r', 'p')
        and a.attnum > 0 and not a.attisdropped
    order by c.relname, a.attnum
"""
SELECT_TABLE_OWNERS = """
    select c.relname, quote_ident(r.rolname) from pg_class c join pg_roles r on r.oid = c.relowner
    where c.relnamespace = to_regnamespace(quote_ident(%s)) and c.relname = any(%s)
    order by c.relname
"""
# If another role created a function, such as a superuser who ran the output of --print, the function would run with
# that role's rights.
SELECT_OWNER_CHANGES = """
    select format('alter schema %%I owner to %%s;', nspname, %(owner)s) from pg_namespace
    where nspname = %(views)s and nspowner <> %(owner)s::regrole
    union all
    select format('alter table %%I.%%I owner to %%s;', nspname, relname, %(owner)s)
    from pg_class join pg_namespace on pg_namespace.oid = relnamespace
    where nspname = %(views)s and relkind in ('r', 'v') and relowner <> %(owner)s::regrole
    union all
    select format('alter function %%I.%%I(%%s) owner to %%s;', nspname, proname, arguments, %(owner)s)
    from pg_proc join pg_namespace on pg_namespace.oid = pronamespace,
        pg_get_function_identity_arguments(pg_proc.oid) as arguments
    where nspname = %(views)s and proowner <> %(owner)s::regrole
"""
SELECT_TABLE_OIDS = """
    select oid::bigint from pg_class where relnamespace = to_regnamespace(quote_ident(%s)) and relname = any(%s)
"""
TRIGGER_FUNCTION = re.compile(r"create or replace function VIEWS\.(\w+)\(\) returns trigger")
CONDITIONAL_LINE = re.compile(r"^(.*?) -- where there is (no )?(\w+)\.(\w+)\n", re.MULTILINE)
"""Line of a template for versions with that column, or ("no") without it."""

AdoptionT = TypeVar("AdoptionT", bound="Adoption")


class AdoptionRefused(Exception):
    """These tables cannot be adopted; the message has the reason and the remedy."""


@dataclass(frozen=True)
class Adoption:
    """An adoption of the tables in schema *tables* by views in *views*, granted to *role*.

    *owner* owns the tables, and the views from now on; *strays* are statements that give *owner* the objects of others
    in the schema of the views. Names are quoted for SQL; *schema* is the unquoted name of *tables*. *created* tells
    that the views' schema exists. *columns* has the types of the columns of each table.

    A forge has the name *forge* in commands and *display_name* in sentences; its SQL begins with *templates_before*
    and ends with *templates_after*.
    """

    forge: ClassVar[str]
    display_name: ClassVar[str]
    every_part: ClassVar[Sequence[AdoptedPart]]
    templates_before: ClassVar[Sequence[str]] = ("refusal",)
    templates_after: ClassVar[Sequence[str]] = ()

    tables: str
    views: str
    role: str | None
    owner: str
    schema: str
    created: bool
    strays: Sequence[str]
    columns: Mapping[str, Mapping[str, str]]

    @property
    def adopted_parts(self) -> list[AdoptedPart]:
        """Return the parts of the forge that are adopted."""
        return [part for part in self.every_part if self.why_left_out(part) is None]

    @property
    def left_out(self) -> dict[str, list[str]]:
        """Return the views of parts that are not adopted, by reason, without parts of forks."""
        found = defaultdict[str, list[str]](list)
        for part in self.every_part:
            if part.unless_table is None and (reason := self.why_left_out(part)) is not None:
                found[reason] += part.views
        return dict(found)

    @property
    def used_tables(self) -> list[str]:
        """Return the names of the tables that the parts read."""
        return sorted({self.table_name(table) for part in self.adopted_parts for table in part.needs})

    @property
    def additional_views(self) -> dict[str, str]:
        """Return views that belong to no part, with their privileges."""
        return {}

    @property
    def schema_comment(self) -> str:
        """Return the comment on the views' schema, with version and a digest of the columns."""
        facts = [
            (name, sorted(self.columns.get(name, {}).items())) for name in (*self.used_tables, *self.additional_views)
        ]
        digest = sha256(repr((facts, self.left_out)).encode()).hexdigest()[:16]
        return f"{write_version_comment(self.forge)}, {digest}, of {self.schema}"

    def table_name(self, name: str) -> str:
        """Return the real name of a table that a part calls *name*."""
        return name

    def why_left_out(self, part: AdoptedPart) -> str | None:
        """Return why a part is not adopted; None if it is."""
        if part.unless_table in self.columns:
            return f"schema {self.schema} has {part.unless_table}"
        for table, columns in part.needs.items():
            name = self.table_name(table)
            if name not in self.columns:
                return f"schema {self.schema} lacks table {name}"
            if lacks := set(columns.split()) - set(self.columns[name]):
                return f"table {self.schema}.{name} lacks column {min(lacks)}"
        return None

    def write_statements(self) -> Iterator[str]:
        """Yield the statements that create the views, part by part; they are idempotent.

        Run them in one transaction, in which they set role and search_path. A view stays bound to the functions that
        its search_path finds now, even if others are created later.
        """
        yield "set local search_path = pg_catalog, pg_temp;\n"
        # `if not exists` would require the right to create schemas even if the schema exists.
        if not self.created:
            yield f"create schema if not exists {self.views} authorization {self.owner};\n"
        yield from (f"{statement}\n" for statement in self.strays)
        yield f"set local role {self.owner};\n"
        every_view = [*(view for part in self.every_part for view in part.views), *self.additional_views]
        yield self.write_part("drop_views", EVERY_VIEW=", ".join(f"'{view}'" for view in every_view))
        made = [*self.templates_before, *(part.name for part in self.adopted_parts), *self.templates_after]
        yield from map(self.write_part, made)
        yield from self.write_more()
        # A trigger needs this right at its creation, and not when it fires.
        functions = TRIGGER_FUNCTION.findall("".join(read_template(self.forge, part) for part in made))
        yield "".join(f"revoke execute on function {self.views}.{name}() from public;\n" for name in functions)
        yield from map(self.write_part, ("changed_views", "grant_again"))
        (comment,) = database.execute_sql("select quote_literal(%s)", (self.schema_comment,)).fetchone()
        yield f"comment on schema {self.views} is {comment};\n"
        if self.role:
            yield "".join(self._write_grants(self.role))

    def write_part(self, part: str, **words: str) -> str:
        """Return the SQL of a part, with names and these *words* filled in."""
        return self.fill_template(
            CONDITIONAL_LINE.sub(self._fill_conditional_line, read_template(self.forge, part)), **words
        )

    def write_more(self) -> Iterator[str]:
        """Yield the statements that create views of no part."""
        yield from ()

    def fill_template(self, text: str, **words: str) -> str:
        """Fill names and expressions into a text."""
        words = {"TABLES": self.tables, "VIEWS": self.views, **words}
        return re.sub(rf"\b({'|'.join(words)})\b", lambda word: words[word[0]], text)

    def find_missing_indexes(self) -> Iterator[str]:
        """Yield, in order, statements that build missing indexes below the views."""
        yield from ()

    def report_limits(self) -> Iterator[str]:
        """Yield sentences about work that stays with the forge."""
        yield from ()

    def _fill_conditional_line(self, line: re.Match[str]) -> str:
        there = line[4] in self.columns.get(self.table_name(line[3]), ())
        return f"{line[1]}\n" if there is not bool(line[2]) else ""

    def _write_grants(self, role: str) -> Iterator[str]:
        yield f"grant usage on schema {self.views} to {role};\n"
        yield f"grant execute on function {self.views}.find_changed_views(oid[]) to {role};\n"
        rights = {
            model._meta.table_name: ", ".join(list_privileges(model)) for model in MODELS_WITH_VIEWS
        } | VIEW_PRIVILEGES
        for view, of_view in (
            {view: rights[view] for part in self.adopted_parts for view in part.views} | self.additional_views
        ).items():
            yield f"grant {of_view} on {self.views}.{view} to {role};\n"


def plan_adoption(kind: type[AdoptionT], tables: str, views: str, role: str | None) -> AdoptionT:
    """Inspect the tables and return their adoption; raise `AdoptionRefused` if they cannot be adopted."""
    if views == tables:
        raise AdoptionRefused(
            f"schema {views} has {kind.display_name}'s own tables: set FORGEKEEPER_FORGE_SCHEMA to another"
            f" schema for the views, such as forgekeeper_{kind.forge}"
        )
    if role and not database.execute_sql("select true from pg_roles where rolname = %s", (role,)).fetchone():
        raise AdoptionRefused(f"there is no role {role}: create it first, `create role {role} login`")
    found = inspect_tables(kind, tables, views, role)
    _require_readable_tables(found)
    owner = _find_owner(found)
    for sentence in definers.find_untrusted_roles([tables, views], owner):
        raise AdoptionRefused(sentence)
    strays = database.execute_sql(SELECT_OWNER_CHANGES, {"views": views, "owner": owner}).fetchall()
    return replace(found, owner=owner, strays=[statement for (statement,) in strays])


def inspect_tables(kind: type[AdoptionT], tables: str, views: str, role: str | None = None) -> AdoptionT:
    """Return the adoption of the tables, without owner and without checks of rights."""
    columns = defaultdict[str, dict[str, str]](dict)
    for table, column, its_type in database.execute_sql(SELECT_TABLE_COLUMNS, (tables,)).fetchall():
        columns[table][column] = its_type
    (created,) = database.execute_sql("select to_regnamespace(quote_ident(%s)) is not null", (views,)).fetchone()
    names = _quote_name(tables), _quote_name(views), role and _quote_name(role)
    return kind(*names, "", tables, created, (), dict(columns))


def require_owner(found: Adoption) -> None:
    """Raise `AdoptionRefused` unless this session may become the role that owns the tables."""
    (may_become,) = database.execute_sql("select pg_has_role(%s::regrole, 'member')", (found.owner,)).fetchone()
    if not may_become:
        raise AdoptionRefused(
            f"the tables belong to {found.owner}: run this as that role, or give the output of --print to that role"
        )


def _quote_name(name: str) -> str:
    (quoted,) = database.execute_sql("select quote_ident(%s)", (name,)).fetchone()
    return str(quoted)


def _require_readable_tables(found: Adoption) -> None:
    if not found.adopted_parts:
        raise AdoptionRefused(
            f"schema {found.schema} lacks {found.display_name}'s tables: name their schema with --tables"
        )
    # Rows hidden from us would look deleted, and their notes would be removed.
    found_tables = database.execute_sql(SELECT_TABLE_OIDS, (found.schema, found.used_tables)).fetchall()
    if reason := next(reasons_to_miss_rows([oid for (oid,) in found_tables]), None):
        raise AdoptionRefused(reason)


def _find_owner(found: Adoption) -> str:
    """Return the tables' owner, quoted for SQL; raise `AdoptionRefused` if they have several owners."""
    (first, owner), *others = database.execute_sql(SELECT_TABLE_OWNERS, (found.schema, found.used_tables)).fetchall()
    for table, another in others:
        if another != owner:
            raise AdoptionRefused(
                f"table {first} belongs to {owner} and table {table} to {another}: give them one owner first"
            )
    return str(owner)
