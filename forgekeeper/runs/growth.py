"""How an outcome grows: what is done is counted at once, whatever becomes of the run."""

from __future__ import annotations

from typing import Any

from forgekeeper.events import OutcomeGrew, emit


class Growth:
    """What the outcome of a batch or child has grown by since it was last counted."""

    def __init__(self, batch: str, outcome: Any) -> None:
        self._batch = batch
        self._outcome = outcome
        self._counted: dict[str, int] = {}

    def count(self) -> None:
        """Count by how much it has grown, if it has."""
        fields = {name: value for name, value in vars(self._outcome).items() if type(value) is int}
        if fields != self._counted:
            grown = {name: value - self._counted.get(name, 0) for name, value in fields.items()}
            self._counted = fields
            emit(OutcomeGrew(self._batch, grown))
