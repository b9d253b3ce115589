"""The relations that batches expect, in a forge's tables, with or without views of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from forgekeeper.platform.database import Base, database, exclusions
from forgekeeper.platform.database.naming import relation_name
from forgekeeper.platform.database.relations import Relation, find_misfits
from forgekeeper.platform.database.relations import read_columns as look_at_relations
from forges.adoption import Adoption, AdoptionRefused, inspect_tables
from forges.common_tables import prefix_statement, write_common_tables
from forges.forgejo.adoption import ADOPTION_CLASS as FORGEJO
from forges.gitlab.adoption import ADOPTION_CLASS as GITLAB

ADOPTION_CLASSES = {"gitlab": GITLAB, "forgejo": FORGEJO, "gitea": FORGEJO}
EXAMPLE_FORGE = "example"
"""Name for tables or views in the form that batches expect."""
SIGN_TABLES = {"gitlab": "namespaces", "forgejo": "action_artifact"}
"""A table of each forge that the example forge lacks."""


class ForgeTables:
    """Access to the expected relations: the tables themselves, or common table expressions."""

    def __init__(self, schema: str, adoption: Adoption | None) -> None:
        self.schema, self.adoption = schema, adoption
        self._common_tables = write_common_tables(adoption) if adoption else {}
        self._left_out = {view: why for why, views in (adoption.left_out if adoption else {}).items() for view in views}

    @property
    def forge_name(self) -> str:
        """Name of the forge, for people."""
        return self.adoption.display_name if self.adoption else "a forge with the tables that forgekeeper expects"

    def has_relation(self, model: type[Base]) -> bool:
        """Check whether the forge has the relation of *model*."""
        return model._meta.table_name in self._common_tables if self.adoption else exclusions.is_visible(model)

    def find_missing_parts(self, relation: Relation) -> Iterator[str]:
        """Yield the parts of a relation that the forge lacks."""
        model = relation.model
        name = model._meta.table_name
        if not self.adoption:
            yield from find_misfits(model, look_at_relations([relation_name(model)]))
        elif not model.optional and name not in self._common_tables:
            yield f"{name}: {self._left_out.get(name, f'{self.adoption.display_name} has no such table')}"

    def fetch_row(self, statement: str, values: Sequence[Any] = ()) -> Any:
        """Return the first row of *statement*."""
        return database.execute_sql(self.write_statement(statement), values).fetchone()

    def write_statement(self, statement: str) -> str:
        """Return *statement* with the common tables that it reads."""
        return prefix_statement(
            statement, {name: text.replace("%", "%%") for name, text in self._common_tables.items()}
        )


def recognize_forge(schema: str, forge: str | None) -> ForgeTables:
    """Return access to the tables in *schema*: tables of *forge*, or of the recognized forge.

    Raises `AdoptionRefused` if the schema lacks the tables of *forge*.
    """
    if forge in ADOPTION_CLASSES:
        adoption = inspect_tables(ADOPTION_CLASSES[forge], schema, "forgekeeper_peek")
        if not adoption.adopted_parts:
            raise AdoptionRefused(
                f"schema {schema} lacks {adoption.display_name}'s tables: name their schema with --tables"
            )
        return ForgeTables(schema, adoption)
    for name, sign in () if forge else SIGN_TABLES.items():
        adoption = inspect_tables(ADOPTION_CLASSES[name], schema, "forgekeeper_peek")
        if sign in adoption.columns and adoption.adopted_parts:
            return ForgeTables(schema, adoption)
    return ForgeTables(schema, None)
