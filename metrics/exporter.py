"""The exporter: what is the case, asked of PostgreSQL, Redis and the disks when it is scraped.

Each collector asks in a thread of its own, for at most so long: one that fails, or does not
come back, is missing from the page and named there, and the others are none the worse.
Nothing is kept but the last answer, for a few seconds; any number of exporters agree.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from forgekeeper import clocks, locks
from forgekeeper.batches import BATCHES as DECLARED
from forgekeeper.connections import Limits, client
from forgekeeper.database import Patience, backlog, database, now, release
from forgekeeper.delivery import queues
from forgekeeper.delivery.enqueue_unique import depth
from forgekeeper.flags import FeatureFlag
from forgekeeper.installation.row import Installation
from forgekeeper.process.broker import NAMESPACE
from forgekeeper.runs import held_back
from forgekeeper.runs.attempt import describe
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.passed_over import PassedOver
from forgekeeper.settings import Settings
from forgekeeper.storage import git_repository, sentinel
from metrics.catalogue import BATCHES, COLLECTORS, FLAGS, LEASES, METRICS, NO_BATCH, OBJECTIVES, QUEUES, Metric, of
from metrics.redaction import clean
from metrics.threads import Thread
from workers import delete_objects, git_ref_cleanup, stale_imports, user_status_cleanup
from workers.expired_job_artifacts import (
    FLAG,
    HIGH_CONCURRENCY_FLAG,
    MAX_BUCKETS,
    MAX_BUCKETS_HIGH_CONCURRENCY,
    buckets,
    expired,
)
from workers.git_ref_cleanup.deletions import waiting_projects
from workers.git_ref_cleanup.repositories import paths
from workers.stale_direct_uploads import MAX_UPLOAD_DURATION, register

BRIEF = timedelta(seconds=2)
LIMITS = Limits(Patience(BRIEF, BRIEF, BRIEF, BRIEF, BRIEF), BRIEF)
"""How long an exporter waits for an answer; none is asked for twice."""
PATIENCE = 1.7
"""Seconds that all collectors have together, so that a scrape is answered within two."""
ROOT_PATIENCE = 1.2
CACHE = 3.0
"""Seconds that an answer serves all who ask."""
REPOSITORIES = 200
"""How many repositories are looked at for a stale lock: of those with pending deletions, the first."""
STALE_LOCK = timedelta(minutes=20)
"""A lock this old was left behind: a deletion ends after ten minutes."""
LABEL = 100
"""Characters of a label that is read from a table, whoever has written it."""
DEAD_LETTERS = 10_000
"""How many dead letters of a queue are read to tell whose they are."""

log = structlog.get_logger(__name__)
Answer = TypeVar("Answer")


class Reading(NamedTuple):
    """A value of a metric, without the prefix; *labels* in the catalogue's order."""

    metric: str
    value: float
    labels: tuple[str, ...] = ()


