"""The contract of a batch with the forge: needed tables or views, derived from the models."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import peewee as pw

from forgekeeper.platform.database import Base, database
from forgekeeper.platform.database.naming import relation_name, shown_name

# PostgreSQL knows only for tables whether a column can be NULL; a valid check constraint counts as NOT NULL.
SELECT_COLUMNS = """
    select name, a.attname, format_type(a.atttypid, null),
        case when c.relkind in ('r', 'p') then a.attnotnull or exists (
            select from pg_constraint as said
            where said.conrelid = c.oid and said.contype = 'c' and said.convalidated and said.conkey = array[a.attnum]
              and pg_get_constraintdef(said.oid) ~* '^check \\(\\(+\\S+ is not null\\)+$'
        ) end,
        array(
            select privilege from unnest(array['select', 'insert', 'update', 'delete']) as privilege
            where case when privilege in ('select', 'update') then has_column_privilege(c.oid, a.attnum, privilege)
                else has_table_privilege(c.oid, privilege) end
        ),
        array(
            select change from unnest(array['insert', 'update', 'delete']) as change
            where case change when 'insert' then pg_relation_is_updatable(c.oid::regclass, true) & 8 <> 0
                when 'delete' then pg_relation_is_updatable(c.oid::regclass, true) & 16 <> 0
                -- With triggers it would ask for one of deletions, too.
                else pg_column_is_updatable(c.oid::regclass, a.attnum, false)
                    or exists (select from pg_trigger where tgrelid = c.oid and tgtype & 81 = 81)
                    or exists (select from pg_rewrite where ev_class = c.oid and ev_type = '2' and is_instead) end
        )
    from unnest(%s::text[]) as name
        join pg_class as c on c.oid = to_regclass(name)::oid
        join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
"""
SELECT_QUALIFIED_NAME = """
    select quote_ident(nspname) || '.' || quote_ident(relname) from pg_class as c
        join pg_namespace as n on n.oid = relnamespace where c.oid = to_regclass(%s) and nspname <> 'public'
