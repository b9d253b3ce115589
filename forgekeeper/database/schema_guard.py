"""Tables that the statements would misread: they would find some rows, and take them for all.

Views are welcome: where the tables are a forge's, views give them the names and columns that
the statements want.  So is a table that is partitioned.  But one partition of it alone, also
behind a view, hides the others: an object that a row there names would look as if no row named it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forgekeeper.database import Base, database

# Each table, and what lies below it where it is a view.
RELATIONS = """
    with recursive reached (name, oid) as (
        select name, to_regclass(name)::oid from unnest(%s::text[]) as name
      union
        select reached.name, below.refobjid
        from reached
            join pg_class as view on view.oid = reached.oid and view.relkind in ('v', 'm')
            join pg_rewrite as rule on rule.ev_class = view.oid
            join pg_depend as below on below.classid = 'pg_rewrite'::regclass and below.objid = rule.oid
                and below.refclassid = 'pg_class'::regclass and below.refobjid <> view.oid
    )
    select name, c.oid::bigint, c.oid::regclass::text, c.relkind::text, c.oid = to_regclass(name)::oid,
        (select inhparent::regclass::text from pg_inherits where inhrelid = c.oid limit 1),
        case when c.relispartition then array(
            select relid::oid::bigint from pg_partition_tree(pg_partition_root(c.oid)) where isleaf
        ) end,
        row_security_active(c.oid)
    from reached join pg_class as c on c.oid = reached.oid
    where c.relkind in ('r', 'p', 'v', 'm', 'f')
"""
# PostgreSQL knows it of a table, not of a view; a valid check says it as well.
NULLABLE = """
    select wanted.name, wanted.key
    from unnest(%s::text[], %s::text[]) as wanted (name, key)
        join pg_class as c on c.oid = to_regclass(wanted.name)::oid and c.relkind in ('r', 'p')
        join pg_attribute as a on a.attrelid = c.oid and a.attname = wanted.key and not a.attisdropped
    where not a.attnotnull and not exists (
        select from pg_constraint as said
        where said.conrelid = c.oid and said.contype = 'c' and said.convalidated and said.conkey = array[a.attnum]
          and pg_get_constraintdef(said.oid) ~* '^check \\(\\(+\\S+ is not null\\)+$'
    )
"""


class _Relation(NamedTuple):
    name: str
    oid: int
    called: str
    kind: str
    itself: bool
    parent: str | None
    leaves: list[int] | None
    filtered: bool


def misread(models: Sequence[type[Base]]) -> Iterator[str]:
    """Yield a sentence for each way in which statements on the tables of *models* would take some rows for all."""
    names = [model._meta.table_name for model in models]
    relations = [_Relation(*row) for row in database.execute_sql(RELATIONS, (names,)).fetchall()]
    for relation in relations:
        reached = {other.oid for other in relations if other.name == relation.name}
        if said := _objection(relation, reached):
            yield said
    keys = [(model._meta.table_name, key) for model in models for key in model.found_by]
    if keys:
        for name, key in database.execute_sql(NULLABLE, tuple(map(list, zip(*keys, strict=True)))).fetchall():
            yield (
                f"column {name}.{key} may be NULL, and rows in which it is are never found: "
                f"`alter table {name} alter column {key} set not null`"
            )


def _objection(relation: _Relation, reached: set[int]) -> str | None:
    table = relation.name
    below = table if relation.itself else f"view {table} is made of {relation.called}, which"
    if relation.leaves is not None and not reached.issuperset(relation.leaves):
        whole = relation.parent
        return (
            f"{below} is one partition of {whole}, whose others would not be seen: put a view of {whole} in its place"
        )
    if relation.leaves is None and relation.parent is not None:
        whole = relation.parent
        return f"{below} inherits from {whole}, whose other rows would not be seen: put a view of {whole} in its place"
    if relation.kind == "m":
        return f"{below} is a materialized view, in which rows stand as they once were: put a plain view in its place"
    if relation.kind == "f":
        return f"{below} is a foreign table, whose rows cannot be locked as the batches do: use the database it lies in"
    if relation.filtered:
        return f"row security hides rows of {relation.called} from this role: grant it bypassrls"
    return None