class Question(Generic[Answer]):
    """Something that is asked in a thread of its own, which may never come back; it is asked once at a time."""

    def __init__(self, name: str, ask: Callable[[], Answer]) -> None:
        self.name = name
        self.seconds = 0.0
        self.answer: Answer | None = None
        self._ask = ask
        self._began = 0.0
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Ask, unless an earlier asking has not come back."""
        if self._thread is not None and self._thread.is_alive():
            return
        self.answer, self._began = None, time.monotonic()
        thread = Thread(self._run, self.name, timeout=1)
        try:
            thread.start()
        except RuntimeError as error:
            # No thread can be had for this one now, for the next perhaps.
            self._thread, self.seconds = None, 0.0
            log.warning("collector failed", collector=self.name, error=describe(error))
        else:
            self._thread = thread

    def wait(self, until: float) -> Answer | None:
        """Return the answer, None when there is none by *until*, an instant of the monotonic clock."""
        if self._thread is None:
            return None
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self.seconds = time.monotonic() - self._began
            log.warning("collector not back", collector=self.name, seconds=round(self.seconds, 3))
            return None
        return self.answer

    def _run(self) -> None:
        try:
            self.answer = self._ask()
        except Exception as error:  # noqa: BLE001, whatever is wrong here, the other collectors go on
            log.warning("collector failed", collector=self.name, error=describe(error))
        finally:
            self.seconds = time.monotonic() - self._began


class Exporter(Collector):
    """The page: the readings of all collectors, and how each of them fared."""

    def __init__(self, settings: Settings) -> None:
        self._constants = list(_constants())
        asks = {name: partial(collect, settings) for name, collect in COLLECT.items()} | {"roots": Roots(settings).look}
        self._questions = [Question(name, partial(_ask, asks[name], name in IN_DATABASE)) for name in COLLECTORS]
        self._lock = threading.Lock()
        self._families: list[Family] = []
        self._fresh_until = 0.0

    def describe(self) -> list[Family]:
        """Name nothing: to be asked what there is would be a scrape."""
        return []

    def collect(self) -> list[Family]:
        """Ask everything, unless it was asked a moment ago."""
        with self._lock:
            if time.monotonic() >= self._fresh_until:
                self._families = list(_families([*self._constants, *self._readings()]))
                self._fresh_until = time.monotonic() + CACHE
            return self._families

    def _readings(self) -> Iterator[Reading]:
        until = time.monotonic() + PATIENCE
        for question in self._questions:
            question.begin()
        for question in self._questions:
            answer, labels = question.wait(until), (question.name,)
            yield Reading("exporter_collector_success", float(answer is not None), labels)
            yield Reading("exporter_collector_duration_seconds", question.seconds, labels)
            yield from answer or ()


def registry(settings: Settings) -> CollectorRegistry:
    """Return what the page of this process shows."""
    shown = CollectorRegistry()
    shown.register(Exporter(settings))
    return shown


def _families(readings: Iterable[Reading]) -> Iterator[Family]:
    found: dict[str, list[Reading]] = defaultdict(list)
    for reading in readings:
        found[f"forgekeeper_{reading.metric}"].append(reading)
    for metric in of("exporter"):
        yield _family(metric, found[metric.name])


def _family(metric: Metric, readings: list[Reading]) -> Family:
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for reading in readings:
        family.add_metric(reading.labels, reading.value)
    return family


def _ask(collect: Callable[[], Iterator[Reading]], in_database: bool) -> list[Reading]:  # noqa: FBT001, of a partial
    if not in_database:
        return list(collect())
    try:
        database.connect()
        return list(collect())
    finally:
        # No connection is kept: there would be one for each collector, idle between two scrapes.
        release()


def _constants() -> Iterator[Reading]:
    for name, batch in BATCHES.items():
        yield Reading("info", 1, (name, batch.document, batch.queue, batch.team))
        yield Reading("run_time_limit_seconds", batch.time_limit.total_seconds(), (name,))


def _batches(settings: Settings) -> Iterator[Reading]:
    """Say what is expected of each batch; of one that is held back, nothing."""
    for row in Batch.select():
        if row.name in BATCHES:
            yield from _moment("registered_timestamp_seconds", row.registered_at, row.name)
    paused = {row.name: row.paused_since for row in Batch.all_paused() if row.name in BATCHES}
    for name, since in paused.items():
        yield from _moment("batch_paused_since_timestamp_seconds", since, name)
    idle = _held_back(settings, paused)
    blocked = {row.name: row for row in Batch.all_blocked() if row.name in BATCHES and row.name not in idle}
    for name, row in blocked.items():
        reason = clean(str(row.blocked_reason))[:LABEL]
        yield from _moment("batch_blocked_since_timestamp_seconds", row.blocked_since, name, reason)
    for off in held_back.off({name: settings.cron(name) for name in DECLARED}):
        yield from _moment("batch_off_since_timestamp_seconds", off.since, off.batch, off.reason)
    for name, batch in BATCHES.items():
        schedule = settings.cron(name) if batch.parent is None and name not in idle else None
        if schedule is not None:
            yield Reading("schedule_interval_seconds", schedule.period.total_seconds(), (name,))
    switched_off = set() if FeatureFlag.is_on(FLAG) else {"delete_artifact_bucket"}
    for (name, record), objective in OBJECTIVES.items():
        if name not in _with_children({*idle, *blocked}) | switched_off:
            yield Reading("backlog_age_objective_seconds", objective.total_seconds(), (name, record))


def _held_back(settings: Settings, paused: Iterable[str]) -> set[str]:
    """Name the batches that are paused or off, with their children."""
    parents = {name for name, batch in BATCHES.items() if batch.parent is None and settings.cron(name) is None}
    return _with_children(parents | set(paused))


def _with_children(parents: set[str]) -> set[str]:
    return parents | {name for name, batch in BATCHES.items() if batch.parent in parents}


def _runs(_settings: Settings) -> Iterator[Reading]:
    for batch in (batch for batch in BATCHES.values() if batch.parent is None):
        health, labels = JobRun.health(batch.name), (batch.name,)
        yield Reading("consecutive_failures", health.failures, labels)
        yield from _moment("last_run_timestamp_seconds", health.last_run, *labels)
        yield from _moment("last_success_timestamp_seconds", health.last_success, *labels)
        yield from _moment("running_since_timestamp_seconds", health.running_since, *labels)
        if health.duration is not None:
            yield Reading("last_run_duration_seconds", health.duration.total_seconds(), labels)
        yield Reading("ticks_ahead", JobRun.ahead(batch.name).ticks, labels)


def _clocks(_settings: Settings) -> Iterator[Reading]:
    for difference in clocks.read().differences():
        yield Reading("clock_offset_seconds", difference.seconds, (difference.clock, difference.reference))


def _flags(_settings: Settings) -> Iterator[Reading]:
    for flag in FLAGS:
        yield Reading("feature_flag_enabled", float(FeatureFlag.is_on(flag)), (flag,))


def _queues(_settings: Settings) -> Iterator[Reading]:
    for queue in QUEUES:
        counts = depth(client, NAMESPACE, queue)
        for state, count in (("ready", "ready"), ("unacked", "in_flight"), ("delayed", "delayed")):
            yield Reading("queue_messages", counts[count], (queue, state))
        yield from _moment("queue_oldest_message_timestamp_seconds", queues.due_since(client, NAMESPACE, queue), queue)


def _dead_letters(_settings: Settings) -> Iterator[Reading]:
    for queue in QUEUES:
        found = queues.dead_by_actor(client, NAMESPACE, queue, limit=DEAD_LETTERS)
        for name in (name for name, batch in BATCHES.items() if batch.queue == queue):
            yield Reading("dead_letter_messages", found.pop(name, 0), (queue, name))
        yield Reading("dead_letter_messages", found.total(), (queue, NO_BATCH))


def _leases(_settings: Settings) -> Iterator[Reading]:
    seconds, microseconds = client.time()
    held = locks.leases(client)
    for family in LEASES:
        left = [one.left.total_seconds() for one in held if one.name.partition(":")[0] == family]
        yield Reading("lease_held", float(bool(left)), (family,))
        if left:
            yield Reading("lease_expiry_timestamp_seconds", seconds + microseconds / 1e6 + max(left), (family,))


def _buckets(settings: Settings) -> Iterator[Reading]:
    """Count the buckets; a batch that is held back needs none."""
    idle = _held_back(settings, (row.name for row in Batch.all_paused()))
    limit = MAX_BUCKETS_HIGH_CONCURRENCY if FeatureFlag.is_on(HIGH_CONCURRENCY_FLAG) else MAX_BUCKETS
    wanted = FeatureFlag.is_on(FLAG) and "expired_job_artifacts" not in idle
    yield Reading("buckets_limit", limit if wanted else 0)
    held = buckets.held(client)
    yield Reading("buckets", len(buckets.available(client)), ("available",))
    yield Reading("buckets", len(held), ("occupied",))
    yield from _moment("bucket_oldest_occupied_timestamp_seconds", min((one.since for one in held), default=None))


class Roots:
    """The repositories' root and the object stores; a disk that hangs must hide none of the others."""

    def __init__(self, settings: Settings) -> None:
        asks: dict[str, Callable[[], sentinel.Sentinel | None]] = {
            location: partial(_of_store, location, url.get_secret_value())
            for location, url in settings.object_stores.items()
        }
        if settings.repositories_root is not None:
            asks["repositories"] = sentinel.Folder(settings.repositories_root).sentinel
        self._questions = [Question(root, ask) for root, ask in asks.items()]
        self._whose = Question("installation", _installation)
        self._ours: str | None = None

    def look(self) -> Iterator[Reading]:
        """Look at every root at once; one that is another installation's, or nobody's, is none of ours."""
        until = time.monotonic() + ROOT_PATIENCE
        for question in self._questions:
            question.begin()
        if self._questions:
            self._whose.begin()
            # While the database is away, what it said last holds; it is another collector that tells of it.
            self._ours = self._whose.wait(until) or self._ours
        for question in self._questions:
            yield Reading("root_readable", float(self._is_ours(question.wait(until))), (question.name,))

    def _is_ours(self, found: sentinel.Sentinel | None) -> bool:
        return found is not None and (self._ours is None or found.installation == self._ours)


