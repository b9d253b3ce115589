"""How an outcome grows: what is done is told, whatever becomes of the run."""

from __future__ import annotations

from typing import Any

from forgekeeper.events import OutcomeGrew, emit


class Growth:
    """What the outcome of a batch or child has grown by since that was told last."""

    def __init__(self, batch: str, outcome: Any) -> None:
        self._batch = batch
        self._outcome = outcome
        self._told: dict[str, int] = {}

    def count(self) -> None:
        """Tell it, if it has grown."""
        fields = {name: value for name, value in vars(self._outcome).items() if type(value) is int}
        if fields != self._told:
            grown = {name: value - self._told.get(name, 0) for name, value in fields.items()}
            self._told = fields
            emit(OutcomeGrew(self._batch, grown))
