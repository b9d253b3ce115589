"""The relations that batches expect, in a forge's tables, with or without views of them."""

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
"""Name for tables or views in the form that batches expect."""
SIGNS = {"gitlab": "namespaces", "forgejo": "action_artifact"}
"""A table of each forge that the example forge lacks."""


class ForgeTables:
    """Access to the expected relations: the tables themselves, or common table expressions."""

    def __init__(self, schema: str, adoption: Adoption | None) -> None:
        self.schema, self.adoption = schema, adoption
        self._common = write_common_tables(adoption) if adoption else {}
        self._left_out = {view: why for why, views in (adoption.left_out if adoption else {}).items() for view in views}

    @property
    def forge(self) -> str:
        """Name of the forge, for people."""
        return self.adoption.shown if self.adoption else "a forge with the tables that forgekeeper expects"

    def has(self, model: type[Base]) -> bool:
        """Check whether the forge has the relation of *model*."""
        return model._meta.table_name in self._common if self.adoption else exclusions.visible(model)

    def find_lacks(self, relation: Relation) -> Iterator[str]:
        """Yield the parts of a relation that the forge lacks."""
        model = relation.model
        name = model._meta.table_name
        if not self.adoption:
            yield from misfits(model, look_at_relations([relation_name(model)]))
        elif not model.optional and name not in self._common:
            yield f"{name}: {self._left_out.get(name, f'{self.adoption.shown} has nothing like it')}"

    def ask(self, statement: str, values: Sequence[Any] = ()) -> Any:
        """Return the first row of *statement*."""
        return database.execute_sql(self.write(statement), values).fetchone()

    def write(self, statement: str) -> str:
        """Return *statement* with the common tables that it reads."""
        return prefix_statement(statement, {name: text.replace("%", "%%") for name, text in self._common.items()})


def recognize_forge(schema: str, forge: str | None) -> ForgeTables:
    """Return access to the tables in *schema*: tables of *forge*, or of the recognized forge.

    Raises `Unfit` if the schema lacks the tables of *forge*.
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
