"""Signs that identify forges, with advice; the package `forges` declares them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from forgekeeper.platform.database import database

SELECT_ARE_PRESENT = (
    "select count(distinct relname) = cardinality(%(names)s) from pg_class where relname = any(%(names)s)"
)


class Forge(NamedTuple):
    """A kind of forge, recognized by *relations* in any schema; `check` then gives *advice*.

    No batch may work on a table whose trigger calls a function of *refusing*, which has the reasons.  *is_adopted*
    returns whether a schema has views of the command `adopt`.  *objections* yields the faults of these views, and
    *hints* the reasons why statements on them are slow.
    """

    relations: Sequence[str]
    advice: str
    refusing: Mapping[str, str]
    is_adopted: Callable[[str], bool] = lambda _schema: False
    objections: Callable[[str], Iterable[str]] = lambda _schema: ()
    hints: Callable[[str], Iterable[str]] = lambda _schema: ()


known_forges: dict[str, Forge] = {}
"""Every known forge, by its name."""


def list_advice() -> Iterator[str]:
    """Yield the advice for the forges whose tables this database has."""
    for forge in known_forges.values():
        if database.execute_sql(SELECT_ARE_PRESENT, {"names": list(forge.relations)}).fetchone()[0]:
            yield forge.advice


def find_objections(schema: str) -> Iterator[str]:
    """Yield a sentence, with its cure, for each fault of the views in *schema*."""
    for forge in known_forges.values():
        yield from forge.objections(schema)


def is_adopted(schema: str) -> bool:
    """Return whether the command `adopt` created the views in *schema*."""
    return any(forge.is_adopted(schema) for forge in known_forges.values())


def find_hints(schema: str) -> Iterator[str]:
    """Yield the reasons why statements on adopted views in *schema* are slow."""
    for forge in known_forges.values():
        if forge.is_adopted(schema):
            yield from forge.hints(schema)


def why_refused(functions: Collection[str]) -> str | None:
    """Return why no batch may work on a table whose triggers call *functions*, None if it may."""
    known = {name: why for forge in known_forges.values() for name, why in forge.refusing.items()}
    return next((known[name] for name in functions if name in known), None)
