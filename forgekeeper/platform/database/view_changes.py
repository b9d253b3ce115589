"""Views that must not be used: PostgreSQL cannot change their rows, or they have changed.

Both are checked before a batch begins.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

import peewee as pw

from forgekeeper.platform.database import database
from forgekeeper.platform.database.relations import Column, ColumnsByTable, Relation
from forgekeeper.platform.database.sessions import sqlstate

NOT_SUPPORTED = "0A000"
"""SQLSTATE: PostgreSQL does not support the statement."""
HAS_RECORD = "select to_regprocedure('find_changed_views(oid[])') is not null"
FIND_CHANGED = "select find_changed_views(%s::bigint[]::oid[])"
ONE_TABLE_CURE = "define it on one table, without joins, distinct, grouping or set operations"


def find_refused_changes(views: Iterable[Relation], tables: ColumnsByTable) -> Iterator[str]:
    """Yield a sentence for each needed change that PostgreSQL cannot make through a view.

    *tables* is the result of `read_columns` for the views.  Privileges are not checked.  Rows of a view of several
    tables can be locked, and rows of a view with triggers changed; so each kind of change is checked separately.
    """
    for view in views:
        yield from _find_refused(view, tables[view.sql])
        if "lock" in view.list_operations("worker") and (refusal := _why_not_locked(view)):
            yield f"rows of view {view.name} cannot be locked ({refusal}): {ONE_TABLE_CURE}"


def _find_refused(view: Relation, columns: Mapping[str, Column]) -> Iterator[str]:
    for need in view.needed_privileges("worker"):
        change, *named = re.findall(r"\w+", need)
        # A model may grant more than its batch uses: inserts are only made into relations that are not read.
        asked = change == "delete" or (change == "insert" and "select" not in view.needed_privileges("worker"))
        if asked and not any(change in column.supported for column in columns.values()):
            yield (
                f"rows of view {view.name} cannot be {change.removesuffix('e')}ed: {ONE_TABLE_CURE}, or give it a"
                f" trigger `instead of {change}`"
            )
        # The privilege to update only the key serves to lock rows.
        for column in named if need != f"update ({view.key})" else ():
            if column in columns and "update" not in columns[column].supported:
                yield (
                    f"column {view.name}.{column} cannot be changed: define it as a plain column of the view's table,"
                    " or give the view a trigger `instead of update`"
                )


def _why_not_locked(relation: Relation) -> str | None:
    """Return PostgreSQL's reason why rows of the relation cannot be locked, or None."""
    try:
        with database.atomic():
            database.execute_sql(f"explain select 1 from {relation.sql} for update")
    except pw.DatabaseError as error:
        if sqlstate(error) == NOT_SUPPORTED:
            return str(error).splitlines()[0]
        # A missing privilege is reported with all other privileges.
    return None


def find_changed_views(views: Collection[int]) -> Iterator[str]:
    """Yield a sentence for each of the *views*, given as oids, that differs from its adoption.

    If a column or table below a view is renamed, the view follows the renaming: it then shows the old column under the
    name of the new column.  The function `find_changed_views` of an adoption, if it exists, returns such views.
    """
    if database.execute_sql(HAS_RECORD).fetchone()[0]:
        for (name,) in database.execute_sql(FIND_CHANGED, (list(views),)).fetchall():
            yield (
                f"view {name} differs from the view that `forgekeeper adopt` created: a column or table below it was"
                " renamed, or another version of PostgreSQL prints it differently; check it, and run `forgekeeper"
                " adopt` again"
            )
