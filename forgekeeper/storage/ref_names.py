"""Which names of refs git may see: the rules of `git check-ref-format`, and ours on top of them."""

from __future__ import annotations

import re
from typing import Literal

LONGEST = 1_024
"""Characters, the limit of the column that names come from."""

# As git has them, in its order: a component begins with a dot or ends with ".lock", two dots,
# what is special to a shell, a revision or a pattern, an empty component, a dot at the end.
# And halves of characters, which have no bytes.
_UNFIT = re.compile(r"/\.|\.lock(?:/|\Z)|\.\.|[\x00-\x20\x7f~^:?*\[\\]|//|/\Z|\.\Z|@\{|[\ud800-\udfff]")


def refusal(name: str) -> Literal["not_under_refs", "too_long", "invalid_name"] | None:
    """Return why git must not see *name*; None if it may.

    `HEAD` and its like are not under `refs/`: git would delete the file, and with it the repository.
    """
    if not name.startswith("refs/"):
        return "not_under_refs"
    if len(name) > LONGEST:
        return "too_long"
    return "invalid_name" if _UNFIT.search(name) else None
