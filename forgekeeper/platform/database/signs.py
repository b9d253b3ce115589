"""How forges give themselves away, and what to know of them then; `forges` declares it, the engine names none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from forgekeeper.platform.database import database

PRESENT = "select count(distinct relname) = cardinality(%(names)s) from pg_class where relname = any(%(names)s)"


class Forge(NamedTuple):
    """A kind of forge, which a database has where *relations* are in any schema of it; then `check` gives *advice*.

    A table with a trigger of a function among *refusing* must not be worked on, for the reason given.  *is_adopted*
    says whether its tables have views in a schema that the command `adopt` has made; *objections* says what is wrong
    with these, and *hints* what their statements lack to be quick.
    """

    relations: Sequence[str]
    advice: str
    refusing: Mapping[str, str]
    is_adopted: Callable[[str], bool] = lambda _schema: False
    objections: Callable[[str], Iterable[str]] = lambda _schema: ()
    hints: Callable[[str], Iterable[str]] = lambda _schema: ()


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


def is_adopted(schema: str) -> bool:
    """Say whether the views in that *schema* were made by the command `adopt`."""
    return any(forge.is_adopted(schema) for forge in FORGES.values())


def hints(schema: str) -> Iterator[str]:
    """Yield what the statements on adopted views in that *schema* lack to be quick."""
    for forge in FORGES.values():
        if forge.is_adopted(schema):
            yield from forge.hints(schema)


def refusal(functions: Collection[str]) -> str | None:
    """Say why no batch may work on a table whose triggers call these functions."""
    known = {name: why for forge in FORGES.values() for name, why in forge.refusing.items()}
    return next((known[name] for name in functions if name in known), None)
