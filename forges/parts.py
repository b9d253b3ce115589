"""What is adopted of a forge, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class AdoptedPart(NamedTuple):
    """A file of ``sql/`` that makes *views*; it *needs* these tables with these columns.

    Whatever is done to rows of these views changes rows of the tables *beside* them in the same transaction, if the
    forge has those.  Only forks of the forge have a part that names a table *instead*, which the forge itself has.
    """

    name: str
    views: Sequence[str]
    needs: Mapping[str, str]
    beside: Sequence[str] = ()
    instead: str | None = None
