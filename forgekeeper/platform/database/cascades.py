"""Rows that foreign keys delete or change together with a relation's rows, and the counts.

A row whose foreign key is unique follows at most one row, and is a part of that row: its table has to be declared, and
it is not counted.  All other rows are counted by one recursive common table.  The keys may use several tables or
columns, stay within one table, or form a circle.  In that common table a row is an array of texts: its key, and the
columns to which other keys lead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forgekeeper.platform.database import Base
from forgekeeper.platform.database.common_tables import CommonTable, write_statement
from forgekeeper.platform.database.foreign_keys import (
    ForeignKey,
    find_deletion_tables,
    find_foreign_keys,
    list_tables_below,
)
from forgekeeper.platform.database.naming import name_parts, quote_name, relation_name, shown_name, table_alias
from forgekeeper.platform.database.relations import read_columns
from forgekeeper.platform.database.targets import TargetRelation

SELECT_CASCADED = """
        select key, 0, own from {first}
      union
        select cascaded.root, found.node, found.row from cascaded, lateral (
            {steps}
        ) as found (node, row)
    """
SELECT_FOLLOWERS = "select {below}, {row} from {relation} as linked where cascaded.node = {above}{linked}"
UNDECLARED_MESSAGE = (
    "rows of {table} are {done} with rows of {relation} (foreign key {name}, on delete {action}), but are not"
    " counted: {cure}"
)
DECLARE_CURE = "add the model of {table} to cascades_to= of the Rows of {relation}"
VIEW_CURE = "its model's relation {hidden} is missing: create that view, as `forgekeeper adopt` does"
MISSING_COLUMN_MESSAGE = (
    "{relation} lacks column {column}, which foreign key {name} of {table} uses: add the column to the view"
)


@dataclass(frozen=True)
class Link:
    """A foreign key from the model *below* to the model *above*, both as indexes of a list."""

    above: int
    below: int
    key: ForeignKey


@dataclass(frozen=True)
class Cascades:
    """The rows of *models* that follow a deletion from ``models[0]``; *links* are counted.

    *refused* has a sentence for each foreign key that is not declared, or whose rows cannot be counted.
    """

    models: Sequence[type[Base]]
    links: Sequence[Link] = ()
    refusals: Sequence[str] = ()
    deleted_tables: Sequence[int] = ()
    """The oids of the tables whose deleted rows are counted."""
    _types: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def find(cls, target: TargetRelation, declared_models: Sequence[type[Base]] = ()) -> Cascades:
        """Find the foreign keys whose rows follow; only rows of *declared_models* may follow."""
        model = target.model
        models = (model, *(one for one in declared_models if one is not model))
        keys = [key for key in find_foreign_keys(target) if key.changes_rows]
        if not keys:
            return cls(models)
        tables = list_tables_below([relation_name(one) for one in models[1:]], own=find_deletion_tables(target))
        links, refused = list[Link](), list[str]()
        for key in keys:
            above, below = _find_place(key.referenced_table, tables), _find_place(key.table, tables)
            if above is None:
                continue  # the table above is refused already
            if below is None or (below == 0 and model not in declared_models):
                hidden = [one for one, found in zip(models, tables, strict=True) if not found]
                refused.append(_describe_undeclared(target, key, hidden))
            else:
                links.append(Link(above, below, key))
        counted = _counted_links(links)
        types = {name: {each: one.type for each, one in found.items()} for name, found in _read_columns(models).items()}
        refused += _find_uncountable(models, counted, types)
        deleted = [tables[link.below] for link in counted if link.key.action == "cascade"]
        return cls(models, counted, refused, sorted(tables[0].union(*deleted)), types)

    def row_sql(self, place: int, alias: str) -> str:
        """Return the SQL of a model's row, as an array in ``cascaded``."""
        return f"array[{', '.join(f'{alias}.{quote_name(name)}::text' for name in self._carried_columns(place))}]"

    @property
    def own_row_sql(self) -> str:
        """The SQL of a row of the relation itself."""
        return self.row_sql(0, table_alias(self.models[0]))

    def value_sql(self, place: int, name: str, row: str = "row") -> str:
        """Return the SQL of a column's value in *row*."""
        kind = self._types[relation_name(self.models[place])][name]
        return f"({row}[{self._carried_columns(place).index(name) + 1}])::{kind}"

    def key_columns(self, place: int) -> list[str]:
        """Return the columns of a model's key."""
        return [one.column_name for one in self.models[place]._meta.get_primary_keys()]

    @property
    def follower_verbs(self) -> dict[int, str]:
        """The places of models whose rows are counted, each with the verb for them: deleted or changed."""
        found: dict[int, str] = {}
        for link in self.links:
            done = "deleted" if link.key.action == "cascade" else "changed"
            found[link.below] = "deleted" if "deleted" in (done, found.get(link.below)) else done
        return found

    def find_followers(self, first: str) -> CommonTable:
        """Return the common table ``cascaded``: the rows of the table *first*, and the rows that follow each."""
        steps = "\n            union all\n            ".join(map(self._select_step, self.links))
        query = SELECT_CASCADED.format(first=first, steps=steps)
        return CommonTable("cascaded (root, node, row)", query, is_recursive=True)

    def count_statement(self, key: str, where: str, *, limit: str = "") -> str:
        """Return the statement that counts, by model, the rows of a condition and their followers."""
        due = f"select {key} as key, {self.own_row_sql} as own from {relation_name(self.models[0])} where {where}"
        found = f"select distinct node, row from cascaded{f' limit {limit}' if limit else ''}"
        count = f"select node, count(*) from ({found}) as found group by node"
        return write_statement([CommonTable("due", due), self.find_followers("due")], count)

    def _select_step(self, link: Link) -> str:
        pairs = zip(link.key.columns, link.key.referenced_columns, strict=True)
        value = {to: self.value_sql(link.above, to, "cascaded.row") for to in link.key.referenced_columns}
        linked = "".join(f" and linked.{quote_name(column)} = {value[to]}" for column, to in pairs)
        names = {"above": link.above, "below": link.below, "row": self.row_sql(link.below, "linked")}
        return SELECT_FOLLOWERS.format(relation=relation_name(self.models[link.below]), linked=linked, **names)

    def _carried_columns(self, place: int) -> list[str]:
        led_to = [name for link in self.links if link.above == place for name in link.key.referenced_columns]
        return list(dict.fromkeys([*self.key_columns(place), *led_to]))


