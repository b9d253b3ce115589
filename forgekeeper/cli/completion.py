"""What a shell may complete beside commands and options: names of batches, flags, queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def names_of(names: Iterable[str] | Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return what completes one of *names*, asked when needed; of several with commas between them, the last."""

    def complete(incomplete: str) -> list[str]:
        before, comma, begun = incomplete.rpartition(",")
        known = names() if callable(names) else names
        return [f"{before}{comma}{name}" for name in known if name.startswith(begun)]

    return complete
