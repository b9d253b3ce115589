"""Children that a batch sends, each with a share of what is due; how that is done is the delivery's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from forgekeeper.declaring.answers import Answer

Keyed = tuple[str, tuple[Any, ...]]
"""A message's key and the child's arguments: ids, as JSON has them."""


@dataclass(frozen=True)
class Enqueued:
    """How many were put in, how many were on their way already or skipped by a hook, and whether we stopped early."""

    enqueued: int = 0
    deduplicated: int = 0
    queue_full: bool = False


@dataclass(frozen=True)
class Children(Answer):
    """A message to *child* for each of *of*, unless one with its key is on its way already.

    *of* are ids, one a child, or tuples of arguments as JSON has them; or a mapping of keys to such tuples, for
    children whose arguments are not unique.  A child does what is due when it runs: to send it twice is
    harmless, and to lose it costs time alone, since the next run sends it again.

    *sent* names the field of the result that counts them, *all_of* one that counts those on their way, too.
    """

    child: Any
    of: Iterable[Any] | Mapping[str, tuple[Any, ...]]
    _: KW_ONLY
    sent: str = "children_enqueued"
    all_of: str | None = None

    def calls(self) -> Iterator[Keyed]:
        """Yield the key and the arguments of each."""
        if isinstance(self.of, Mapping):
            pairs: Iterable[Keyed] = self.of.items()
        else:
            tuples = (one if isinstance(one, tuple) else (one,) for one in self.of)
            pairs = ((":".join(map(str, arguments)), arguments) for arguments in tuples)
        for key, arguments in pairs:
            yield f"{self.child.name}:{key}", arguments
