"""How the outcome of a run grows: by fields that its batch has, right after each commit."""

from __future__ import annotations

from typing import Any


def add(outcome: Any, field: str, number: int) -> None:
    """Add to the field, if the outcome has it."""
    if hasattr(outcome, field):
        setattr(outcome, field, getattr(outcome, field) + number)
