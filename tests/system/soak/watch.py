"""Looks at what must never be seen during a soak, several times a second."""

from __future__ import annotations

import time
import urllib.request
from collections import Counter
from contextlib import suppress
from http.client import HTTPException
from itertools import cycle
from pathlib import Path

import psycopg2
import redis

from forgekeeper.delivery.queues import STARTED_CHILDREN_KEY
from forgekeeper.platform.coordination import leases as locks
from tests.harness.artifacts import buckets
from tests.metrics.pages import read
from tests.system.service import LIMIT

from .citizens import Citizen
from .properties import MOST_LOSSES, OLD_TRANSACTION
from .settings import SECRET

SELDOM = 10
"""What costs more is done each tenth time."""
CRIPPLED = 60.0
SETTLED = 3.0
"""So long after a worker's start its page may still be its predecessor's."""
OLD = """
    select application_name, state, extract(epoch from clock_timestamp() - xact_start)::float8
    from pg_stat_activity
    where application_name like 'forgekeeper%%' and clock_timestamp() - xact_start > %s * interval '1 s'
"""
HALF = """
    select array_agg(distinct entity.id) from bulk_import_entities as entity
    join bulk_import_trackers as tracker on tracker.bulk_import_entity_id = entity.id
    where (entity.status = 3 and tracker.status in (0, 1, 3)) or (entity.status <> 3 and tracker.status = 4)
"""
ARTIFACTS = "select id, file_final_path from ci_job_artifacts order by random() limit 50"


class Watcher(Citizen):
    """Samples what must never be seen, of the servers themselves, and notes it in the history."""

    pause = 0.15

    def begin(self):
        self._holders, self._few, self._counters, self._looks = None, {}, {}, 0
        self._pages = cycle([service for service in self.place.rig.services if service.port])

    def act(self):
        self._looks += 1
        seldom = self._looks % SELDOM == 0
        with suppress(redis.RedisError):
            self._look_at_holders()
        try:
            self._look_at_sessions()
            if seldom:
                self._look_at_rows()
        except psycopg2.Error:
            self.disconnect()
        self._look_at_threads()
        if seldom:
            with suppress(OSError, HTTPException):
                self._look_at_page()

    def _look_at_holders(self):
        with self.redis.pipeline() as pipe:
            pipe.smembers(buckets.available_key)
            pipe.hgetall(buckets.owners_key)
            pipe.hgetall(STARTED_CHILDREN_KEY)
            available, owners, starts = pipe.execute()
        holders = {f"bucket {number.decode()}": token.decode() for number, token in owners.items()}
        for key in self.redis.scan_iter(f"{locks.LEASE_KEY_PREFIX}*", count=1_000):
            if (value := self.redis.get(key)) is not None:
                holders[f"lease {key.decode().removeprefix(locks.LEASE_KEY_PREFIX)}"] = value.decode()
        if holders != self._holders:
            self.history.sample("holders", holders=holders, available=[number.decode() for number in available])
            self._holders = holders
        for message, count in starts.items():
            # One more is counted than is let start.
            if int(count) > MOST_LOSSES + 1:
                self.history.sample("starts", message=message.decode(errors="replace"), count=int(count))
        self.history.look("holders")
        self.history.look("starts")

    def _look_at_sessions(self):
        for application, state, seconds in self.ask(OLD, OLD_TRANSACTION):
            self.history.sample("transaction", application=application, state=state, seconds=seconds)
        self.history.look("transaction")

    def _look_at_rows(self):
        if found := self.ask(HALF)[0][0]:
            self.history.sample("half entity", entities=found)
        self.history.look("half entity")
        gone = {number: path for number, path in self.ask(ARTIFACTS) if not self.place.has(path)}
        # Its row goes first, so a row that is there now had an object that was gone then.
        for number, path in self.ask("select id, file_final_path from ci_job_artifacts where id = any(%s)", list(gone)):
            self.history.sample("missing", artifact=number, path=path)
        self.history.look("missing")

    def _look_at_threads(self):
        alive = set()
        for service in self.place.rig.workers:
            if service.lives == 0 or service.process.poll() is not None:
                continue
            for pid in service.children:
                alive.add(pid)
                self._count_threads(service, pid)
        self._few = {pid: since for pid, since in self._few.items() if pid in alive}
        self.history.look("threads")

    def _count_threads(self, service, pid):
        try:
            count = _threads(pid)
        except OSError:
            return
        if count >= service.threads:
            self._few.pop(pid, None)
        elif time.monotonic() - self._few.setdefault(pid, time.monotonic()) > CRIPPLED:
            self.history.sample("threads", service=service.name, threads=count)
            self._few[pid] = time.monotonic()

    def _look_at_page(self):
        service = next(self._pages)
        life = service.lives
        if time.monotonic() - service.began < SETTLED:
            return
        text = _page(service, timeout=1)
        if service.lives != life:
            return
        if SECRET in text:
            self.history.sample("page", service=service.name)
        self.history.look("page")
        if not service.threads:
            return  # an exporter asks each time
        now = {str(key): value for key, value in read(text).samples.items() if key[0].endswith("_total")}
        for name, was in self._counters.get((service.name, life), {}).items():
            if now.get(name, 0) < was:
                self.history.sample("counter", name=f"{name} of {service.name}", was=was, **{"is": now.get(name, 0)})
        self._counters[service.name, life] = now
        self._counters.pop((service.name, life - 1), None)
        self.history.look("counter")


def _page(service, *, timeout):
    with urllib.request.urlopen(f"http://127.0.0.1:{service.port}/metrics", timeout=timeout) as answer:
        return answer.read().decode()


def counted(services):
    """Add up what the services have counted of each record they have processed."""
    found = Counter()
    for service in services:
        for (_batch, record), value in read(_page(service, timeout=LIMIT)).series("records_processed_total").items():
            found[record] += value
    return dict(found)


def threads_short(services):
    """Say which processes of workers lack threads now: for a run that is too short to wait a minute."""
    counts = [(service, pid, _threads(pid)) for service in services for pid in service.children]
    return [(service.name, pid, count) for service, pid, count in counts if count < service.threads]


def _threads(pid):
    return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