def _of_store(location: str, url: str) -> sentinel.Sentinel | None:
    return sentinel.Store(location, url).sentinel()


def _installation() -> str:
    try:
        database.connect()
        return Installation.ensure()
    finally:
        release()


def _git_locks(settings: Settings) -> Iterator[Reading]:
    """Count stale locks; where the root cannot be read nothing is said of them."""
    if settings.repositories_root is None:
        yield Reading("git_stale_locks", 0)
        return
    waiting = paths(waiting_projects(after=0, limit=REPOSITORIES)).values()
    try:
        stale = sum(_is_stale(settings.repositories_root, disk_path) for disk_path in waiting)
    except git_repository.RootUnavailable:
        return
    yield Reading("git_stale_locks", stale)


def _is_stale(root: Path, disk_path: str) -> bool:
    lock = "packed-refs.lock"
    try:
        repository = git_repository.open_repository(root, disk_path)
    except (git_repository.RepositoryMissing, git_repository.RepositoryFailed):
        return False
    if not (repository.git_dir / lock).exists():
        return False
    return repository.ages([lock]).get(lock, timedelta()) > STALE_LOCK


def _user_statuses(_settings: Settings) -> Iterator[Reading]:
    yield from _backlog("user_status_cleanup", "user_status", user_status_cleanup.due(now()))


