"""Expired artifacts, destroyed a class at a time and without buckets, as a child of batch 11 destroys them."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

from forgekeeper.audit.deletions import Audit
from forgekeeper.database.chunks import START
from forgekeeper.deleting.rows import Sweep
from forgekeeper.deleting.statement import Composed
from forgekeeper.runs.deadline import Deadline
from forgekeeper.runs.run import Run
from tests.harness.settings import settings_with
from workers.expired_job_artifacts import MAX_RUNTIME, delete_artifact_bucket
from workers.expired_job_artifacts.destroying import BATCH_SIZE, expired

NO_GRACE = timedelta(0)
NONE_BAD = SimpleNamespace(keys=frozenset())


class Chunk(NamedTuple):
    """What a chunk came to; the artifacts of projects that are *held_up* were left."""

    artifacts: int
    bytes: int
    reached: Any
    held_up: list[int]


def destroy_chunk(number, at, *, after=START, limit=BATCH_SIZE, grace=NO_GRACE, audit=None):
    """Destroy up to *limit* artifacts of class *number* that have expired *at* an instant, beyond a position."""
    audit = audit or Audit("expired_job_artifacts", on=False)
    outcome, deadline = delete_artifact_bucket.outcome(), Deadline(MAX_RUNTIME)
    run = Run(delete_artifact_bucket, settings_with(), outcome=outcome, deadline=deadline, audit=audit)
    sweep = Sweep(run, expired(at, number, grace=grace))
    sweep._position = after
    reached = sweep._take(NONE_BAD, limit, None)
    return Chunk(outcome.destroyed, outcome.bytes, reached, sorted(sweep._held_up))


def chunk_statement(number, at, **shape):
    """Return the statement of a chunk of class *number* without an audit, and its values but for the position's."""
    composed = Composed(expired(at, number, grace=NO_GRACE))
    return composed.text(BATCH_SIZE, **shape), composed.values
