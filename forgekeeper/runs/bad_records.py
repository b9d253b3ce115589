"""Bad records: one that raises is found, said, counted and passed over, and stops no other.

A chunk is worked on as one.  If a record of it raises, each is worked on alone.  The bad one is passed over: to the end
of the run, and if it fails again for a while that grows.  `forgekeeper quarantine` shows what is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar

import peewee as pw
import structlog

from forgekeeper.database import reachable, sqlstate
from forgekeeper.database.queries import among
from forgekeeper.runs import counting, quarantine
from forgekeeper.runs.brakes import Deadline
from forgekeeper.runs.retry import MOST_IN_RUN, MOST_KNOWN
from metrics.logs import describe

ALONE = 20.0
"""Seconds beyond its budget that a run may take to find what made it wait: else it would never get there."""

SERVER = {"08", "25", "26", "28", "3D", "53", "57", "58", "F0", "XX"}
"""Errors of the server, of the session, or of the whole database."""
STATEMENT = {"0A", "42", "55"}
"""Errors of a statement, unless PostgreSQL says within what they came: at a locked row, in a trigger of the forge's."""
TOOK_TOO_LONG = "57014"

Place = TypeVar("Place")
Work = Callable[[Sequence[int] | None], Place]
Still: TypeAlias = "Callable[[Sequence[int]], set[int]] | pw.ModelSelect[Any]"

log = structlog.get_logger(__name__)


class TooManyBadRecords(Exception):
    """So many records fail that something else must be wrong."""


class BadRecords:
    """The bad records of a kind, as a run knows them: *keys* are those to leave out.

    *still* says which of some keys a run would still work on, or selects all that it would: the others are forgotten.
    *failed* counts those that failed in this run, *error* is the last one's.
    Only those of a record whose declaration names errors of the database are *counted*.
    """

    def __init__(self, batch: str, record: str, deadline: Deadline, still: Still, *, counted: bool) -> None:
        self.failed = 0
        self.error: Exception | None = None
        self._batch, self._record = batch, record
        self._deadline = deadline
        self._counted = counted
        self._still = partial(among, still) if isinstance(still, pw.ModelSelect) else still
        known = quarantine.known(batch, record)
        self._known = set(known)
        self.keys = {key for key, waits in known.items() if waits}

    def __enter__(self) -> Self:
        """Begin a run."""
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        """End it: forget what is done, or gone."""
        if error is None and self._known:
            gone = self._known - self._still(sorted(self._known))
            quarantine.forget(self._batch, self._record, map(str, gone))

    def chunk(self, work: Work[Place | None], places: Callable[[], Sequence[Place]]) -> Place | None:
        """Do the *work* of a chunk; return what it returns: how far it came.

        *work* is done for whichever records come next, or for those of the keys that it is
        given, in a transaction of its own.  If a record raises it is done for one after another of
        *places*, which end with the records' keys; then the last of them is returned.
        """
        try:
            return work(None)
        except (pw.PeeweeException, ValueError) as error:
            if not of_a_record(error):
                raise
            found = places()
            keys: list[Any] = [place[-1] if isinstance(place, tuple) else place for place in found]
            self._one_by_one(work, keys)
            return found[-1] if found else None

    def each(self, work: Callable[[Sequence[int]], object], keys: Sequence[int]) -> None:
        """Do the *work* for records of these keys: for all at once, or for one after another if one raises."""
        try:
            work(keys)
        except (pw.PeeweeException, ValueError) as error:
            if not of_a_record(error):
                raise
            if len(keys) == 1:
                self._pass_over(keys[0], error)
            else:
                self._one_by_one(work, keys)

    def _one_by_one(self, work: Callable[[Sequence[int]], object], keys: Sequence[int]) -> None:
        """Do the *work* for each of the keys; of what waits for a lock, each waits as long as the whole has."""
        ends = time.monotonic() + ALONE
        for key in keys:
            self.each(work, [key])
            if self._deadline.passed() and (self._deadline.halted() or time.monotonic() >= ends):
                return

    def _pass_over(self, key: int, error: Exception) -> None:
        sentence = describe(error)
        log.error("record failed", record=self._record, id=key, error=sentence)
        quarantine.fail(self._batch, self._record, str(key), sentence, reason="record_failed")
        if self._counted:
            counting.record_failed(self._batch, self._record)
        self.failed += 1
        self.error = error
        self.keys.add(key)
        self._known.add(key)
        if self.failed > MOST_IN_RUN or len(self._known) > MOST_KNOWN:
            raise TooManyBadRecords(
                f"too many records fail, {self.failed} in this run and {len(self._known)} in all: something else than"
                f" the records is wrong, see `forgekeeper quarantine`; the last one: {sentence}"
            ) from error


def of_a_record(error: Exception) -> bool:
    """Say whether a record may be to blame, and not the statement, the session or the server."""
    if isinstance(error, ValueError):
        return True  # what Python cannot read or write
    state = sqlstate(error) if isinstance(error, pw.PeeweeException) else None
    if state is None or not reachable():
        return False
    if state[:2] in STATEMENT:
        # Where PostgreSQL was: at which row, in which function.
        return bool(getattr(getattr(getattr(error, "orig", None), "diag", None), "context", None))
    return state == TOOK_TOO_LONG or state[:2] not in SERVER
