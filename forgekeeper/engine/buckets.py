"""Work in buckets: the parent tidies them and sends children; each child deletes the rows of the bucket it claims."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import peewee as pw
import structlog

from forgekeeper.api.answers import Answer, Children, Mistake, Note, Rows, Skip
from forgekeeper.api.batches import BatchSpec, FeatureFlag
from forgekeeper.api.buckets import LOOP_LIMIT_REASON, Buckets
from forgekeeper.engine.run import Run
from forgekeeper.guards.preconditions import Blocked
from forgekeeper.ledger.holds import find_idle_batches
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import is_connected
from forgekeeper.platform.failpoints import failpoint
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.buckets import Bucket, BucketSet
from metrics.catalogue import Counter, Gauge, Reading, read_instant
from metrics.logs import describe_error

NO_BUCKET_REASON = "no_bucket"
"""Reason why a child stopped that has claimed no bucket."""
BUCKET_COUNTERS = [
    ("recovered", "Stale buckets put back (stale_count).", "stale_count"),
    ("refilled", "Missing buckets added (missing_count).", "missing_count"),
]
"""The counters of the parent's result: the end of the name, the help, and the field."""
OLDEST_OCCUPIED_HELP = (
    "Last heartbeat of the occupied bucket whose owner has been silent longest; absent when none is occupied."
)

log = structlog.get_logger(__name__)


def read_bucket_limit(batch: BatchSpec) -> int:
    """Return how many buckets the batch has by its flags, 0 while its own flag is off.

    Raises `Blocked` if the flags cannot be read though the database answers.
    """
    assert batch.buckets is not None, f"{batch.name} has no buckets"
    try:
        if batch.flag is not None and not FeatureFlag.is_on(batch.flag):
            return 0
        raised = [count for flag, count in batch.buckets.count_with.items() if FeatureFlag.is_on(flag)]
        return max(raised, default=batch.buckets.count)
    except pw.PeeweeException as error:
        if not is_connected():
            raise
        flag = batch.flag or next(iter(batch.buckets.count_with))
        log.exception("feature flag unreadable", flag=flag)
        raise Blocked("flag_unreadable", f"flag {flag} cannot be read ({describe_error(error)})") from error


def ask_in_buckets(run: Run[Any], answers: Callable[[], Iterable[object]]) -> Generator[object, None, str | None]:
    """Yield the *answers* of a batch if it has buckets now, or of a child if it claims one; return why it stopped."""
    if run.declared.parent_name is None:
        limit = read_bucket_limit(run.declared.batch)
        yield from _ask_batch(run, limit, answers) if limit else [Skip("flag_off")]
        return None
    return (yield from _work_on_bucket(run, answers))


def _ask_batch(run: Run[Any], limit: int, answers: Callable[[], Iterable[object]]) -> Iterator[object]:
    """Yield the answers; before the children are sent, tidy the buckets and note their counts."""
    buckets = run.declared.batch.buckets
    with _closing_answers(answers) as asked:
        for answer in asked:
            if isinstance(answer, Children) and buckets is not None and answer.of == buckets:
                shares, silent_for = BucketSet(buckets.name), run.settings.bucket_silent_after
                yield Note(**shares.tidy(client, limit, silent_for=silent_for))
                # A child claims any free bucket: its key is not the number of its bucket.  After the third death a
                # child is started again by the parent alone, and finds its own bucket, which is occupied until then.
                yield replace(answer, of={str(number): () for number in range(limit)})
            else:
                yield answer


