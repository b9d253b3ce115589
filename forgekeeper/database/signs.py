"""How forges give themselves away, and what to know of them then; `forges` declares it, the engine names none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from forgekeeper.database import database

PRESENT = "select count(distinct relname) = cardinality(%(names)s) from pg_class where relname = any(%(names)s)"


class Forge(NamedTuple):
    """A kind of forge, which a database has where *relations* are in any schema of it; then `check` gives *advice*.

    A table with a trigger of a function among *refusing* is none to work on, for the reason given.  *objections* says
    what is wrong with views of its tables in a schema.
    """

    relations: Sequence[str]
    advice: str
    refusing: Mapping[str, str]
    objections: Callable[[str], Iterable[str]] = lambda _schema: ()


FORGES: dict[str, Forge] = {}
"""Every forge that is known, by its name."""


def advice() -> Iterator[str]:
    """Yield what is to be known of the forges whose tables this database has."""
    for forge in FORGES.values():
        if database.execute_sql(PRESENT, {"names": list(forge.relations)}).fetchone()[0]:
            yield forge.advice


def objections(schema: str) -> Iterator[str]:
    """Yield what is wrong with the views in that *schema*, and what to do."""
    for forge in FORGES.values():
        yield from forge.objections(schema)


def refusal(functions: Collection[str]) -> str | None:
    """Say why no batch may work on a table whose triggers call these functions."""
    known = {name: why for forge in FORGES.values() for name, why in forge.refusing.items()}
    return next((known[name] for name in functions if name in known), None)
