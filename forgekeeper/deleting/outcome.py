"""How the outcome of a run grows: by fields that its batch has, right after each commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forgekeeper.declaring.answers import Mistake
from forgekeeper.runs.run import Run


def add(outcome: Any, field: str, number: int) -> None:
    """Add to the field, if the outcome has it."""
    if hasattr(outcome, field):
        setattr(outcome, field, getattr(outcome, field) + number)


def note(run: Run[Any], fields: Mapping[str, Any]) -> None:
    """Set fields of the run's outcome; raise `Mistake` for one that it has not."""
    for name, value in fields.items():
        if not hasattr(run.outcome, name):
            raise Mistake(f"{run.batch} notes {name}, which is no field of {type(run.outcome).__name__}")
        setattr(run.outcome, name, value)
