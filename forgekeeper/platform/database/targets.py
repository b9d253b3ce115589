"""How statements delete and change the rows of a relation: by their place in a table, or by their key through a view.

In one table a row is found by its ctid, in a table with partitions or heirs by its tableoid and ctid: no key can then
take more rows than were claimed.  A view that PostgreSQL itself changes may show both as columns of these names, which
is faster than to look for keys again; other views have neither.

An `INSTEAD OF` trigger or a rule, which acts in place of PostgreSQL, may leave a row and report it as deleted.  It is
named here, and the engine looks for the rows again.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from forgekeeper.platform.database import Base, database
from forgekeeper.platform.database.naming import relation_name, shown_name, table_alias

Act = Literal["delete", "update"]
BITS: dict[Act, tuple[int, str, int]] = {"delete": (8, "4", 16), "update": (16, "2", 4)}
"""The bit of `pg_trigger.tgtype`, the value of `pg_rewrite.ev_type` and the bit of `pg_relation_is_updatable` for each
act; bit 64 of the first is ``instead of``."""

# This also reaches views that are only read.  A trigger of theirs makes the engine look for its rows once in vain.
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


class Target(NamedTuple):
    """How rows of the relation of *model* are found again.

    *oid* is PostgreSQL's number of it, None if it is missing.  *is_table* says that it is no view, *is_readable* that
    this role may read all of it, *is_single* that it is one table without heirs, *shows_places* that it is a view with
    the ctid and the tableoid of each row.  *instead* names the triggers and rules that act in place of PostgreSQL.
    """

    model: type[Base]
    oid: int | None = None
    is_table: bool = False
    is_readable: bool = False
    is_single: bool = False
    shows_places: bool = False
    instead: tuple[str, ...] = ()

    @classmethod
    def find(cls, model: type[Base], act: Act = "delete") -> Target:
        """Ask the database; a relation that is missing fails the statement that names it."""
        bit, event, updatable = BITS[act]
        values = {"table": relation_name(model), "bit": bit, "event": event, "updatable": updatable}
        row = database.execute_sql(FIND_TARGET, values).fetchone()
        if row is None:
            return cls(model)
        oid, is_table, is_readable, is_single, shows_places, instead = row
        return cls(model, oid, is_table, is_readable, is_single, shows_places, tuple(instead))

    @property
    def has_places(self) -> bool:
        """Whether tableoid and ctid tell the rows apart; to read them takes the right to read the whole relation."""
        return (self.is_table or (self.shows_places and not self.instead)) and self.is_readable

    @property
    def by_ctid(self) -> bool:
        """Whether a ctid alone is a row."""
        return self.has_places and self.is_single

    @property
    def ctid(self) -> str:
        """The place of a row in its table, in SQL."""
        return f"{table_alias(self.model)}.ctid"

    @property
    def tableoid(self) -> str:
        """The table of a row, in SQL."""
        return f"{table_alias(self.model)}.tableoid"

    @property
    def shown(self) -> str:
        """The relation as people write it."""
        return shown_name(self.model)
