"""Foreign keys that refer to a relation, and their actions when a row of it is deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import peewee as pw

from forgekeeper.platform.database import database, sqlstate
from forgekeeper.platform.database.naming import relation_name
from forgekeeper.platform.database.read_only import read_only_snapshot
from forgekeeper.platform.database.targets import TargetRelation

Action = Literal["cascade", "set null", "set default", "restrict", "no action"]
ACTIONS_BY_CODE: dict[str, Action] = {
    "c": "cascade",
    "n": "set null",
    "d": "set default",
    "r": "restrict",
    "a": "no action",
}
"""Actions by `pg_constraint.confdeltype`."""
DELETION_REFUSED_ERRORS = {"42501", "55000"}
"""SQLSTATEs: the role, or every role, may not delete from the view; the deletion itself will report it."""

# A plan names the table below a view; a view that only reads another table in a subquery does not delete from it.
EXPLAIN_DELETION = "explain (verbose, format json) delete from {} where false"
# By name, because `to_regclass` refuses relations in a schema that the role may not use.
SELECT_OIDS = """
    select c.oid::bigint from unnest(%s::text[], %s::text[]) as wanted (schema, name)
        join pg_namespace as n on n.nspname = wanted.schema
        join pg_class as c on c.relnamespace = n.oid and c.relname = wanted.name
"""
# A deletion deletes from each part of a table, and a cascade continues from each table that it reaches.  The foreign
# keys of parts are copies of their table's foreign key (`conparentid`).
FIND_FOREIGN_KEYS = """
    with recursive reached (oid) as (
        select unnest(%(tables)s::oid[])
      union
        select next.oid from reached, lateral (
            select conrelid from pg_constraint where contype = 'f' and confdeltype = 'c' and confrelid = reached.oid
          union all
            select inhrelid from pg_inherits where inhparent = reached.oid
        ) as next (oid)
    )
    select conname::text, conrelid::bigint, conrelid::regclass::text, confrelid::bigint, confrelid::regclass::text,
        confdeltype::text,
        array(
            select attname::text from unnest(conkey) with ordinality as one (number, place)
                join pg_attribute on attrelid = conrelid and attnum = number order by place
        ),
        array(
            select attname::text from unnest(confkey) with ordinality as one (number, place)
                join pg_attribute on attrelid = confrelid and attnum = number order by place
        ),
        exists (
            select from pg_index
            where indrelid = conrelid and indisunique and indisvalid and indpred is null and indexprs is null
                and (indkey::smallint[])[0:indnkeyatts - 1] <@ conkey
        )
    from pg_constraint join reached on confrelid = reached.oid
    where contype = 'f' and conparentid = 0
    order by conrelid::regclass::text, conname
"""
# Each relation, the tables that it shows if it is a view, and the parts of all of these.
SELECT_TABLES_BELOW = """
    with recursive reached (name, oid) as (
        (
            select name, to_regclass(name)::oid from unnest(%(names)s::text[]) as name
          union all
            select '', unnest(%(tables)s::oid[])
        )
      union
        select reached.name, next.oid from reached, lateral (
            select below.refobjid
            from pg_class as view
                join pg_rewrite as rule on rule.ev_class = view.oid
                join pg_depend as below on below.classid = 'pg_rewrite'::regclass and below.objid = rule.oid
                    and below.refclassid = 'pg_class'::regclass and below.refobjid <> view.oid
            where view.oid = reached.oid and view.relkind = 'v'
          union all
            select inhrelid from pg_inherits where inhparent = reached.oid
        ) as next (oid)
    )
    select name, oid::bigint from reached where oid is not null
"""


class ForeignKey(NamedTuple):
    """A foreign key from *table* to rows of *referenced_table*, and its *action* when such a row is deleted.

    *table* and *referenced_table* are oids, *table_name* and *referenced_name* their names.  *columns* refer to
    *referenced_columns*.  If *is_unique*, at most one row refers to a row.
    """

    name: str
    table: int
    table_name: str
    referenced_table: int
    referenced_name: str
    action: Action
    columns: Sequence[str]
    referenced_columns: Sequence[str]
    is_unique: bool

    @property
    def changes_rows(self) -> bool:
        """Whether the deletion of a row deletes or changes the rows that refer to it."""
        return self.action in ("cascade", "set null", "set default")


def find_foreign_keys(target: TargetRelation) -> list[ForeignKey]:
    """Return the foreign keys to rows that a deletion deletes, including cascades.

    They are unknown, and the list is empty, if a trigger deletes in place of PostgreSQL, or if the role may not delete
    from a view.
    """
    tables = find_deletion_tables(target)
    rows = database.execute_sql(FIND_FOREIGN_KEYS, {"tables": tables}).fetchall() if tables else []
    found = [ForeignKey(*row) for row in rows]
    return [key._replace(action=ACTIONS_BY_CODE[key.action]) for key in found]


def find_deletion_tables(target: TargetRelation) -> list[int]:
    """Return the oids of the tables whose rows a deletion from the relation deletes."""
    if target.oid is None:
        return []
    if target.is_table and not target.instead_rules:
        return [target.oid]
    try:
        # In a savepoint, because a refusal is an expected answer.
        with read_only_snapshot():
            plans = database.execute_sql(EXPLAIN_DELETION.format(relation_name(target.model)), {}).fetchall()
    except pw.DatabaseError as error:
        if sqlstate(error) not in DELETION_REFUSED_ERRORS:
            raise
        return []
    # With a rule `do instead nothing` the list of plans is empty.
    nodes = [plan["Plan"] for (found,) in plans for plan in found if "Schema" in plan["Plan"]]
    values = [one["Schema"] for one in nodes], [one["Relation Name"] for one in nodes]
    return [oid for (oid,) in database.execute_sql(SELECT_OIDS, values).fetchall()]


def list_tables_below(names: Sequence[str], *, own: Sequence[int]) -> list[set[int]]:
    """Return the oids of the tables *own* with their parts, and of each relation's tables.

    A relation is a table or a view of tables; a missing relation yields an empty set.
    """
    found: dict[str, set[int]] = {name: set() for name in ("", *names)}
    for name, oid in database.execute_sql(SELECT_TABLES_BELOW, {"names": list(names), "tables": list(own)}).fetchall():
        found[name].add(oid)
    return [found[name] for name in ("", *names)]
