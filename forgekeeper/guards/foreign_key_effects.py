"""Foreign keys to a batch's rows: they delete or change other rows, or forbid deletion."""

from __future__ import annotations

from collections.abc import Iterator

from forgekeeper.api.batches import BatchSpec
from forgekeeper.platform.database.cascades import Cascades
from forgekeeper.platform.database.foreign_keys import find_foreign_keys
from forgekeeper.platform.database.naming import relation_name
from forgekeeper.platform.database.relations import ColumnsByTable
from forgekeeper.platform.database.targets import TargetRelation

FOLLOWING_SENTENCE = "rows of {table} are {done} with rows of {relation} (foreign key {name}, on delete {action})"
FORBIDDEN_SENTENCE = (
    "foreign key {name} of {table} prevents the deletion of referenced rows of {relation} (on delete {action}): each of"
    " them is put into quarantine until no row references it"
)


def find_undeclared_tables(batch: BatchSpec, tables: ColumnsByTable) -> Iterator[str]:
    """Yield a sentence for each undeclared table whose rows follow rows of *batch*.

    A batch that is not asked before it runs names such tables among its own; its `Rows` are checked at their deletion.
    """
    for target in _find_targets(batch, tables):
        yield from Cascades.find(target, [*batch.tables, *batch.reads]).refusals


def describe_foreign_keys(batch: BatchSpec, tables: ColumnsByTable) -> Iterator[tuple[bool, str]]:
    """Yield a sentence for each foreign key to rows of *batch*; True if it forbids deletion."""
    for target in _find_targets(batch, tables):
        for key in find_foreign_keys(target):
            names = {"name": key.name, "table": key.table_name, "action": key.action, "relation": key.referenced_name}
            if key.changes_rows:
                yield (
                    False,
                    FOLLOWING_SENTENCE.format(done="deleted" if key.action == "cascade" else "changed", **names),
                )
            else:
                yield True, FORBIDDEN_SENTENCE.format(**names)


def _find_targets(batch: BatchSpec, tables: ColumnsByTable) -> Iterator[TargetRelation]:
    for relation in batch.relations:
        if "delete" in relation.needed_privileges("worker") and relation_name(relation.model) in tables:
            yield TargetRelation.find(relation.model)