"""
TYPE_NAMES = {
    "auto": "integer",
    "bigauto": "bigint",
    "bigint": "bigint",
    "blob": "bytea",
    "bool": "boolean",
    "char": "character",
    "date": "date",
    "datetime": "timestamp without time zone",
    "decimal": "numeric",
    "double": "double precision",
    "float": "real",
    "int": "integer",
    "json": "jsonb",
    "smallint": "smallint",
    "text": "text",
    "timestamptz": "timestamp with time zone",
    "uuid": "uuid",
    "varchar": "character varying",
}
"""PostgreSQL's names of the types of peewee's fields; the type of any other field is used unchanged."""
INTERCHANGEABLE_TYPES = ({"text", "character varying"}, {"bigint", "integer", "smallint"})
"""Interchangeable types: the forge may use either, the statements work with both."""
PRIVILEGE_ORDER = ("select", "insert", "update", "delete")
PRIVILEGE_PATTERN = re.compile(r"\w+(?: \(.*?\))?")
PROCESS_KINDS = ("scheduler", "worker", "exporter", "person")
INDEX_PATTERN = re.compile(r"create index \S+ on \S+ \((.*?)\)(?: where (.*))?", re.IGNORECASE)
"""An index for lookups.  A unique index is a rule of the forge, which cannot be checked for a view."""


class Column(NamedTuple):
    """An existing column: its *type*, and whether it is never NULL (None for a view's column).

    *granted* has the privileges of this role.  *supported* has the changes of the column or its rows that PostgreSQL
    supports for this relation, whatever the role.
    """

    type: str
    is_not_null: bool | None
    granted: Collection[str]
    supported: Collection[str]


ColumnsByTable = Mapping[str, Mapping[str, Column]]


def is_ours(model: type[Base]) -> bool:
    """Return whether the table is forgekeeper's own: its model is in the engine."""
    return f"{model.__module__}.".startswith("forgekeeper.")


class RequiredColumn(NamedTuple):
    """A required column, PostgreSQL's name of its type, and whether it may be NULL."""

    name: str
    type: str
    nullable: bool


class Index(NamedTuple):
    """An index on *columns*, partial if *where* has a condition."""

    columns: str
    where: str | None

    @property
    def where_clause(self) -> str:
        """The ``where`` clause with a space before it, or nothing."""
        return f" where {self.where}" if self.where else ""

    def create_statement(self, relation: str) -> str:
        """Return the statement that creates the index without blocking writes."""
        return f"create index concurrently on {relation} ({self.columns}){self.where_clause}"


class Relation(NamedTuple):
    """A table or view of the forge; if a batch only *reads* it, fewer privileges are needed.

    Statements walk its rows by *since* and the key, unless the model has an index of its own for that.
    """

    model: type[Base]
    reads: bool = False
    since: str | None = None

    @property
    def name(self) -> str:
        """The relation's name as people write it."""
        return shown_name(self.model)

    @property
    def sql(self) -> str:
        """The relation's name in statements, and in the result of `look`."""
        return relation_name(self.model)

    @property
    def key(self) -> str:
        """The columns of the key, with commas between them."""
        return ", ".join(field.column_name for field in self.model._meta.get_primary_keys())

    @property
    def fields(self) -> list[RequiredColumn]:
        """The columns that the relation must have; further columns are allowed."""
        return [RequiredColumn(one.column_name, column_type(one), one.null) for one in used_fields(self.model)]

    def needed_privileges(self, process: str | None = None) -> list[str]:
        """Return the privileges that *process* needs, or that any process needs if it is None."""
        if self.reads:
            return ["select"] if process in (None, "worker") else []
        return list_privileges(self.model, process)

    def list_operations(self, process: str | None = None) -> list[str]:
        """Return the operations of *process* on rows.

        Locking a row needs the privilege to update a column; the key is enough.
        """
        needs = self.needed_privileges(process)
        locks = ["lock"] if any(need.startswith("update") for need in needs) else []
        return [*needs[:1], *locks, *(need for need in needs[1:] if need != f"update ({self.key})")]

    @property
    def indexes(self) -> list[Index]:
        """The indexes that statements need; statements that only read look rows up by one column."""
        found = filter(None, map(INDEX_PATTERN.fullmatch, index_statements(self.model)))
        declared = [Index(one[1].replace('"', ""), one[2]) for one in found]
        if self.reads:
            return [one for one in declared if one.where is None and one.columns.isidentifier()]
        if self.since is None or any(self.since in one.columns for one in declared):
            return declared
        return [*declared, Index(f"{self.since}, {self.key}", None)]


def read_columns(names: Sequence[str]) -> ColumnsByTable:
    """Return the columns of the tables and views with these names, written as in SQL."""
    tables: dict[str, dict[str, Column]] = defaultdict(dict)
    for table, column, *facts in database.execute_sql(SELECT_COLUMNS, (list(names),)).fetchall():
        tables[table][column] = Column(*facts)
    return tables


def is_view(columns: Mapping[str, Column]) -> bool:
    """Return whether these are the columns of a view: only for tables *is_not_null* is known."""
    return bool(columns) and all(column.is_not_null is None for column in columns.values())


def find_other_columns(model: type[Base]) -> list[str]:
    """Return the readable columns of the relation that *model* lacks.

    The system columns ``tableoid`` and ``ctid``, which a view may show, are left out.
    """
    known = {"tableoid", "ctid", *(field.column_name for field in model._meta.sorted_fields)}
    columns = read_columns([relation_name(model)]).get(relation_name(model), {})
    return [name for name, column in columns.items() if name not in known and "select" in column.granted]


def find_misfits(model: type[Base], tables: ColumnsByTable) -> Iterator[str]:
    """Yield a sentence for each difference between *tables* and the model.

    A table or column is missing, or a column has the wrong type.
    """
    table, columns = shown_name(model), tables.get(relation_name(model))
    if columns is None:
        yield from () if model.optional else (f"table {table} is missing",)
        return
    for field in used_fields(model):
        wanted, found = column_type(field), columns.get(field.column_name)
        if found is None:
            yield f"column {table}.{field.column_name} is missing"
        elif wanted.removesuffix("[]") in TYPE_NAMES.values() and not any(
            {wanted, found.type} <= alike for alike in ({wanted}, *INTERCHANGEABLE_TYPES)
        ):
            yield f"column {table}.{field.column_name} is {found.type}, should be {wanted}"


def used_fields(model: type[Base]) -> list[pw.Field[Any]]:
    """Return the fields of the columns that statements use."""
    return [field for field in model._meta.sorted_fields if field.column_name not in model.beside]


def column_type(field: pw.Field[Any]) -> str:
    """Return PostgreSQL's name of the type of the field's column."""
    kind = field.field_type.split()[0].lower()
    return TYPE_NAMES.get(kind, kind) + "[]" * getattr(field, "dimensions", 0)


def index_statements(model: type[Base]) -> Iterator[str]:
    """Yield the statements that create the model's indexes, each on one line."""
    # Without a database, because they are also printed without a connection.
    for context in pw.SchemaManager(model, pw.PostgresqlDatabase(None))._create_indexes(safe=False):  # type: ignore[attr-defined]
        statement, _parameters = context.query()
        yield " ".join(statement.split())


def list_privileges(model: type[Base], process: str | None = None) -> list[str]:
    """Return the privileges of *process* on the model's table, such as ``update (id)``.

    If *process* is None, return the privileges of all processes.
    """
    of_each = (part.split(": ") for part in model.grants.split("; "))
    granted = ", ".join(text for who, text in of_each if process in (None, who))
    return sorted({*PRIVILEGE_PATTERN.findall(granted)}, key=lambda need: PRIVILEGE_ORDER.index(need.split()[0]))


def find_missing_privileges(wanted: Mapping[type[Base] | str, Sequence[str]], tables: ColumnsByTable) -> Iterator[str]:
    """Yield a sentence, with the ``grant``, for each table on which the role lacks privileges.

    *wanted* has the privileges by model or table.
    """
    for model, needed in wanted.items():
        table = model if isinstance(model, str) else relation_name(model)
        there = tables.get(table, {})
        known = there if isinstance(model, str) else [field.column_name for field in used_fields(model)]
        if lacks := [need for need in needed if _lacks_privilege(need, there, known)]:
            (role,) = database.execute_sql("select quote_ident(current_user)").fetchone()
            refused = " or ".join(need.split()[0] for need in lacks)
            shown = model if isinstance(model, str) else shown_name(model)
            (called,) = database.execute_sql(SELECT_QUALIFIED_NAME, (table,)).fetchone() or (shown,)
            yield f"{role} may not {refused} {shown}: `grant {', '.join(lacks)} on {called} to {role}`"


def _lacks_privilege(need: str, there: Mapping[str, Column], known: Iterable[str]) -> bool:
    privilege, *named = re.findall(r"\w+", need)
    # The privilege on all columns that we use is enough in place of the privilege on the table.
    return any(privilege not in there[name].granted for name in named or known if name in there)
