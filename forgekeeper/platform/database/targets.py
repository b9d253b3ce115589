"""Targets of statements: rows are found by place in a table, or by key through a view.

A row of a single table is found by its ctid; with partitions or child tables by its tableoid and ctid.  So a key that
is not unique cannot affect more rows than were claimed.  An updatable view may show both as columns of these names,
which is faster than a second lookup of keys; other views have neither.

An `INSTEAD OF` trigger or a rule, which acts in place of PostgreSQL, may keep a row and report it as deleted.  Such
triggers are found here, and the engine looks for the rows again.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from forgekeeper.platform.database import Base, database
from forgekeeper.platform.database.naming import relation_name, shown_name, table_alias

Act = Literal["delete", "update"]
ACT_BITS: dict[Act, tuple[int, str, int]] = {"delete": (8, "4", 16), "update": (16, "2", 4)}
"""The bit of `pg_trigger.tgtype`, the value of `pg_rewrite.ev_type` and the bit of `pg_relation_is_updatable` for each
act; bit 64 of the first is ``instead of``."""

# This also finds views that are only read: because of their triggers the engine looks for its rows once in vain.
FIND_TARGET = """
    with recursive reached (oid) as (
        select to_regclass(%(table)s)::oid
      union
        select below.refobjid
        from reached
            join pg_class as view on view.oid = reached.oid and view.relkind = 'v'
            join pg_rewrite as rule on rule.ev_class = view.oid
            join pg_depend as below on below.classid = 'pg_rewrite'::regclass and below.objid = rule.oid
                and below.refclassid = 'pg_class'::regclass and below.refobjid <> view.oid
    )
    select oid::bigint, relkind in ('r', 'p'), has_table_privilege(oid, 'select'),
        relkind = 'r' and not exists (select from pg_inherits where inhparent = oid),
        relkind = 'v' and pg_relation_is_updatable(oid, false) & %(updatable)s <> 0 and 2 = (
            select count(*) from pg_attribute
            where attrelid = pg_class.oid
                and (attname, atttypid) in (('ctid', 'tid'::regtype), ('tableoid', 'oid'::regtype))
        ),
        array(
            select format('trigger %%I of %%s', tgname, tgrelid::regclass) from pg_trigger
            where tgrelid in (select oid from reached) and not tgisinternal and tgenabled <> 'D'
                and tgtype::integer & 64 <> 0 and tgtype::integer & %(bit)s <> 0
          union all
            select format('rule %%I of %%s', rulename, ev_class::regclass) from pg_rewrite
            where ev_class in (select oid from reached) and ev_type = %(event)s and is_instead and ev_enabled <> 'D'
        )
    from pg_class where oid = to_regclass(%(table)s)
"""


class TargetRelation(NamedTuple):
    """The relation of *model*, and its properties for finding rows again.

    *oid* is None if the relation is missing.  *is_table* is False for a view.  *is_readable*: this role may read the
    whole relation.  *is_single*: it is one table without child tables.  *shows_places*: it is a view with the ctid and
    the tableoid of each row.  *instead* names the triggers and rules that act in place of PostgreSQL.
    """

    model: type[Base]
    oid: int | None = None
    is_table: bool = False
    is_readable: bool = False
    is_single: bool = False
    shows_places: bool = False
    instead_rules: tuple[str, ...] = ()

    @classmethod
    def find(cls, model: type[Base], act: Act = "delete") -> TargetRelation:
        """Read the properties; a missing relation fails later, in the statement that uses it."""
        bit, event, updatable = ACT_BITS[act]
        values = {"table": relation_name(model), "bit": bit, "event": event, "updatable": updatable}
        row = database.execute_sql(FIND_TARGET, values).fetchone()
        if row is None:
            return cls(model)
        oid, is_table, is_readable, is_single, shows_places, instead = row
        return cls(model, oid, is_table, is_readable, is_single, shows_places, tuple(instead))

    @property
    def has_places(self) -> bool:
        """Whether tableoid and ctid identify rows; reading them needs `select` on all columns."""
        return (self.is_table or (self.shows_places and not self.instead_rules)) and self.is_readable

    @property
    def is_found_by_ctid(self) -> bool:
        """Whether a ctid alone identifies a row."""
        return self.has_places and self.is_single

    @property
    def ctid_sql(self) -> str:
        """The place of a row in its table, in SQL."""
        return f"{table_alias(self.model)}.ctid"

    @property
    def tableoid_sql(self) -> str:
        """The table of a row, in SQL."""
        return f"{table_alias(self.model)}.tableoid"

    @property
    def display_name(self) -> str:
        """The relation as people write it."""
        return shown_name(self.model)
