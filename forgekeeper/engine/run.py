"""One run of a batch or child: its resources, its result so far, and its bad records.

A chunk is processed as a whole.  If a record raises, each record of the chunk is processed alone.  The bad record is
passed over until the run ends, and if it fails again for a while that grows.  It does not stop other records;
`forgekeeper quarantine` shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Generic, Self, TypeAlias, TypeVar, cast

import peewee as pw
import structlog

from forgekeeper.api.answers import EnqueueCounts, KeyedArguments, Mistake
from forgekeeper.api.batches import ChildSpec, Declaration, OutcomeType
from forgekeeper.audit.deletions import Audit
from forgekeeper.engine import record_counts
from forgekeeper.engine.shared_work import Read, SharedWork
from forgekeeper.guards.deadline import Deadline
from forgekeeper.guards.run_guard import RunGuard
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.retry_delays import MAX_BAD_RECORDS_OF_KIND, MAX_FAILED_RECORDS_IN_RUN
from forgekeeper.platform.coordination.leases import Lease
from forgekeeper.platform.database import is_connected, now, sqlstate
from forgekeeper.platform.database.queries import filter_keys
from forgekeeper.platform.database.survey import QUERY_CANCELED
from forgekeeper.platform.failpoints import failpoint
from forgekeeper.platform.settings import Settings
from metrics.logs import describe_error

MAX_OVERTIME_SECONDS = 20.0
"""Seconds beyond its budget that a run may try records alone.

Without them the run might never reach the record that it waits for.
"""

SERVER_ERROR_CLASSES = {"08", "25", "26", "28", "3D", "53", "57", "58", "F0", "XX"}
"""SQLSTATE classes of errors of the server, of the session, or of the whole database."""
STATEMENT_ERROR_CLASSES = {"0A", "42", "55"}
"""SQLSTATE classes of errors of a statement.

If PostgreSQL reports a context, as at a locked row or in a trigger of the forge, a record may be to blame.
"""
RECORD_ERRORS = (pw.PeeweeException, ValueError)
"""Exceptions that a record may cause.

These are PostgreSQL's, and errors of values that Python cannot read or write.
"""

ItemPlace = TypeVar("ItemPlace")
ChunkWork = Callable[[Sequence[int] | None], ItemPlace]
StillDue: TypeAlias = "Callable[[Sequence[int]], set[int]] | pw.ModelSelect[Any]"

log = structlog.get_logger(__name__)


class Run(Generic[OutcomeType]):
    """A run of a batch, or of a child.

    Its *outcome* grows right after the commit of each chunk: it counts finished work, even if the run fails.
    *deadline* ends with the budget of its declaration.  *number* is the id of its row, or of the run that sent the
    child.  *audit* records its deletions, *guard* limits them, and *lease* is a child's exclusive claim.  *shared* is
    the work that a child shares with the other children of its message; None of a batch's run.  A child sets
    *has_more_work* if it has left work for its successor.  A batch sets *skipped* to the reason why it did nothing.
    """

    def __init__(
        self,
        declared: Declaration,
        settings: Settings,
        *,
        outcome: OutcomeType | None = None,
        deadline: Deadline | None = None,
        number: int | None = None,
        audit: Audit | None = None,
        fan_out: Callable[..., EnqueueCounts] | None = None,
        shared: SharedWork | None = None,
    ) -> None:
        self.declared = declared
        self.batch = declared.name
        self.settings = settings
        self.outcome = cast("OutcomeType", outcome or declared.outcome())
        self.deadline = deadline or Deadline(declared.budget)
        self.number = number
        self.audit = audit or Audit(declared.batch.name, on=settings.is_audited(declared.batch.name), run=number)
        self.has_more_work = False
        self.skipped: str | None = None
        self.lease: Lease | None = None
        self.shared = shared
        self.guard = (
            shared.guard.continue_with(self.outcome) if shared else RunGuard(declared, settings, self.outcome, number)
        )
        self._fan_out = fan_out

    @cached_property
    def now(self) -> datetime:
        """PostgreSQL's time, read once per run: the same records are due throughout."""
        return self.read_once("now", now)

    def read_once(self, name: str, read: Callable[[], Read]) -> Read:
        """Return the answer of *read*, which is called once for all children of a message."""
        return self.shared.read_once(name, read) if self.shared else read()

    @property
    def shared_ids(self) -> list[int]:
        """The first id of each child of the message."""
        assert self.shared is not None, f"{self.batch} is a batch: only a child's run has a message"
        return self.shared.ids

    def add_to_result(self, field: str, number: int) -> None:
        """Add *number* to a field of the outcome, if the outcome has the field."""
        if hasattr(self.outcome, field):
            setattr(self.outcome, field, getattr(self.outcome, field) + number)

    def set_result_fields(self, fields: Mapping[str, Any]) -> None:
        """Set fields of the outcome; raise `Mistake` for a field that it lacks."""
        for name, value in fields.items():
            if not hasattr(self.outcome, name):
                raise Mistake(f"{self.batch} sets the field {name}, which {type(self.outcome).__name__} lacks")
            setattr(self.outcome, name, value)

    def reach_failpoint(self, name: str) -> None:
        """Execute the failpoint of the finished step *name*."""
        failpoint(f"{self.batch}.{name}")

    def bad_records(self, record: str, still_due: StillDue) -> BadRecords:
        """Return the bad records of a kind, to be passed over; see `BadRecords`."""
        return BadRecords(self, record, still_due)

    def fan_out(self, child: ChildSpec, keyed_args: Sequence[KeyedArguments], *, per_message: int = 1) -> EnqueueCounts:
        """Send *child* a message for each *per_message* pairs of id and arguments, unless they are on their way."""
        assert self._fan_out is not None, f"{self.batch} has no children"
        return self._fan_out(child, keyed_args, per_message=per_message)


