"""Looks at everything during a soak, several times a second, and in the end once more at leisure."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from http.client import HTTPException
from itertools import cycle
from pathlib import Path

import psycopg2
import redis

from forgekeeper import locks
from forgekeeper.batches import queues
from forgekeeper.delivery.broker import NAMESPACE
from forgekeeper.storage import sentinel
from tests.metrics.pages import read
from workers.expired_job_artifacts import buckets
from workers.stale_direct_uploads import register as uploads

from .history import MOST_LOSSES, OLD_TRANSACTION, Final
from .service import LIMIT

EVERY = 0.15
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
WRONG_STATISTICS = """
    select project_id from project_statistics
    left join (select project_id, sum(size) as size from ci_job_artifacts group by project_id) as present
        using (project_id)
    where build_artifacts_size <> coalesce(present.size, 0)
"""


class Watcher(threading.Thread):
    """Samples what must never be seen, of the servers themselves, and notes it in the history."""

    def __init__(self, place, rig, history, secret):
        super().__init__(name="watcher", daemon=True)
        self._place = place
        self._rig = rig
        self._history = history
        self._secret = secret
        self._stopped = threading.Event()
        self._connection = None
        self._holders = None
        self._few = {}
        self._counters = {}
        self._pages = cycle(rig.workers)
        self.broken = None

    def stop(self):
        self._stopped.set()
        self.join()

    def run(self):
        looks = 0
        try:
            with self._place.make_redis() as self._redis:
                while not self._stopped.wait(EVERY):
                    looks += 1
                    self._look(seldom=looks % SELDOM == 0)
        except BaseException as error:
            self.broken = error
            raise
        finally:
            self._disconnect()

    def _look(self, *, seldom):
        with suppress(redis.RedisError):
            self._look_at_holders()
        try:
            self._look_at_sessions()
            if seldom:
                self._look_at_rows()
        except psycopg2.Error:
            self._disconnect()
        self._look_at_threads()
        if seldom:
            with suppress(OSError, HTTPException):
                self._look_at_page()

    def _ask(self, sql, *values):
        if self._connection is None:
            self._connection = self._place.connect()
        with self._connection.cursor() as cursor:
            cursor.execute(sql, values or None)
            return cursor.fetchall()

    def _disconnect(self):
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _look_at_holders(self):
        with self._redis.pipeline() as pipe:
            pipe.smembers(buckets.AVAILABLE)
            pipe.hgetall(buckets.OWNERS)
            pipe.hgetall(locks.OWNERS)
            for queue in queues():
                pipe.hgetall(f"{NAMESPACE}:{queue}.starts")
            available, owners, leases, *starts = pipe.execute()
        holders = {f"bucket {number.decode()}": token.decode() for number, token in owners.items()}
        holders |= {f"lease {name.decode()}": token.decode() for name, token in leases.items()}
        if holders != self._holders:
            self._history.sample("holders", holders=holders, available=[number.decode() for number in available])
            self._holders = holders
        for message, count in (pair for counts in starts for pair in counts.items()):
            if int(count) > MOST_LOSSES:
                self._history.sample("starts", message=message.decode(errors="replace"), count=int(count))
        self._history.look("holders")
        self._history.look("starts")

    def _look_at_sessions(self):
        for application, state, seconds in self._ask(OLD, OLD_TRANSACTION):
            self._history.sample("transaction", application=application, state=state, seconds=seconds)
        self._history.look("transaction")

    def _look_at_rows(self):
        if found := self._ask(HALF)[0][0]:
            self._history.sample("half entity", entities=found)
        self._history.look("half entity")
        gone = {number: path for number, path in self._ask(ARTIFACTS) if not self._place.has(path)}
        # Its row goes first, so a row that is there now had an object that was gone then.
        for number, path in self._ask(
            "select id, file_final_path from ci_job_artifacts where id = any(%s)", list(gone)
        ):
            self._history.sample("missing", artifact=number, path=path)
        self._history.look("missing")

    def _look_at_threads(self):
        alive = set()
        for service in self._rig.workers:
            if service.lives == 0 or service.process.poll() is not None:
                continue
            for pid in service.children:
                alive.add(pid)
                self._count_threads(service, pid)
        self._few = {pid: since for pid, since in self._few.items() if pid in alive}
        self._history.look("threads")

    def _count_threads(self, service, pid):
        try:
            count = _threads(pid)
        except OSError:
            return
        if count >= service.threads:
            self._few.pop(pid, None)
        elif time.monotonic() - self._few.setdefault(pid, time.monotonic()) > CRIPPLED:
            self._history.sample("threads", service=service.name, threads=count)
            self._few[pid] = time.monotonic()

    def _look_at_page(self):
        service = next(self._pages)
        life = service.lives
        if time.monotonic() - service.began < SETTLED:
            return
        text = _page(service, timeout=1)
        if service.lives != life:
            return
        if self._secret in text:
            self._history.sample("page", service=service.name)
        self._history.look("page")
        now = {str(key): value for key, value in read(text).samples.items() if key[0].endswith("_total")}
        for name, was in self._counters.get((service.name, life), {}).items():
            if now.get(name, 0) < was:
                self._history.sample("counter", name=f"{name} of {service.name}", was=was, **{"is": now.get(name, 0)})
        self._counters[service.name, life] = now
        self._counters.pop((service.name, life - 1), None)
        self._history.look("counter")


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


def tally(rig):
    """Count, by record, what there is of a kind that grows or shrinks only by what workers do."""
    counts = {
        "user_status": "user_statuses",
        "bulk_import": "bulk_imports where status = 3",
        "entity": "bulk_import_entities where status = 3",
        "tracker": "bulk_import_trackers where status = 4",
        "expired_artifact": "ci_job_artifacts",
        "git_ref_deletion": "batched_git_ref_updates_deletions where status = 2 and ref <> 'refs/old'",
        "ref_deletion": "batched_git_ref_updates_deletions where ref = 'refs/old'",
    }
    return {record: rig.ask(f"select count(*) from {where}")[0][0] for record, where in counts.items()}


def threads_short(services):
    """Say which processes of workers lack threads now: for a run that is too short to wait a minute."""
    counts = [(service, pid, _threads(pid)) for service in services for pid in service.children]
    return [(service.name, pid, count) for service, pid, count in counts if count < service.threads]


def _threads(pid):
    return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())


# How things stand


def left(rig):
    """Say what is still to be done, by what it is; nothing when everything is."""
    counts = {
        "statuses": "user_statuses where clear_status_at <= now()",
        "imports": "bulk_imports where status in (0, 1) and updated_at < now() - interval '1 day'",
        "entities": "bulk_import_entities where status in (0, 1) and updated_at < now() - interval '1 day'",
        "artifacts": "ci_job_artifacts where expire_at < now() and locked = 0 and file_type <> 3",
        "objects": "ci_deleted_objects",
        "ref deletions": "batched_git_ref_updates_deletions where status = 1",
        "old records": "batched_git_ref_updates_deletions where status = 2 and processed_at < now() - interval '1 day'",
    }
    found = {what: rig.ask(f"select count(*) from {where}")[0][0] for what, where in counts.items()}
    found["uploads"] = len(_due_uploads(rig.client))
    return {what: count for what, count in found.items() if count}


DUE = {
    "user_status_cleanup": ("user_id", "user_statuses where clear_status_at <= now()"),
    "stale_imports": (
        "id",
        """bulk_imports where status in (0, 1) and updated_at < now() - interval '1 day' union all
        select -id from bulk_import_entities where status in (0, 1) and updated_at < now() - interval '1 day'""",
    ),
    "expired_job_artifacts": ("id", "ci_job_artifacts where expire_at < now() and locked = 0 and file_type <> 3"),
    "delete_objects": ("id", "ci_deleted_objects where pick_up_at <= now()"),
    "prune": (
        "id",
        "batched_git_ref_updates_deletions where status = 2 and processed_at < now() - interval '1 day'",
    ),
    "git_ref_cleanup": ("id", "batched_git_ref_updates_deletions where status = 1 and project_id <> all(%s)"),
}
"""Batch -> what names its work, and where the work is that is due."""


def due(rig):
    """Say, by batch, what is due now: neither in the future nor waiting for its next try."""
    waiting = _projects_that_wait(rig.client)
    values = {"git_ref_cleanup": [waiting]}
    found = {
        batch: {number for (number,) in rig.ask(f"select {what} from {where}", *values.get(batch, ()))}
        for batch, (what, where) in DUE.items()
    }
    now = int(rig.client.time()[0])
    claimed = rig.client.zrangebyscore(uploads.DELETING, "-inf", now)
    stale = rig.client.zrangebyscore(uploads.PENDING, "-inf", now - 3 * 3600)
    found["stale_direct_uploads"] = {member.decode(errors="replace") for member in (*stale, *claimed)}
    return found


def _projects_that_wait(client):
    """List the projects whose child has failed and waits for its next try."""
    bodies = [json.loads(body) for body in client.hvals(f"{NAMESPACE}:git.DQ.msgs")]
    children = [body for body in bodies if body["actor_name"] == "clean_project_refs"]
    return [body["kwargs"].get("project_id", *body["args"][:1]) for body in children]


def busy(client):
    """Say whether a message waits for a worker or is in hand: what is done in it may not have been counted yet."""
    return any(client.hlen(f"{NAMESPACE}:{queue}.msgs") for queue in queues())


def _due_uploads(client):
    stale = int(client.time()[0]) - 3 * 3600
    return [*client.zrangebyscore(uploads.PENDING, "-inf", stale), *client.zrange(uploads.DELETING, 0, -1)]


def files(world):
    return sorted(
        str(file.relative_to(world.root))
        for file in world.root.rglob("*")
        if file.is_file() and file.name != sentinel.NAME
    )


def named(rig):
    """Return the paths that rows, the outbox or the register name."""
    paths = [path for (path,) in rig.ask("select file_final_path from ci_job_artifacts")]
    paths += [path for (path,) in rig.ask("select store_dir || '/' || file from ci_deleted_objects")]
    register = (member for part in _register(rig.client).values() for member in part)
    return sorted({*paths, *(member.partition(":")[2] for member in register)})


def _register(client):
    keys = {"pending": uploads.PENDING, "deleting": uploads.DELETING, "failed": uploads.FAILED}
    return {
        name: {member.decode(errors="replace"): score for member, score in client.zrange(key, 0, -1, withscores=True)}
        for name, key in keys.items()
    }


def stranded(client):
    """List what lies where no worker would find it: bodies and ids apart, ids twice, and what nobody handed back."""
    found = [key.decode() for kind in ("acks", "started") for key in client.scan_iter(f"{NAMESPACE}:__{kind}__.*")]
    for line in (line for queue in queues() for line in (queue, f"{queue}.DQ")):
        ids, bodies = (Counter(keys) for keys in _waiting(client, f"{NAMESPACE}:{line}"))
        found += [f"{line} {key.decode(errors='replace')}" for key in (ids - bodies) + (bodies - ids)]
    return found


def _waiting(client, key):
    return client.lrange(key, 0, -1), client.hkeys(f"{key}.msgs")


def at_rest(rig, bares):
    """Return everything that a batch may change, for two looks to be compared."""
    tables = {
        "statuses": "user_id from user_statuses",
        "imports": "id, status, updated_at from bulk_imports",
        "entities": "id, status, updated_at from bulk_import_entities",
        "trackers": "id, status, updated_at from bulk_import_trackers",
        "artifacts": "id from ci_job_artifacts",
        "statistics": "* from project_statistics",
        "outbox": "id from ci_deleted_objects",
        "deletions": "id, status, updated_at from batched_git_ref_updates_deletions",
    }
    found = {name: rig.ask(f"select {what} order by 1") for name, what in tables.items()}
    found["refs"] = {number: bare.refs() for number, (bare, _) in bares.items()}
    found["files"], found["register"] = files(rig.world), _register(rig.client)
    return found


def final(rig, bares):
    """Look at everything once more, but for the ledger and the buckets."""
    epoch = "extract(epoch from {})::float8"
    touched = epoch.format("updated_at")
    imports = {
        f"{kind}:{number}": [status, at]
        for kind, table in (("import", "bulk_imports"), ("entity", "bulk_import_entities"))
        for number, status, at in rig.ask(f"select id, status, {touched} from {table}")
    }
    return Final(
        now=rig.ask(f"select {epoch.format('clock_timestamp()')}")[0][0],
        statuses={
            str(user): clear
            for user, clear in rig.ask(f"select user_id, {epoch.format('clear_status_at')} from user_statuses")
        },
        imports=imports,
        half_entities=rig.ask(HALF)[0][0] or [],
        artifacts={
            str(number): row
            for number, *row in rig.ask(
                f"select id, {epoch.format('expire_at')}, locked, file_type, file_final_path from ci_job_artifacts"
            )
        },
        wrong_statistics=[project for (project,) in rig.ask(WRONG_STATISTICS)],
        outbox=rig.ask(
            f"select store_dir || '/' || file, {epoch.format('pick_up_at')}, attempts from ci_deleted_objects"
        ),
        register=_register(rig.client),
        requests={
            str(number): [f"ref:{project}:{ref}", *rest]
            for number, project, ref, *rest in rig.ask(
                "select id, project_id, ref, expected_oid, status, reason from batched_git_ref_updates_deletions"
            )
        },
        old_requests=rig.ask(
            "select count(*) from batched_git_ref_updates_deletions where processed_at < now() - interval '1 day'"
        )[0][0],
        refs={f"ref:{number}:{ref}": oid for number, (bare, _) in bares.items() for ref, oid in bare.refs().items()},
        files=files(rig.world),
    )


def shares(client):
    """Return the buckets; once all workers have ended, who take them for a moment even where nothing is to do."""
    state = {key.decode(): value for key, value in client.hgetall(buckets.STATE).items()}
    return {
        "available": buckets.available(client),
        "occupied": [held.number for held in buckets.held(client)],
        "max": int(state.get("max_buckets", 0)),
    }


def runs(rig):
    """Return the ledger, times in seconds; once all logs are written."""
    columns = ("id", "batch", "state", "reason", "attempt", "failures", "losses")
    times = ("tick", "claimed_at", "started_at", "finished_at")
    chosen = ", ".join([*columns, *(f"extract(epoch from {name})::float8" for name in times)])
    return [
        dict(zip((*columns, *times), row, strict=True)) for row in rig.ask(f"select {chosen} from job_runs order by id")
    ]