def _find_place(oid: int, tables: Sequence[set[int]]) -> int | None:
    # The model of a declared table takes precedence over the relation itself, whose view may read the table, too.
    return next((place for place in (*range(1, len(tables)), 0) if oid in tables[place]), None)


def _counted_links(links: Sequence[Link]) -> list[Link]:
    """Leave out links of parts of rows.

    A part follows a row at most once, and its table lacks other counted rows and counted followers.
    """
    left = list(links)
    while parts := [one for one in left if _is_part(one, left)]:
        left = [one for one in left if one not in parts]
    return left


def _is_part(link: Link, links: Sequence[Link]) -> bool:
    beside = [one for one in links if one.below == link.below]
    return all(one.key.is_unique for one in beside) and all(one.above != link.below for one in links)


def _read_columns(models: Sequence[type[Base]]) -> Any:
    return read_columns([relation_name(model) for model in models])


def _describe_undeclared(target: TargetRelation, key: ForeignKey, hidden: Sequence[type[Base]]) -> str:
    """Return a sentence, with the cure, for undeclared rows that would follow.

    *hidden* has the models whose relation the session does not find.
    """
    named = key.table_name.rpartition(".")[2].strip('"')
    shown = next((shown_name(model) for model in hidden if name_parts(model)[1] == named), None)
    names = {"table": key.table_name, "relation": target.display_name, "name": key.name, "action": key.action}
    cure = DECLARE_CURE.format(**names) if shown is None else VIEW_CURE.format(hidden=shown)
    return UNDECLARED_MESSAGE.format(done="deleted" if key.action == "cascade" else "changed", cure=cure, **names)


def _find_uncountable(
    models: Sequence[type[Base]], links: Sequence[Link], types: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    for link in links:
        for place, columns in ((link.above, link.key.referenced_columns), (link.below, link.key.columns)):
            there = types.get(relation_name(models[place]), {})
            for column in columns:
                if column not in there:
                    names = {"relation": shown_name(models[place]), "name": link.key.name}
                    yield MISSING_COLUMN_MESSAGE.format(column=column, table=link.key.table_name, **names)