def _git_refs(_settings: Settings) -> Iterator[Reading]:
    yield from _backlog("clean_project_refs", "git_ref_deletion", git_ref_cleanup.pending(now()))
    yield Reading("given_up_records", git_ref_cleanup.rejected(), ("clean_project_refs", "rejected_ref"))


def _uploads(_settings: Settings) -> Iterator[Reading]:
    batch, found = "stale_direct_uploads", register.census(client, MAX_UPLOAD_DURATION)
    yield Reading("backlog_records", found.pending, (batch, "pending_upload"))
    yield from _backlog(batch, "stale_upload", backlog.Backlog(found.due, found.due_since))
    yield Reading("given_up_records", found.failed, (batch, "failed_upload"))


def _imports(_settings: Settings) -> Iterator[Reading]:
    instant = now()
    yield from _backlog("stale_imports", "bulk_import", stale_imports.stale(instant))
    yield from _backlog("stale_imports", "entity", stale_imports.stale_entities(instant))


def _artifacts(_settings: Settings) -> Iterator[Reading]:
    yield from _backlog("delete_artifact_bucket", "expired_artifact", expired(now()))


def _objects(_settings: Settings) -> Iterator[Reading]:
    yield from _backlog("delete_objects", "deleted_object", delete_objects.due(now()))
    yield Reading("given_up_records", delete_objects.dead(), ("delete_objects", "dead_object"))


def _bad_records(_settings: Settings) -> Iterator[Reading]:
    found = PassedOver.counts()
    for (batch,) in METRICS["forgekeeper_passed_over_records"].children or ():
        yield Reading("passed_over_records", found.get(batch, 0), (batch,))


def _backlog(batch: str, record: str, found: backlog.Backlog) -> Iterator[Reading]:
    yield Reading("backlog_records", found.records, (batch, record))
    yield from _moment("backlog_oldest_timestamp_seconds", found.oldest, batch, record)


def _moment(metric: str, instant: datetime | None, *labels: str) -> Iterator[Reading]:
    """Yield the instant, nothing when there is none."""
    if instant is not None:
        yield Reading(metric, instant.timestamp(), labels)


COLLECT: dict[str, Callable[[Settings], Iterator[Reading]]] = {
    "batches": _batches,
    "runs": _runs,
    "flags": _flags,
    "queues": _queues,
    "dead_letters": _dead_letters,
    "leases": _leases,
    "buckets": _buckets,
    "git_locks": _git_locks,
    "user_statuses": _user_statuses,
    "git_refs": _git_refs,
    "uploads": _uploads,
    "imports": _imports,
    "artifacts": _artifacts,
    "objects": _objects,
    "bad_records": _bad_records,
    "clocks": _clocks,
}
IN_DATABASE = COLLECT.keys() - {"queues", "dead_letters", "leases", "uploads"}
