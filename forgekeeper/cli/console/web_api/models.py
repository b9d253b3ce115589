"""Models of the API's answers, for its OpenAPI document.

The answers are not made from the models: a test asks every endpoint and validates the answer. So a command and the API
encode the same facts. No model allows a field that it does not name, unless batches declare fields of their own.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

Facts = dict[str, Any]


class ExactFacts(BaseModel):
    """Facts with exactly these fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ProblemAnswer(ExactFacts):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    """The cause and the remedy, in a sentence."""


class FailedAttempt(ExactFacts):
    """An attempt of a run that failed, except the last."""

    attempt: int
    worker: str | None
    started_at: datetime
    error: str


class TickAnswer(ExactFacts):
    """A tick of a batch, or a manual run, which lacks a tick."""

    id: int
    batch: str
    tick: datetime | None
    state: str
    reason: str | None
    attempt: int
    failures: int
    losses: int
    retry_at: datetime | None
    claimed_by: str | None
    claimed_at: datetime | None
    enqueued_at: datetime | None
    started_by: str | None
    started_at: datetime | None
    alive_at: datetime | None
    finished_at: datetime | None
    result: Facts | None
    """Counters of the run; each batch has its own."""
    error: str | None
    cancelled_at: datetime | None
    cancelled_reason: str | None
    cancelled_by: str | None
    ordinary: bool | None
    failed_attempts: list[FailedAttempt]


class RunsAnswer(ExactFacts):
    """Runs, newest first."""

    batch: str | None
    ticks: list[TickAnswer]
    next: str | None
    """Cursor of the next answer; null in the last answer."""


class ChildrenCount(ExactFacts):
    """Numbers of a run's children."""

    sent: int
    at_work: int
    failing: int
    """Children in quarantine."""


class RunAnswer(ExactFacts):
    """A run and its story."""

    batch: str
    run: TickAnswer
    children: ChildrenCount
    children_failing: int
    """Children of the batch in quarantine, of any run."""
    story: list[str]


class LastRun(ExactFacts):
    """The last run of a batch that has ended."""

    id: int
    tick: datetime | None
    state: str
    reason: str | None
    attempt: int
    started_by: str | None
    started_at: datetime | None
    finished_at: datetime | None
    result: Facts | None
    error: str | None


class OpenRun(LastRun):
    """The open run of a batch."""

    retry_at: datetime | None
    claimed_at: datetime | None
    enqueued_at: datetime | None
    alive_at: datetime | None


class HoldFacts(ExactFacts):
    """A hold of a batch."""

    id: int
    kind: str
    """pause, stop, breaker or new."""
    reason: str | None
    by: str
    since: datetime
    until: datetime | None


class BatchHold(HoldFacts):
    """A hold, with its batch."""

    batch: str


class HoldsAnswer(ExactFacts):
    """Holds in force."""

    at: datetime
    holds: list[BatchHold]


class PauseFacts(ExactFacts):
    """The pause that ends last."""

    until: datetime | None
    reason: str | None
    by: str


class StopFacts(ExactFacts):
    """A stop by a person."""

    since: datetime
    reason: str | None
    by: str


class ObstacleFacts(ExactFacts):
    """A hold of a guard, or a block."""

    since: datetime | None
    reason: str
    sentence: str | None


class BatchState(ExactFacts):
    """The present state of a batch."""

    schedule: str
    next: datetime | None
    open: OpenRun | None
    last: LastRun | None
    children_failing: int
    backlog: int | None
    """Due records; null if they cannot be counted now."""
    backlog_is_more: bool
    backlog_oldest: datetime | None
    paused: PauseFacts | None
    stopped: StopFacts | None
    held: ObstacleFacts | None
    holds: list[HoldFacts]
    blocked: ObstacleFacts | None
    records_per_hour: int
    bytes_freed_in_a_week: int
    seconds_left: float | None


class BatchesAnswer(ExactFacts):
    """Every batch by its name."""

    at: datetime
    timetable_of: str
    """schedulers, or settings if no scheduler is running."""
    batches: dict[str, BatchState]


class DeclaredWork(ExactFacts):
    """The declaration of a child, with times in seconds."""

    name: str
    sentence: str
    queue: str
    budget: float
    time_limit: float
    records: list[str]
    thresholds: dict[str, float]


class DeclaredBatch(DeclaredWork):
    """The declaration of a batch."""

    document: int | None
    module: str
    team: str | None
    schedule: str
    flag: str | None
    tables: list[str]
    deletes_from: str | None
    writes: str | None
    settings: list[str]
    children: list[DeclaredWork]


class LimitFacts(ExactFacts):
    """A limit, null if unlimited, and the number that the present run or day has used."""

    name: str
    limit: int | None
    used: int


class RedisFacts(ExactFacts):
    """The error of Redis; null if it answers."""

    trouble: str | None


class BatchAnswer(ExactFacts):
    """A batch."""

    at: datetime
    batch: str
    declared: DeclaredBatch
    state: BatchState
    limits: list[LimitFacts]
    redis: RedisFacts


