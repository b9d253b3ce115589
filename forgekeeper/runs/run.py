"""A run as its batch sees it: what it may use, what it has come to, and until when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Generic

from forgekeeper.audit.deletions import Audit
from forgekeeper.batches import ChildSpec, Declared, Outcome
from forgekeeper.coordination.leases import Lease
from forgekeeper.database import now
from forgekeeper.declaring.answers import Enqueued, Keyed, Mistake
from forgekeeper.failpoints import failpoint
from forgekeeper.runs.bad_records import BadRecords, Still
from forgekeeper.runs.brakes import Brakes, Deadline
from forgekeeper.settings import Settings


class Run(Generic[Outcome]):
    """A run of a batch, or of a child.

    Its *outcome* grows with each chunk, right after the commit: what it holds was done, whatever becomes of the run.
    *deadline* ends with the budget of its declaration; *number* is its row's, or that of the run that sent the child.
    *audit* is where it says what it deletes, *brakes* say how much may go.
    *lease* is what a child holds, alone, of what it works on.
    A child sets *more* where it has left something for its successor; a batch sets *skipped* to why it did nothing.
    """

    def __init__(
        self,
        declared: Declared,
        settings: Settings,
        *,
        outcome: Outcome,
        deadline: Deadline,
        number: int | None = None,
        audit: Audit | None = None,
        brakes: Brakes | None = None,
        fan_out: Callable[[ChildSpec, Sequence[Keyed]], Enqueued] | None = None,
    ) -> None:
        self.declared = declared
        self.batch = declared.name
        self.settings = settings
        self.outcome = outcome
        self.deadline = deadline
        self.number = number
        self.audit = audit or Audit(declared.batch.name, on=settings.audits(declared.batch.name), run=number)
        self.more = False
        self.skipped: str | None = None
        self.lease: Lease | None = None
        self.brakes = brakes or Brakes(declared, settings, outcome, number)
        self._fan_out = fan_out

    @cached_property
    def now(self) -> datetime:
        """PostgreSQL's time, asked once a run: what is due then is due throughout."""
        return now()

    def add(self, field: str, number: int) -> None:
        """Let a field of the outcome grow, if it has that."""
        if hasattr(self.outcome, field):
            setattr(self.outcome, field, getattr(self.outcome, field) + number)

    def note(self, fields: Mapping[str, Any]) -> None:
        """Set fields of the outcome; raise `Mistake` for one that it has not."""
        for name, value in fields.items():
            if not hasattr(self.outcome, name):
                raise Mistake(f"{self.batch} notes {name}, which is no field of {type(self.outcome).__name__}")
            setattr(self.outcome, name, value)

    def step(self, name: str) -> None:
        """Say that the step *name* has been taken: there is a failpoint."""
        failpoint(f"{self.batch}.{name}")

    def bad_records(self, record: str, still: Still) -> BadRecords:
        """Return the bad records of a kind, to be passed over; see `BadRecords`."""
        counted = any(one.name == record and "database" in one.errors for one in self.declared.records)
        return BadRecords(self.batch, record, self.deadline, still, counted=counted)

    def fan_out(self, child: ChildSpec, keyed_args: Sequence[Keyed]) -> Enqueued:
        """Send *child* a message for each pair of id and arguments, unless it is on its way already."""
        assert self._fan_out is not None, f"{self.batch} has no children"
        return self._fan_out(child, keyed_args)
