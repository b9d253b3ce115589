"""The exporter: collects the state of PostgreSQL, Redis and the disks on each scrape.

Each collector has a thread and a time limit. If one fails or times out, the scrape says so and the others still report.
The exporter keeps nothing between two scrapes, so any number of exporters agree.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from functools import partial

import peewee as pw
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector as Collecting
from pydantic import SecretStr

from forgekeeper.api.batches import BATCHES, FLAGS, BatchSpec, FeatureFlag, all_declared, find_declaration, list_queues
from forgekeeper.api.inspection import Collector
from forgekeeper.delivery.queues import count_messages, due_since
from forgekeeper.guards import preconditions
from forgekeeper.ledger import holds, operator_events, quarantine, reconcile
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.switched_off import find_switched_off
from forgekeeper.platform.connections import ServerTimeouts, client
from forgekeeper.platform.coordination import leases as locks
from forgekeeper.platform.database import database, release_connection
from forgekeeper.platform.database.read_only import read_only_snapshot
from forgekeeper.platform.installation import Installation
from forgekeeper.platform.settings import Settings
from forgekeeper.targets import sentinel
from metrics.catalogue import (
    NO_BATCH,
    UNREADABLE_LABELS,
    Reading,
    build_metrics,
    collect_label_sets,
    read_instant,
    select_metrics,
)
from metrics.threads import Probe, ask_probes

REQUEST_TIMEOUT = timedelta(seconds=2)
EXPORTER_LIMITS = ServerTimeouts(
    REQUEST_TIMEOUT, REQUEST_TIMEOUT, REQUEST_TIMEOUT, REQUEST_TIMEOUT, REQUEST_TIMEOUT, REQUEST_TIMEOUT
)
"""How long an exporter waits for an answer; it does not repeat a request."""
SCRAPE_TIMEOUT_SECONDS = 1.7
"""Time limit in seconds for all collectors together, so that a scrape is answered within two."""
ROOTS_TIMEOUT_SECONDS = 1.2
"""Time limit in seconds for all roots together."""


class Exporter(Collecting):
    """The readings of all collectors, and the success and duration of each."""

    def __init__(self, settings: Settings) -> None:
        self._metrics = select_metrics("exporter", build_metrics(all_declared()))
        self._constants = list(_read_declarations())
        found = all_collectors(settings)
        batches = {name: BATCHES[one.parent_name or one.name] for one in all_declared() for name in one.collectors}
        self._probes = [
            Probe(name, partial(_run_collector, one, settings, batches.get(name))) for name, one in found.items()
        ]
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Family]:
        """Run all collectors, one scrape at a time."""
        found: dict[str, list[Reading]] = defaultdict(list)
        with self._lock:
            for reading in (*self._constants, *self._collect_readings()):
                found[f"forgekeeper_{reading.metric}"].append(reading)
        for metric in self._metrics:
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for reading in found[metric.name]:
                family.add_metric(reading.labels, reading.value)
            yield family

    def _collect_readings(self) -> Iterator[Reading]:
        for probe, answer in zip(self._probes, ask_probes(self._probes, SCRAPE_TIMEOUT_SECONDS), strict=True):
            yield Reading("exporter_collector_success", float(answer is not None), (probe.name,))
            yield Reading("exporter_collector_duration_seconds", probe.seconds, (probe.name,))
            yield from answer or ()


def create_registry(settings: Settings) -> CollectorRegistry:
    """Return the metrics that the endpoint of this process shows."""
    shown = CollectorRegistry()
    shown.register(Exporter(settings))
    return shown


def _run_collector(collector: Collector, settings: Settings, batch: BatchSpec | None) -> list[Reading]:
    """Return the readings of a collector; none if the forge lacks tables of its *batch*.

    Such a batch is off, or blocked, which another alert reports.
    """
    with _connect_thread() if collector.database else nullcontext():
        try:
            with read_only_snapshot():
                return list(collector.read(settings))
        except pw.ProgrammingError:
            if batch is None or not preconditions.find_missing_needs(batch):
                raise
            return []


@contextmanager
def _connect_thread() -> Iterator[None]:
    """Connect this thread to the database; no connection is kept idle between two scrapes."""
    try:
        database.connect()
        yield
    finally:
        release_connection()


def all_collectors(settings: Settings) -> dict[str, Collector]:
    """Return the collectors of the engine and of the batches, by label."""
    return {
        "batches": Collector(_read_batches),
        "runs": Collector(_read_runs),
        "flags": Collector(_read_flags),
        "queues": Collector(_read_queues, database=False),
        "dead_letters": Collector(_count_dead_letters),
        "leases": Collector(_read_leases, database=False),
        "roots": Collector(_create_roots_collector(settings), database=False),
        "quarantine": Collector(_count_quarantined),
        "clocks": Collector(_read_clocks),
        "events": Collector(_read_events),
    } | {name: collector for one in all_declared() for name, collector in one.collectors.items()}


def _read_declarations() -> Iterator[Reading]:
    """Read the declarations."""
    for one in all_declared():
        yield Reading("info", 1, (one.name, str(one.document or "none"), one.queue, one.team))
        yield Reading("run_time_limit_seconds", one.time_limit.total_seconds(), (one.name,))
        for limit in one.thresholds:
            yield Reading("threshold_limit", limit.above, (one.name, limit.name))


def _read_batches(settings: Settings) -> Iterator[Reading]:
    """Yield the expectations of each batch; none for a batch with a hold."""
    registered = {row.name: row.registered_at for row in Batch.select() if find_declaration(row.name)}
    for name, instant in registered.items():
        yield from read_instant("registered_timestamp_seconds", instant, name)
    yield from _read_holds()
    idle = holds.find_idle_batches(settings)
    blocked = {row.name: row for row in Batch.list_blocked() if find_declaration(row.name) and row.name not in idle}
    for name, row in blocked.items():
        yield from read_instant(
            "batch_blocked_since_timestamp_seconds", row.blocked_since, name, str(row.blocked_reason)
        )
    schedules = {name: settings.schedule_of(name) for name in BATCHES}
    for name, schedule in schedules.items():
        if schedule is not None and name not in idle:
            yield Reading("schedule_interval_seconds", schedule.longest_interval.total_seconds(), (name,))
    off = list(find_switched_off(registered, schedules))
    for switch in off:
        yield from read_instant("batch_off_since_timestamp_seconds", switch.since, switch.batch, switch.by)
    excused = idle | blocked.keys() | {switch.batch for switch in off if switch.by == "flag_off"}
    for one in all_declared():
        for record in one.records if (one.parent_name or one.name) not in excused else ():
            if record.objective is not None:
                seconds = record.objective.total_seconds()
                yield Reading("backlog_age_objective_seconds", seconds, (one.name, record.name))


def _read_holds() -> Iterator[Reading]:
    first: dict[tuple[str, ...], datetime] = {}
    for hold in sorted(Hold.list_active(), key=lambda hold: hold.since, reverse=True):
        word = {"pause": "paused", "stop": "stopped"}.get(hold.kind)
        if find_declaration(hold.batch):
            first[(word, hold.batch) if word else ("held", hold.batch, hold.kind)] = hold.since
    for (how, *labels), since in first.items():
        yield from read_instant(f"batch_{how}_since_timestamp_seconds", since, *labels)


def _read_runs(_settings: Settings) -> Iterator[Reading]:
    for batch in BATCHES:
        health = JobRun.read_health(batch)
        yield Reading("consecutive_failures", health.failures, (batch,))
        yield from read_instant("last_run_timestamp_seconds", health.last_run, batch)
        yield from read_instant("last_success_timestamp_seconds", health.last_success, batch)
        yield from read_instant("running_since_timestamp_seconds", health.running_since, batch)
        if health.duration is not None:
            yield Reading("last_run_duration_seconds", health.duration.total_seconds(), (batch,))
        yield Reading("ticks_ahead", reconcile.count_ticks_ahead(batch), (batch,))


def _read_clocks(_settings: Settings) -> Iterator[Reading]:
    for difference in preconditions.compare_clocks():
        yield Reading("clock_offset_seconds", difference.seconds, (difference.clock, difference.reference))


def _read_events(settings: Settings) -> Iterator[Reading]:
    """Read the events for the webhook; without a webhook nobody sends them, so none is late."""
    undelivered = operator_events.find_undelivered_events()
    yield Reading("webhook_events_given_up", undelivered.given_up)
    if settings.webhook_url is not None:
        yield from read_instant("webhook_oldest_event_timestamp_seconds", undelivered.oldest)


def _read_flags(_settings: Settings) -> Iterator[Reading]:
    for flag in FLAGS:
        yield Reading("feature_flag_enabled", float(FeatureFlag.is_on(flag)), (flag,))


def _read_queues(_settings: Settings) -> Iterator[Reading]:
    for queue in list_queues():
        counts = count_messages(client, queue)
        for state, count in (("ready", "ready"), ("unacked", "in_flight"), ("delayed", "delayed")):
            yield Reading("queue_messages", counts[count], (queue, state))
        yield from read_instant("queue_oldest_message_timestamp_seconds", due_since(client, queue), queue)


def _count_dead_letters(_settings: Settings) -> Iterator[Reading]:
    """Count children that wait for a person, and unreadable messages.

    Redis keeps these messages longer.
    """
    found = quarantine.count_dead_letters()
    for one in all_declared():
        yield Reading("dead_letter_messages", found.get(("child", one.name), 0), (one.queue, one.name))
    for queue in list_queues():
        yield Reading("dead_letter_messages", found.get(("message", queue), 0), (queue, NO_BATCH))


def _read_leases(_settings: Settings) -> Iterator[Reading]:
    seconds, microseconds = client.time()
    held = locks.list_leases(client)
    for family in (one.name for one in all_declared() if one.lease):
        left = [one.left.total_seconds() for one in held if one.name.partition(":")[0] == family]
        yield Reading("lease_held", float(bool(left)), (family,))
        if left:
            yield Reading("lease_expiry_timestamp_seconds", seconds + microseconds / 1e6 + max(left), (family,))


def _count_quarantined(_settings: Settings) -> Iterator[Reading]:
    """Count quarantined records, except records that documents keep and count themselves."""
    found: dict[tuple[str, ...], int] = dict(quarantine.count_repeated().items())
    kept = {(one.name, refused.record) for one in all_declared() for refused in one.refused}
    for labels in {*(collect_label_sets(all_declared())["quarantined"] or ())} - kept - {UNREADABLE_LABELS}:
        yield Reading("quarantine_records", found.pop(labels, 0), labels)
    yield Reading("quarantine_records", sum(found.values()), UNREADABLE_LABELS)


def _create_roots_collector(settings: Settings) -> Callable[[Settings], Iterator[Reading]]:
    """Return a collector that reads all roots in parallel: a hanging root hides no other.

    The roots are the folder of repositories and the stores.  A root of another installation, or without an owner, is
    not readable; while the database is down, the owner is not checked.
    """
    probes = [Probe(name, partial(_read_store_sentinel, name, url)) for name, url in settings.object_stores.items()]
    if settings.repositories_root is not None:
        probes.append(Probe("repositories", sentinel.Folder(settings.repositories_root).read_owner))
    whose = Probe("installation", _read_installation)

    def read_roots(_settings: Settings) -> Iterator[Reading]:
        ours, *answers = ask_probes((whose, *probes), ROOTS_TIMEOUT_SECONDS)
        for probe, found in zip(probes, answers, strict=True):
            readable = found is not None and ours in (None, found)
            yield Reading("root_readable", float(readable), (probe.name,))

    return read_roots


def _read_store_sentinel(location: str, url: SecretStr) -> str | None:
    return sentinel.Store(location, url.get_secret_value()).read_owner()


def _read_installation() -> str:
    with _connect_thread():
        return Installation.ensure_id()
