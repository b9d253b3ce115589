"""When a batch may not work at all: something is missing or wrong that only a person can fix."""

from __future__ import annotations

from typing import Literal, get_args

Reason = Literal["no_store", "no_repositories", "flag_unreadable", "installation", "clocks", "schema"]
REASONS: tuple[str, ...] = get_args(Reason)
"""A closed set: labels of metrics and entries of the ledger are made of it."""


class Blocked(Exception):
    """The batch must not go on here; the message is a sentence that says why, and what to do about it.

    It is raised before anything is changed, or between two chunks.  The run ends there without a
    retry: the next tick tries again.
    """

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
