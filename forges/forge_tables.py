"""The relations that batches expect, found in the tables of a forge, whether views of them exist or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from forgekeeper.platform.database import Base, database, exclusions
from forgekeeper.platform.database.naming import relation_name
from forgekeeper.platform.database.relations import Relation, misfits
from forgekeeper.platform.database.relations import look as look_at_relations
from forges.adoption import Adoption, Unfit, look
from forges.common_tables import prefix_statement, write_common_tables
from forges.forgejo.adoption import KIND as FORGEJO
from forges.gitlab.adoption import KIND as GITLAB

KINDS = {"gitlab": GITLAB, "forgejo": FORGEJO, "gitea": FORGEJO}
EXAMPLE = "example"
"""Stands for tables or views that are as the batches expect them."""
SIGNS = {"gitlab": "namespaces", "forgejo": "action_artifact"}
"""A table of each forge that the example has not."""


class ForgeTables:
    """The relations that batches expect, in the tables of a forge: as they are, or by common table expressions."""

    def __init__(self, schema: str, adoption: Adoption | None) -> None:
        self.schema, self.adoption = schema, adoption
        self._common = write_common_tables(adoption) if adoption else {}
        self._left_out = {view: why for why, views in (adoption.left_out if adoption else {}).items() for view in views}

    @property
    def forge(self) -> str:
        """The name of the forge, for people."""
        return self.adoption.shown if self.adoption else "a forge with the tables that forgekeeper expects"

    def has(self, model: type[Base]) -> bool:
        """Say whether the forge has the relation of *model*."""
        return model._meta.table_name in self._common if self.adoption else exclusions.visible(model)

    def find_lacks(self, relation: Relation) -> Iterator[str]:
        """Yield what the forge lacks of a relation that a batch needs."""
        model = relation.model
        name = model._meta.table_name
        if not self.adoption:
            yield from misfits(model, look_at_relations([relation_name(model)]))
        elif not model.optional and name not in self._common:
            yield f"{name}: {self._left_out.get(name, f'{self.adoption.shown} has nothing like it')}"

    def ask(self, statement: str, values: Sequence[Any] = ()) -> Any:
        """Return the first row of what *statement* selects."""
        return database.execute_sql(self.write(statement), values).fetchone()

    def write(self, statement: str) -> str:
        """Return *statement* with the common tables that it reads."""
        return prefix_statement(statement, {name: text.replace("%", "%%") for name, text in self._common.items()})


def recognize_forge(schema: str, forge: str | None) -> ForgeTables:
    """Return how the tables in *schema* are read: as those of *forge*, or of the forge that they look like.

    Raises `Unfit` if the tables of *forge* are not there.
    """
    if forge in KINDS:
        adoption = look(KINDS[forge], schema, "forgekeeper_peek")
        if not adoption.parts:
            raise Unfit(f"schema {schema} lacks {adoption.shown}'s tables: name their schema with --tables")
        return ForgeTables(schema, adoption)
    for name, sign in () if forge else SIGNS.items():
        adoption = look(KINDS[name], schema, "forgekeeper_peek")
        if sign in adoption.columns and adoption.parts:
            return ForgeTables(schema, adoption)
    return ForgeTables(schema, None)