class TooManyBadRecords(Exception):
    """More failed records than a run or a kind may have: something else must be wrong."""


class BadRecords:
    """The bad records of a kind in one run, which leaves out their *keys*.

    *still_due* returns the keys, among some keys, that a run would still process, or selects all such rows: other
    records are forgotten.  *failed* counts records that failed in this run, *error* is the last error.  Metrics count
    them only if the record's declaration names errors of the database.
    """

    def __init__(self, run: Run[Any], record: str, still_due: StillDue) -> None:
        self.failed = 0
        self.error: Exception | None = None
        self._refused = 0
        self._batch, self._record = run.batch, record
        self._deadline = run.deadline
        self._is_counted = any(one.name == record and "database" in one.errors for one in run.declared.records)
        self._find_still_due = partial(filter_keys, still_due) if isinstance(still_due, pw.ModelSelect) else still_due
        known = run.read_once(f"bad {record}", partial(quarantine.find_bad_keys, self._batch, record))
        self._quarantined_keys = set(known)
        self.keys = {key for key, waits in known.items() if waits}

    def __enter__(self) -> Self:
        """Begin a run."""
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        """End the run: forget records that are no longer due, unless the run failed."""
        if error is None and self._quarantined_keys:
            gone = self._quarantined_keys - self._find_still_due(sorted(self._quarantined_keys))
            quarantine.forget_failures(self._batch, self._record, map(str, gone))

    def process_chunk(
        self, work: ChunkWork[ItemPlace | None], places: Callable[[], Sequence[ItemPlace]]
    ) -> ItemPlace | None:
        """Process the next chunk; return its last place, or None if *work* finds no record.

        *work* has a transaction of its own, and returns the last place that it has processed.  If a record raises,
        *work* is repeated for the record of each of *places* alone, and the last of these places is returned.  A place
        is a key, or ends with a key.
        """
        try:
            return work(None)
        except RECORD_ERRORS as error:
            if not is_record_error(error):
                raise
        found = places()
        keys: list[Any] = [place[-1] if isinstance(place, tuple) else place for place in found]
        self._work_one_by_one(work, keys)
        return found[-1] if found else None

    def process_keys(self, work: Callable[[Sequence[int]], object], keys: Sequence[int]) -> None:
        """Process the records of these keys at once; if a record raises, process each alone."""
        error = _try_work(work, keys)
        if error is not None and len(keys) == 1:
            self._pass_over(keys[0], error)
        elif error is not None:
            self._work_one_by_one(work, keys)

    def _work_one_by_one(self, work: Callable[[Sequence[int]], object], keys: Sequence[int]) -> None:
        """Process each record alone, and pass over the records that raise.

        Each record may wait for a lock as long as the whole chunk has.  If the budget is used up, the loop ends
        `MAX_OVERTIME_SECONDS` after its start.
        """
        ends = time.monotonic() + MAX_OVERTIME_SECONDS
        for key in keys:
            if (error := _try_work(work, [key])) is not None:
                self._pass_over(key, error)
            if self._deadline.has_passed() and (self._deadline.is_halted() or time.monotonic() >= ends):
                return

    def set_aside(self, key: int, sentence: str) -> bool:
        """Put a record that exceeds a limit into quarantine; return False if there are too many.

        Then nothing is done.  The run continues behind the record: it is not failing, so it is not counted in *failed*.
        """
        self._refused += 1
        if self._refused > MAX_FAILED_RECORDS_IN_RUN or len(self._quarantined_keys) >= MAX_BAD_RECORDS_OF_KIND:
            return False
        log.warning("record exceeds a limit", record=self._record, id=key, reason=sentence)
        quarantine.record_failure(self._batch, self._record, str(key), sentence, reason="record_failed")
        self.keys.add(key)
        self._quarantined_keys.add(key)
        return True

    def _pass_over(self, key: int, error: Exception) -> None:
        sentence = describe_error(error)
        log.error("record failed", record=self._record, id=key, error=sentence)
        quarantine.record_failure(self._batch, self._record, str(key), sentence, reason="record_failed")
        if self._is_counted:
            record_counts.count_failed_record(self._batch, self._record)
        self.failed += 1
        self.error = error
        self.keys.add(key)
        self._quarantined_keys.add(key)
        if self.failed > MAX_FAILED_RECORDS_IN_RUN or len(self._quarantined_keys) > MAX_BAD_RECORDS_OF_KIND:
            raise TooManyBadRecords(
                f"too many records failed ({self.failed} in this run, {len(self._quarantined_keys)} in quarantine): the"
                f" cause is probably not the records, see `forgekeeper quarantine`; the last error: {sentence}"
            ) from error


def _try_work(work: Callable[[Sequence[int]], object], keys: Sequence[int]) -> Exception | None:
    """Do the *work*; return its error if a record may be to blame, and raise other errors."""
    try:
        work(keys)
    except RECORD_ERRORS as error:
        if not is_record_error(error):
            raise
        return error
    return None


def is_record_error(error: Exception) -> bool:
    """Return whether a record may be to blame, not the statement, the session or the server."""
    if isinstance(error, ValueError):
        return True
    state = sqlstate(error) if isinstance(error, pw.PeeweeException) else None
    if state is None or not is_connected():
        return False
    if state[:2] in STATEMENT_ERROR_CLASSES:
        # The context names the row or the function that PostgreSQL was at.
        return bool(getattr(getattr(getattr(error, "orig", None), "diag", None), "context", None))
    return state == QUERY_CANCELED or state[:2] not in SERVER_ERROR_CLASSES
