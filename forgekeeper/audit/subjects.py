"""What people may ask the audit about, by names of their own: batches declare it (`BatchSpec.audited`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Subject(NamedTuple):
    """Something that a batch deletes: ``CALLED:ID``, or ``CALLED:WITHIN:NAME`` where it has no id that people know.

    *name* is the column of the audit's detail that has its name, *within* the one that has whose name it is; without
    a *record* it is any that has such a name.  *because* is why it was due, a sentence's end over the detail's
    columns; *restore* is what brings it back, over the same and ``id``.  *gone* is what has happened to it, *done* the
    same in a word.
    """

    called: str
    argument: str
    record: str | None
    batch: str | None = None
    name: str | None = None
    within: str | None = None
    gone: str = "was deleted"
    done: str = "deleted"
    because: str = ""
    restore: str = ""

    @property
    def usage(self) -> str:
        """How it is asked for."""
        return f"{self.called}:{self.argument}"


PATH = Subject("path", "[LOCATION:]PATH", None, name="path", within="location")
"""Whatever lay there; every batch that deletes objects says so with their paths."""


class NoSuchSubject(Exception):
    """Nothing is called that; the message lists what is."""


def subject_of(record: str, kinds: Iterable[Subject]) -> Subject | None:
    """Return what people call records of that kind."""
    return next((one for one in kinds if one.record == record), None)


def read(text: str, kinds: Iterable[Subject]) -> tuple[Subject, str]:
    """Read ``CALLED:…``; return the kind and the rest, raise `NoSuchSubject` for what is not declared."""
    known = [*kinds, PATH]
    called, _, rest = text.partition(":")
    found = next((one for one in known if one.called == called), None)
    if found is None or not rest:
        raise NoSuchSubject(
            f"{text!r} is nothing that the audit knows; ask for {', '.join(one.usage for one in known)}"
        )
    return found, rest
