"""What a shell may complete beside commands and options: names of batches, flags, queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def names_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Return what completes one of *names*; of several with commas between them, the last."""

    def complete(incomplete: str) -> list[str]:
        before, comma, begun = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(begun)]

    return complete
