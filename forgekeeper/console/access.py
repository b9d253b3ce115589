"""Who looks, and what that person may do."""

from __future__ import annotations

from typing import Literal, NamedTuple

Role = Literal["viewer", "operator"]


class Person(NamedTuple):
    """Who looks at a page; an *operator* may act."""

    name: str
    role: Role