def _work_on_bucket(run: Run[Any], answers: Callable[[], Iterable[object]]) -> Generator[Answer, None, str]:
    """Claim a bucket; yield the rows of its classes among the *answers*, and return why the child stopped."""
    batch, name = run.declared.batch, run.declared.name
    assert batch.buckets is not None, f"{batch.name} has no buckets"
    shares = BucketSet(batch.buckets.name)
    with shares.hold_bucket(client, read_bucket_limit(batch), child=run.audit.child) as bucket:
        if bucket is None:
            return NO_BUCKET_REASON
        yield Note(bucket=bucket.number)
        failpoint(f"{name}.claimed")
        until = partial(_renew_or_stop, shares, bucket, batch.buckets.loop_limit, count(1))
        with _closing_answers(answers) as asked:
            for answer in asked:
                for rows in _select_rows_in_bucket(name, answer, bucket):
                    yield replace(rows, until=until)
        failpoint(f"{name}.finished")
    return "drained"


@contextmanager
def _closing_answers(answers: Callable[[], Iterable[object]]) -> Iterator[Iterable[object]]:
    """Ask; if a generator answers, close it on every way out."""
    asked = answers()
    with closing(asked) if isinstance(asked, Generator) else nullcontext():
        yield asked


def _select_rows_in_bucket(name: str, answer: object, bucket: Bucket) -> Iterator[Rows[Any]]:
    """Yield the rows of each class in the bucket."""
    if not isinstance(answer, Rows) or answer.classes is None:
        raise Mistake(f"{name} works in buckets: return Rows with classes=, which divides the rows among the buckets")
    for number in range(bucket.number, answer.classes.count, bucket.modulus):
        yield from answer.in_class(number).split_by_index()


def _renew_or_stop(buckets: BucketSet, bucket: Bucket, limit: int | None, loops: Iterator[int]) -> str | None:
    """Renew the bucket; return why the child has to end."""
    if limit is not None and next(loops) >= limit:
        return LOOP_LIMIT_REASON
    return buckets.renew(client, bucket)


def show_buckets(batch: BatchSpec, buckets: Buckets) -> None:
    """Let the exporter, `status` and the counters show the buckets of the batch."""
    shares, called = BucketSet(buckets.name), (buckets.called or batch.name.replace("_", " ")).capitalize()
    prefix = f"{batch.name}_" if buckets.prefix is None else buckets.prefix
    shares.declare_types()
    batch.counters = [
        *(Counter(f"{prefix}buckets_{name}", text, (field,), by_batch=False) for name, text, field in BUCKET_COUNTERS),
        *batch.counters,
    ]
    numbers = " or ".join(map(str, buckets.possible_counts))
    gauges = [
        Gauge(
            f"{prefix}buckets",
            f"{called} buckets (available, occupied).",
            ("state",),
            (("available",), ("occupied",)),
        ),
        Gauge(
            f"{prefix}buckets_limit",
            f"Configured number of buckets ({numbers}); 0 while no run of the batch may start.",
        ),
        Gauge(f"{prefix}bucket_oldest_occupied_timestamp_seconds", OLDEST_OCCUPIED_HELP),
    ]
    batch.add_collector(f"{prefix}buckets", gauges=gauges)(partial(_read_gauges, batch, shares, prefix))
    batch.add_status_part(f"{prefix}buckets", lambda: shares.read_states(client), partial(_describe_buckets, called))


def _read_gauges(batch: BatchSpec, shares: BucketSet, prefix: str, settings: Settings) -> Iterator[Reading]:
    """Count the buckets; the limit is 0 while no run of the batch may start."""
    yield Reading(
        f"{prefix}buckets_limit", 0 if batch.name in find_idle_batches(settings) else read_bucket_limit(batch)
    )
    held = shares.list_occupied(client)
    yield Reading(f"{prefix}buckets", len(shares.list_available(client)), ("available",))
    yield Reading(f"{prefix}buckets", len(held), ("occupied",))
    oldest = min((one.since for one in held), default=None)
    yield from read_instant(f"{prefix}bucket_oldest_occupied_timestamp_seconds", oldest)


def _describe_buckets(called: str, states: Mapping[str, Sequence[object]]) -> str:
    return f"{called} buckets: {len(states['available'])} available, {len(states['occupied'])} occupied."
