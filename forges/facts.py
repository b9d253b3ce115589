"""Facts about a forge for `docs/forges.md`: its artifacts, and its limits."""

from __future__ import annotations

from typing import NamedTuple


class ForgeFacts(NamedTuple):
    """Facts about a forge, in words for the table of `docs/forges.md`."""

    artifacts: str
    locks: str
    sizes: str
    kept: str
    other_batches: str
    flags: str
    times: str
    left_to_the_forge: str
    not_adopted: str


FACT_LABELS = ForgeFacts(
    artifacts="artifacts",
    locks="locks of artifacts",
    sizes="sizes of projects",
    kept="kept from another's deletion",
    other_batches="refs, statuses, imports",
    flags="flags",
    times="times",
    left_to_the_forge="left to the forge",
    not_adopted="not adopted",
)
"""Labels of the facts, one for each row of the table."""
