"""Findings of `check` about views that the command `adopt` has created."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from forgekeeper.platform.database import database
from forges.templates import write_version_comment

if TYPE_CHECKING:
    from forges.adoption import Adoption

# The first version wrote no comment.
SELECT_VIEWS_COMMENT = """
    select coalesce(obj_description(n.oid, 'pg_namespace'), '') from pg_namespace as n
    where nspname = %(schema)s and case when obj_description(n.oid, 'pg_namespace') is null
        then exists (select from pg_proc where pronamespace = n.oid and proname = %(function)s)
        else obj_description(n.oid, 'pg_namespace') like 'made by forgekeeper adopt ' || %(forge)s || ',%%' end
"""


class AdoptedForge(NamedTuple):
    """A forge: its names in commands and in sentences, and a function that all adoptions have."""

    forge: str
    display_name: str
    marker_function: str

    def is_adopted(self, schema: str) -> bool:
        """Check whether `adopt` created the views in that schema, for this forge."""
        return self._find_comment(schema) is not None

    def report_outdated_views(self, schema: str) -> Iterator[str]:
        """Yield a sentence if `adopt` would now create the existing views differently."""
        if (comment := self._find_comment(schema)) is None:
            return
        again = f"run `forgekeeper adopt {self.forge}` again, as the owner of {self.display_name}'s tables"
        if not comment.startswith(write_version_comment(self.forge)):
            yield f"the views in schema {schema} are of another version, and may do less or allow more: {again}"
        elif comment != self._inspect_tables(schema, comment).schema_comment:
            yield f"{self.display_name}'s tables have changed since the views in schema {schema} were created: {again}"

    def report_missing_indexes(self, schema: str) -> Iterator[str]:
        """Yield a sentence about missing indexes below the views of that schema."""
        found = self._inspect_tables(schema, self._find_comment(schema) or "")
        if statements := list(found.find_missing_indexes()):
            yield (
                f"statements will be slow until you create the indexes that `forgekeeper adopt {self.forge} --print`"
                f" ends with; the first of the {len(statements)} statements is `{statements[0].rstrip(';')}`"
            )

    def _find_comment(self, schema: str) -> str | None:
        values = {"schema": schema, "function": self.marker_function, "forge": self.forge}
        row = database.execute_sql(SELECT_VIEWS_COMMENT, values).fetchone()
        return None if row is None else str(row[0])

    def _inspect_tables(self, schema: str, comment: str) -> Adoption:
        # Imported here, because it imports models, which only the settings may do.
        adoption = import_module("forges.adoption")
        kind = import_module(f"forges.{self.forge}.adoption").ADOPTION_CLASS
        found: Adoption = adoption.inspect_tables(kind, comment.rpartition(", of ")[2] or "public", schema)
        return found
