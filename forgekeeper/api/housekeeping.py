"""`Housekeeping`: how long forgekeeper keeps its own records."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from datetime import timedelta

from forgekeeper.api.answers import Answer, Mistake
from forgekeeper.api.chunk_sizes import OLD_RECORDS_PER_CHUNK


@dataclass(frozen=True)
class Housekeeping(Answer):
    """Retention of forgekeeper's own records; older records are removed in chunks, without limits and guards.

    *runs*, *exclusions*, *notices* and *settled_uploads* count from the end of a run, the end of an exclusion, the
    change of a record, the end of an upload.  *processes* counts from the expiry of a silent process,
    *quarantine* from the last failure, *run_totals* from the day of the run.  The newest run of each batch and the last
    hundred totals of each batch stay.  The audit has partitions until *audit_ahead* from now; months older than
    ``FORGEKEEPER_AUDIT_KEEP`` are dropped.  Rows that batches declare with `old_records` are removed, too.

    Raises `Mistake` for a negative time or a chunk without records.

    >>> keep = Housekeeping(
    ...     runs=timedelta(days=30),
    ...     processes=timedelta(days=1),
    ...     quarantine=timedelta(days=7),
    ...     exclusions=timedelta(days=30),
    ...     settled_uploads=timedelta(days=30),
    ...     run_totals=timedelta(days=60),
    ...     notices=timedelta(days=30),
    ...     audit_ahead=timedelta(days=365),
    ... )
    """

    _: KW_ONLY
    runs: timedelta
    processes: timedelta
    quarantine: timedelta
    exclusions: timedelta
    settled_uploads: timedelta
    run_totals: timedelta
    notices: timedelta
    audit_ahead: timedelta
    chunk: int = OLD_RECORDS_PER_CHUNK

    def __post_init__(self) -> None:
        """Refuse times and chunks that allow no removal."""
        for name, keep in vars(self).items():
            if isinstance(keep, timedelta) and keep < timedelta(0):
                raise Mistake(f"Housekeeping: {name} must not be negative, as {keep} is")
        if self.chunk < 1:
            raise Mistake(f"Housekeeping: a chunk has at least one record, not {self.chunk}")
