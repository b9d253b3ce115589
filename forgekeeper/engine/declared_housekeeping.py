"""The declaration that follows from `Housekeeping`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from forgekeeper.api.answers import Answer, DueFunction
from forgekeeper.api.batches import Declaration
from forgekeeper.api.housekeeping import Housekeeping
from forgekeeper.api.records import Record
from forgekeeper.engine.housekeeping import HOUSEKEEPING_RECORDS, HousekeepingOutcome, preview_old_records
from forgekeeper.ledger.job_runs import JobRun

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def make_result(_name: str, _answers: Sequence[Answer]) -> type[DataclassInstance]:
    """Return the dataclass for the result of a run."""
    return HousekeepingOutcome


def list_records(_answers: Sequence[Answer]) -> Sequence[Record]:
    """Return how old records are counted."""
    return HOUSEKEEPING_RECORDS


def check_declaration(_declared: Declaration, _answers: Sequence[Answer]) -> None:
    """Accept the declaration: `Housekeeping` has checked itself."""


def complete_declaration(declared: Declaration, answers: Sequence[Answer], _due: DueFunction) -> None:
    """Let the preview count the old records."""
    declared.batch.tables = (*declared.batch.tables, JobRun)
    for answer in answers:
        if isinstance(answer, Housekeeping):
            declared.add_preview(partial(preview_old_records, answer))