class QueueFacts(ExactFacts):
    """Messages of a queue; null if Redis does not answer."""

    ready: int | None
    in_flight: int | None
    delayed: int | None
    dead: int
    oldest: datetime | None
    workers: int


class QueuesAnswer(ExactFacts):
    """Every queue by its name."""

    at: datetime
    queues: dict[str, QueueFacts]
    redis: RedisFacts


class WorkFacts(ExactFacts):
    """A run or child at work."""

    what: str
    run: int | None
    message_id: str | None
    since: datetime


class ProcessFacts(ExactFacts):
    """A scheduler or worker."""

    kind: str
    host: str
    pid: int
    version: str
    started_at: datetime
    alive_at: datetime
    draining: bool
    queues: list[str] | None
    timetable: dict[str, str] | None
    silent: bool
    at_work: list[WorkFacts]


class ProcessesAnswer(ExactFacts):
    """Schedulers and workers."""

    at: datetime
    processes: list[ProcessFacts]
    warnings: list[str]


class LeaseFacts(ExactFacts):
    """A held lease; *left* are seconds until it expires unless it is renewed."""

    name: str
    holder: str
    since: datetime
    left: float


class LeasesAnswer(ExactFacts):
    """Held leases."""

    leases: list[LeaseFacts]


class ClaimedBucket(ExactFacts):
    """A claimed bucket, with its last heartbeat and its owner."""

    number: int
    since: datetime
    token: str | None


class BucketsAnswer(ExactFacts):
    """Buckets of a batch."""

    available: list[int]
    occupied: list[ClaimedBucket]


class NotDeletedFacts(ExactFacts):
    """A reason why due records are not deleted."""

    batches: list[str]
    word: str
    since: datetime | None
    sentence: str


class ReleaseFacts(ExactFacts):
    """A release of a held run; *left* is null if the release lacks a number."""

    by: str | None
    at: datetime
    reason: str | None
    left: int | None


class AmountFacts(ExactFacts):
    """Deletions of today (UTC) and of the days before, newest first."""

    today: int
    before: list[int]
    usual: int | None
    unusual: bool
    released: ReleaseFacts | None


class StatusAnswer(BatchesAnswer):
    """The whole state; batches may add parts of their own."""

    model_config = ConfigDict(extra="allow")

    queues: dict[str, QueueFacts]
    leases: list[LeaseFacts] | None
    processes: list[ProcessFacts]
    redis: RedisFacts
    amounts: dict[str, AmountFacts]
    not_deleted: list[NotDeletedFacts]
    general_warnings: list[str]
    warnings: list[str]


class ServerFacts(ExactFacts):
    """A server or place; *error* is null if it answers and belongs to the installation."""

    name: str
    address: str
    error: str | None


class InstallationAnswer(ExactFacts):
    """The installation."""

    at: datetime
    installation: str | None
    version: str
    servers: list[ServerFacts]


class ExclusionFacts(ExactFacts):
    """An exclusion; without a batch it applies to every batch."""

    id: int
    kind: str
    subject: str
    batch: str | None
    reason: str
    by: str
    since: datetime
    until: datetime | None


class ExclusionsAnswer(ExactFacts):
    """Exclusions in force."""

    exclusions: list[ExclusionFacts]


class EntryAnswer(ExactFacts):
    """A quarantined entry; without *retry_at* it waits for a person."""

    id: str
    """A number, or a kind and a key: batches keep some entries themselves."""
    kind: str
    batch: str
    record: str
    key: str
    error: str
    failures: int
    since: datetime | None
    retry_at: datetime | None


class QuarantineAnswer(ExactFacts):
    """Quarantined entries."""

    total: int
    entries: list[EntryAnswer]
    unknown: dict[str, str]
    """Kinds that cannot be read now, with the reason."""
    next: str | None
    """Cursor of the next answer; null in the last answer."""


class ActFacts(ExactFacts):
    """An act of a person."""

    id: int
    at: datetime
    act: str
    what: str
    batch: str | None
    by_user: str
    by_host: str
    actor: str | None
    reason: str | None
    before: Any
    after: Any


class DeletionTotals(ExactFacts):
    """Records of a run, of one kind and state."""

    batch: str
    record: str
    state: str
    records: int
    first: datetime
    last: datetime


class DeletionFacts(BaseModel):
    """A chunk of deleted records, or a deleted record with its details, which each kind has of its own."""

    model_config = ConfigDict(extra="allow")

    at: datetime
    batch: str
    record: str
    run: int | None
    tick: datetime | None
    child: str | None
    phase: str


class AuditAnswer(ExactFacts):
    """An answer of the audit; which fields it has depends on the question."""

    sentences: list[str]
    reaches_back: datetime | None
    next: str | None
    """Cursor of the next answer; null in the last answer."""
    acts: list[ActFacts] = []
    deletions: list[DeletionFacts] = []
    run: int = 0
    totals: list[DeletionTotals] = []
    project: int = 0
    since: datetime | None = None
    what: str = ""
    found: list[DeletionFacts] = []
    restored: bool = False
    object: list[DeletionFacts] = []
