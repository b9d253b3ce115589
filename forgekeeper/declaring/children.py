"""Children that a batch sends: each takes a share of what is due."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from forgekeeper.declaring.answers import Answer, Mistake

Calls = Mapping[str, tuple[Any, ...]]


class Children(Answer):
    """A message to *child* for each of *of*, unless one with its key is on its way already.

    *of* are ids, one a child, or tuples of arguments as JSON has them; or a mapping of keys to such tuples, for
    children whose arguments are not unique.  A child does what is due when it runs: to send it twice is
    harmless, and to lose it costs time alone, since the next run sends it again.

    *sent* names the field of the result that counts them, *all_of* one that counts those on their way, too; *page* of
    them go at a time.
    """

    def __init__(
        self,
        child: Any,
        of: Iterable[Any] | Calls,
        *,
        sent: str = "children_enqueued",
        all_of: str | None = None,
        page: int = 100,
    ) -> None:
        if page < 1:
            raise Mistake(f"Children: a page has one child at least, not {page}")
        self.child = child
        self.of = of
        self.sent = sent
        self.all_of = all_of
        self.page = page

    def calls(self) -> Iterable[tuple[str, tuple[Any, ...]]]:
        """Yield the key and the arguments of each."""
        pairs = self.of.items() if isinstance(self.of, Mapping) else ((self._key(one), one) for one in self.of)
        for key, arguments in pairs:
            yield f"{self.child.name}:{key}", arguments if isinstance(arguments, tuple) else (arguments,)

    def _key(self, arguments: Any) -> str:
        return ":".join(map(str, arguments)) if isinstance(arguments, tuple) else str(arguments)
