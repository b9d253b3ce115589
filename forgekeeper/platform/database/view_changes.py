"""Views that are not to be worked through: PostgreSQL cannot change their rows, or they show others than they did.

Both are asked of PostgreSQL before a batch begins.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

import peewee as pw

from forgekeeper.platform.database import database
from forgekeeper.platform.database.relations import Column, Relation, Tables
from forgekeeper.platform.database.sessions import sqlstate

NOT_SUPPORTED = "0A000"
"""PostgreSQL's class of errors of a statement that it understands and cannot execute."""
HAS_RECORD = "select to_regprocedure('find_changed_views(oid[])') is not null"
FIND_CHANGED = "select find_changed_views(%s::bigint[]::oid[])"
ONE_TABLE = "make it of one table, without joins, distinct, grouping or set operations"


def find_refused_changes(views: Iterable[Relation], tables: Tables) -> Iterator[str]:
    """Yield a sentence for each change that a worker needs to make and that PostgreSQL cannot make through a view.

    *tables* are what `relations.look` has returned for the views.  Rights are not judged.  The rows of a view of
    several tables can be locked, and those of a view with triggers changed; so each change is asked for by itself.
    """
    for view in views:
        yield from _refused(view, tables[view.sql])
        if "lock" in view.operations("worker") and (refusal := _why_not_locked(view)):
            yield f"rows of view {view.name} cannot be locked, as PostgreSQL says: {refusal}; {ONE_TABLE}"


def _refused(view: Relation, columns: Mapping[str, Column]) -> Iterator[str]:
    for need in view.needs("worker"):
        change, *named = re.findall(r"\w+", need)
        # A model may grant more than its batch does: rows are inserted where none are read.
        asked = change == "delete" or (change == "insert" and "select" not in view.needs("worker"))
        if asked and not any(change in column.can for column in columns.values()):
            yield (
                f"rows of view {view.name} cannot be {change.removesuffix('e')}ed: {ONE_TABLE}, or give it a"
                f" trigger `instead of {change}`"
            )
        # The right to update the key alone is there to lock rows.
        for column in named if need != f"update ({view.key})" else ():
            if column in columns and "update" not in columns[column].can:
                yield (
                    f"column {view.name}.{column} cannot be changed: let the view copy it from its one table, or"
                    " give the view a trigger `instead of update`"
                )


def _why_not_locked(relation: Relation) -> str | None:
    """Return what PostgreSQL says against locking rows of the relation, or None."""
    try:
        with database.atomic():
            database.execute_sql(f"explain select 1 from {relation.sql} for update")
    except pw.DatabaseError as error:
        if sqlstate(error) == NOT_SUPPORTED:
            return str(error).splitlines()[0]
        # Without the right to lock them: that is said with all rights.
    return None


def find_changed_views(views: Collection[int]) -> Iterator[str]:
    """Yield a sentence for each of the *views*, by their oids, that is not as its adoption has made it.

    PostgreSQL lets columns and tables below a view be renamed, and the view follows them: it then shows the old column
    under the name of the new one.  An adoption that has a function `find_changed_views` names such views.
    """
    if database.execute_sql(HAS_RECORD).fetchone()[0]:
        for (name,) in database.execute_sql(FIND_CHANGED, (list(views),)).fetchall():
            yield (
                f"view {name} is not as `forgekeeper adopt` made it: a column or table below it was renamed, or another"
                " PostgreSQL writes it differently; look at it, and run `forgekeeper adopt` again"
            )
