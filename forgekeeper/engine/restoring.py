"""The SQL that inserts deleted rows back, from the columns that the audit has of them.

Rows of a table are inserted with all of their columns.  Only the forge knows the rows below a view: a function of the
forge inserts them, such as ``restore_artifacts`` for artifacts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from peewee import chunked
from psycopg2.sql import Identifier

from forgekeeper.api.answers import Rows, Subject
from forgekeeper.engine.row_audit import map_audit_names
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.database.exclusions import is_visible
from forgekeeper.platform.database.naming import relation_name, show_column, shown_name

MAX_ROWS_PER_STATEMENT = 500
"""Rows per statement of the script."""

# With these settings the script means the same in each session, and no value can end its literal.
BEGIN_SCRIPT = ("begin;", "set local standard_conforming_strings = on;", "set local client_encoding = 'UTF8';")
INSERT_DELETED_ROWS = """\
with back as (
    insert into {relation} ({columns}) overriding system value
    select {columns} from jsonb_populate_recordset(null::{relation}, {rows}::jsonb)
    on conflict ({key}) do nothing
    returning {returned}
)"""
ADD_TO_TOTALS = """
update {table} as total
set {kept} = total.{kept} + came.{size}
from (select {of}, sum(coalesce({size}, 0)) as {size} from back group by {of}) as came
where total.{total_key} = came.{of};"""
CALL_RESTORE_FUNCTION = "select {schema}.{function}({rows}::jsonb);"
SELECT_RELATION = """
    select relkind in ('r', 'p'), quote_ident(nspname), quote_ident(nspname) || '.' || quote_ident(relname),
        to_regprocedure(quote_ident(nspname) || '.' || quote_ident(%(function)s) || '(jsonb)') is not null
    from pg_class as c join pg_namespace as n on n.oid = relnamespace where c.oid = to_regclass(%(relation)s)
"""

RestoredRow = dict[str, Any]


class RestoredRelation(NamedTuple):
    """The forge's relation of the rows: a table, or a view with or without a function that restores rows."""

    is_table: bool
    schema: str
    quoted_name: str
    has_function: bool


def describe_subject(rows: Rows[Any]) -> Subject:
    """Return how people ask for a row of the answer."""
    return rows.called or Subject(rows.record, "ID", rows.record, because="it was due at {due}")


class RestorableRows:
    """Deleted rows of an answer that can be inserted back.

    *called* is people's word for a row, *past_participle* their word for its deletion, such as ``destroyed``.
    """

    def __init__(self, rows: Rows[Any]) -> None:
        assert rows.outbox is not None, "rows without an outbox are not restored"
        subject = describe_subject(rows)
        self.rows, self.record, self.called = rows, rows.record, subject.called
        self.past_participle = subject.gone.removeprefix("was ")
        self.columns = map_audit_names(rows)
        self.key = rows.model._meta.primary_key.column_name
        self.path = rows.outbox.path.column_name
        self.project = None if rows.project is None else rows.project.column_name
        self._theirs = rows.outbox.theirs

    @cached_property
    def _function_name(self) -> str:
        return f"restore_{self.called}s"

    def describe_obstacle(self) -> str | None:
        """Say why the deleted rows cannot be restored; None if nothing prevents it."""
        found = self._find_relation()
        if found is None:
            return None
        if self._theirs is not None and client.settings is not None and client.settings.objects == "theirs":
            why = "FORGEKEEPER_OBJECTS is theirs, so the forge deletes their objects, and forgekeeper cannot hold them"
        elif found.is_table or found.has_function:
            return None
        else:
            function = f"{found.schema}.{self._function_name}(jsonb)"
            why = f"{found.quoted_name} is a view without a function {function} that inserts rows (docs/adopting.md)"
        return f"{self.past_participle} {self.called}s cannot be restored: {why}"

    def read_row(self, facts: Mapping[str, Any]) -> RestoredRow:
        """Return a row of the relation by its columns, from its details in the audit."""
        known = {column: facts[name] for column, name in self.columns.items() if name in facts}
        unaudited = {name: value for name, value in self.rows.model.unaudited.items() if name not in known}
        row = {column: (known | unaudited)[column] for column in self.columns if column in known or column in unaudited}
        return row | dict(facts.get("others", {}))

    def row_exists(self, number: int) -> bool:
        """Return whether the forge has a row with this key."""
        model = self.rows.model
        return bool(model.select().where(model._meta.primary_key == number).exists())

    def write_script(self, rows: Iterable[RestoredRow]) -> Iterator[str]:
        """Yield the SQL that inserts rows back, in one transaction, and adds their sizes to the totals."""
        relation = self._find_relation()
        assert relation is not None, "the forge has the relation of rows that it has deleted"
        template = self._write_insert() if relation.is_table else CALL_RESTORE_FUNCTION
        yield from BEGIN_SCRIPT
        (path,) = database.execute_sql("select current_setting('search_path')").fetchone()
        yield f"set local search_path = {path};"
        names = {"relation": relation.quoted_name, "schema": relation.schema, "function": self._function_name}
        with database.connection().cursor() as cursor:
            for columns, alike in groupby(rows, tuple):
                quoted = ", ".join(Identifier(column).as_string(cursor) for column in columns)
                for some in chunked(alike, MAX_ROWS_PER_STATEMENT):
                    text = cursor.mogrify("%s", (json.dumps(some, ensure_ascii=False),)).decode()
                    yield template.format(**names, columns=quoted, rows=text)
        yield "commit;"

    def _write_insert(self) -> str:
        """Return the template of a statement; a total that the forge lacks gets nothing back."""
        total, size = self.rows.total, self.rows.size
        names = {"relation": "{relation}", "columns": "{columns}", "rows": "{rows}", "key": show_column(self.key)}
        if total is None or size is None or not is_visible(total.kept.model):
            return f"{INSERT_DELETED_ROWS.format(**names, returned=names['key'])} select from back;"
        of, summed = show_column(total.of.column_name), show_column(size.column_name)
        names |= {"returned": f"{of}, {summed}", "of": of, "size": summed, "table": shown_name(total.kept.model)}
        names |= {"kept": show_column(total.kept.column_name)}
        names |= {"total_key": show_column(total.kept.model._meta.primary_key.column_name)}
        return f"{INSERT_DELETED_ROWS}{ADD_TO_TOTALS}".format(**names)

    def _find_relation(self) -> RestoredRelation | None:
        names = {"relation": relation_name(self.rows.model), "function": self._function_name}
        found = database.execute_sql(SELECT_RELATION, names).fetchone()
        return None if found is None else RestoredRelation(*found)
