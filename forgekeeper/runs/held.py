"""When a brake holds a batch: what a run would do is out of proportion, and a person has to look at it first."""

from __future__ import annotations

from forgekeeper.runs.holds import Kind


class Held(Exception):
    """The run must not begin; the message is a sentence with the numbers, and what to do about it.

    It is raised before anything is changed.  The batch is held from then on, until it is released.
    """

    def __init__(self, kind: Kind, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind
