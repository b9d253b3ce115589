"""Servers, services and proxies of a soak, and everything that can be done to them.

A fault is a generator: it breaks something, yields for how many seconds it stays so, and mends
it when it is resumed or closed.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg2
import redis

from embedded import folder
from embedded import redis as embedded_redis
from embedded.plan import Plan
from embedded.postgres import Postgres
from settings.failpoints import NAMES
from workers import BATCHES, QUEUES

from ..ports import free_ports  # noqa: TID252, pytest puts no folder on the path
from .proxy import postgres_through, redis_through
from .service import LIMIT, Service
from .worlds import World, bring_back, take_away

SECRET = "swordfish-9b1c"
"""The password in every URL that a service is given."""
DEAD_AFTER = 2.0
CRONS = dict.fromkeys(BATCHES, "*/2 * * * * *") | {"user_status_cleanup": "* * * * * *", "prune": "*/3 * * * * *"}
PERIODS = {batch: {"*/2": 2, "*": 1, "*/3": 3}[cron.split()[0]] for batch, cron in CRONS.items()}
STATEMENT_TIMEOUT = 5.0
ENVIRONMENT = {f"cron_{batch}": cron for batch, cron in CRONS.items()} | {
    "dead_after": str(DEAD_AFTER),
    "retry_after": "1",
    "poll_interval": "1",
    "database_connect_timeout": "2",
    "database_statement_timeout": str(STATEMENT_TIMEOUT),
    "database_idle_timeout": "3",
    "database_network_timeout": "4",
    "redis_timeout": "2",
    "scheduler_timeout": "1",
    "object_visibility": "5",
    "upload_visibility": "10",
    "bucket_silent_after": "4",
    "pace_user_status_cleanup": "8",
    "pace_git_ref_cleanup": "8",
    "pace_expired_job_artifacts": "8",
    "pace_delete_objects": "8",
    "pace_stale_direct_uploads": "8",
    "pace_stale_imports": "8",
    "metrics_port_scheduler": "0",
}
"""Little patience, and so slow a pace that most faults hit a run."""
PATIENT = {
    "dead_after": "15",
    "database_connect_timeout": "15",
    "database_lock_timeout": "5",
    "database_statement_timeout": "9",
    "database_idle_timeout": "9",
    "database_network_timeout": "15",
    "redis_timeout": "15",
    "scheduler_timeout": "5",
}
"""More of it for when the faults are over: that the machine is busy must not be another one."""
ORPHANS = 20.0
"""So long may the processes of a master that was killed take to end."""
PAUSE = 0.05


class Servers:
    """PostgreSQL and Redis as our own children, so that they can be started anew."""

    def __init__(self, stack):
        # What has been committed must outlive PostgreSQL's sudden end, as it does wherever forgekeeper is used.
        plan = Plan.on_this_machine(None, {"deadlock_timeout": "100ms", "synchronous_commit": "on"})
        self.site = stack.enter_context(folder.opened(None))
        server = embedded_redis.start(self.site, Path(plan.redis_binary))
        stack.callback(server.stop)
        server.wait_until_ready(embedded_redis.answers(self.site))
        self.redis_url = embedded_redis.url(self.site)
        with redis.Redis.from_url(self.redis_url) as client:
            client.config_set("requirepass", SECRET)
        self._made = Postgres(self.site, Path(plan.postgres_binaries), plan.postgres_prefix, plan.postgres_owner)
        self._options = plan.postgres_options
        self.database_url = self._made.url()
        self._start()
        # Not the method of the present one: it may have been followed by another.
        stack.callback(self._stop)

    def _start(self):
        self._postgres = self._made.start(self._options)
        self._postgres.wait_until_ready(self._made.answers(self._postgres))

    def _stop(self):
        self._postgres.stop()

    def restart_postgres(self, number):
        """End PostgreSQL with that signal (SIGINT: fast, SIGQUIT: immediate) and start it again."""
        self._postgres.process.send_signal(number)
        try:
            self._postgres.process.wait(LIMIT)
        finally:
            self._postgres.stop()
            self._start()

    def redis(self, **options):
        return redis.Redis.from_url(self.redis_url, password=SECRET, **{"socket_timeout": LIMIT, **options})


@dataclass
class Watched(Service):
    """A service behind proxies of its own."""

    redis_proxy: object = None
    database_proxy: object = None
    threads: int = 0
    """So many threads each of its processes has at least; 0 for a scheduler."""
    port: int = 0
    """Where its page is; 0 for a scheduler."""
    began: float = 0.0
    died: float | None = None

    @property
    def master(self):
        return self.process.pid

    @property
    def children(self):
        """Return its worker processes; the one that serves its page is none."""
        found = []
        for pid in super().children:
            with suppress(OSError):
                if b"workers" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def group(self):
        """Return the processes of its group that live, whoever their parent is."""
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with suppress(OSError):
                    state, _, group = (process / "stat").read_text().rpartition(") ")[2].split()[:3]
                    if int(group) == self.process.pid and state not in "ZX":
                        found.append(int(process.name))
        return found

    def signal(self, number, pids):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass
class Rig:
    """Everything that a soak has to do with."""

    servers: Servers
    world: World
    services: list
    history: object
    dice: object
    faults: Counter = field(default_factory=Counter)
    armed: bool = True
    restarts: int = 0
    away: set = field(default_factory=set)

    @classmethod
    def make(cls, stack, path, history, dice):
        rig = cls(Servers(stack), World.make(None, path), [], history, dice)
        stack.callback(rig.close)
        worker = ("worker", "--threads")
        rig.add("scheduler1", "scheduler")
        rig.add("scheduler2", "scheduler")
        rig.add("general1", *worker, "3", "--processes", "2")
        rig.add("general2", *worker, "2", "--processes", "1")
        rig.add("cron", *worker, "2", "--processes", "1", "--queues", "cron")
        rig.client = stack.enter_context(rig.servers.redis())
        return rig

    def add(self, name, *arguments):
        port = free_ports(1)[0] if arguments[0] == "worker" else 0
        proxies = redis_through(self.servers.redis_url), postgres_through(self.servers.database_url)
        (redis_proxy, redis_url), (database_proxy, database_url) = proxies
        settings = {
            **self.world.environment,
            **ENVIRONMENT,
            "metrics_port_worker": str(port),
            "redis_url": redis_url.replace("redis://", f"redis://:{SECRET}@"),
            "database_url": database_url.replace("forgekeeper@", f"forgekeeper:{SECRET}@"),
        }
        folder = self.world.root.parent / name
        folder.mkdir()
        queues = 1 if "cron" in arguments else len(QUEUES)
        # Its main thread and its pulse, and for each queue one that fetches and one for what is delayed.
        threads = int(arguments[2]) + 2 * queues + 2 if arguments[0] == "worker" else 0
        service = Watched(
            *(name, arguments, folder, {f"FORGEKEEPER_{key.upper()}": value for key, value in settings.items()}),
            redis_proxy=redis_proxy,
            database_proxy=database_proxy,
            threads=threads,
            port=port,
        )
        self.services.append(service)

    def close(self):
        for service in self.services:
            if service.lives:
                service.signal(signal.SIGCONT, service.group())
                service.kill()
            service.redis_proxy.close()
            service.database_proxy.close()

    @property
    def workers(self):
        return [service for service in self.services if service.threads]

    @property
    def schedulers(self):
        return [service for service in self.services if not service.threads]

    def ask(self, sql, *values):
        """Ask PostgreSQL with a session of one question."""
        connection = psycopg2.connect(self.servers.database_url, application_name="soak", connect_timeout=int(LIMIT))
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(sql, values or None)
                return cursor.fetchall() if cursor.description else None
        finally:
            connection.close()

    def supervise(self):
        """Start again what has died, as soon as nothing of it lives; now and then with a failpoint armed."""
        for service in self.services:
            if not service.lives or service.process.poll() is None:
                continue
            service.died = service.died or time.monotonic()
            if left := service.group():
                if time.monotonic() - service.died < ORPHANS:
                    continue
                self.history.sample("orphans", service=service.name, pids=left)
                service.kill()
            armed = self.armed and self.dice.random() < 0.2
            self.faults["started again with a failpoint"] += armed
            self.begin(service, armed=armed)

    def begin(self, service, *, armed=False):
        service.environment["FORGEKEEPER_FAILPOINTS"] = self._failpoint() if armed else ""
        service.began, service.died = time.monotonic(), None
        self.restarts += 1
        service.start()

    def be_patient(self):
        """Let what is started from here on take its time."""
        for service in self.services:
            service.environment |= {f"FORGEKEEPER_{key.upper()}": value for key, value in PATIENT.items()}

    def _failpoint(self):
        return f"{self.dice.choice(NAMES)}={self.dice.choice(['kill', 'raise*2', 'sleep:1*2', 'sleep:4*1'])}"

    def let_pass(self, seconds):
        """Wait, and look after the services meanwhile."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            self.supervise()
            time.sleep(min(PAUSE, left))

    def torment(self, names):
        """Begin the faults one after the other, each before the last is over; return when all is mended."""
        now = time.monotonic()
        running = [[now + self.dice.uniform(0, 2), name, FAULTS[name](self)] for name in names]
        self.faults.update(names)
        try:
            while running:
                self.let_pass(PAUSE)
                for one in [one for one in running if one[0] <= time.monotonic()]:
                    seconds = self._go_on(*one[1:])
                    one[0] = time.monotonic() + (seconds or 0)
                    if seconds is None:
                        running.remove(one)
        finally:
            for _, _, fault in running:
                fault.close()

    def _go_on(self, name, fault):
        try:
            return next(fault, None)
        except (redis.RedisError, psycopg2.Error):
            # Another fault is in the way of this one.
            self.faults[name] -= 1
            return None


# Processes


def _kill_worker_process(rig):
    for _ in range(rig.dice.randint(1, 3)):
        yield rig.dice.uniform(0, 1.5)
        rig.dice.choice(rig.workers).kill_a_child(rig.dice)


def _kill_master(rig):
    yield 0
    service = rig.dice.choice(rig.workers)
    service.signal(signal.SIGKILL, [service.master])


def _kill_group(rig):
    yield 0
    rig.dice.choice(rig.workers).kill()


def _kill_scheduler(rig):
    yield 0
    rig.dice.choice(rig.schedulers).kill()


def _stop_and_continue(rig):
    """Stop a scheduler, a process of a worker or a worker as a whole for longer than it counts as alive."""
    service = rig.dice.choice(rig.services)
    pids = service.group()
    if service.threads and rig.dice.random() < 0.7:
        pids = [pid for pid in service.children if rig.dice.random() < 0.7] or service.children
    service.signal(signal.SIGSTOP, pids)
    try:
        yield rig.dice.uniform(DEAD_AFTER, 3 * DEAD_AFTER)
    finally:
        service.signal(signal.SIGCONT, pids)


def _ask_to_end(rig):
    service = rig.dice.choice(rig.services)
    whom = [service.master] if rig.dice.random() < 0.5 else service.group()
    service.signal(signal.SIGTERM, whom)
    yield rig.dice.uniform(0, 2)


# Redis


def _empty_redis(rig):
    yield 0
    number = rig.history.intend("redis", "flush", {}, at=None)
    outcome = "failed"
    try:
        rig.client.flushall()
        outcome = "ok"
    finally:
        rig.history.result(number, "redis", "flush", outcome, at=None)


def _pause_redis(rig):
    seconds = rig.dice.uniform(0.5, 4)
    rig.client.client_pause(round(seconds * 1000), all=True)
    yield seconds


def _fill_redis(rig):
    rig.client.config_set("maxmemory", 1)
    try:
        yield rig.dice.uniform(1, 5)
    finally:
        rig.client.config_set("maxmemory", 0)


def _forget_scripts(rig):
    yield 0
    rig.client.script_flush()


def _make_redis_read_only(rig):
    rig.client.replicaof("127.0.0.1", "1")
    try:
        yield rig.dice.uniform(1, 5)
    finally:
        rig.client.replicaof("NO", "ONE")


def _on_the_way(kind, name, *args, longest=6.0, **options):
    """Make a fault of the ways of some services to a server; it ends with the way free again."""

    def fault(rig):
        some = [getattr(service, kind) for service in rig.services if rig.dice.random() < 0.5]
        proxies = some or [getattr(service, kind) for service in rig.services]
        for proxy in proxies:
            getattr(proxy, name)(*args, **options)
            if name == "refuse":
                proxy.cut()
        try:
            yield rig.dice.uniform(0.5, longest)
        finally:
            for proxy in proxies:
                proxy.passing()

    return fault


# PostgreSQL


def _terminate_sessions(rig):
    yield 0
    rig.ask(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name like 'forgekeeper%%' and random() < %s",
        rig.dice.choice([0.3, 1.0]),
    )


def _restart_postgres(rig):
    yield 0
    rig.servers.restart_postgres(rig.dice.choice([signal.SIGINT, signal.SIGQUIT]))


# Disks


def _take_away(name):
    def fault(rig):
        root = getattr(rig.world, name)
        if root in rig.away:
            return
        rig.away.add(root)
        take_away(root)
        try:
            yield rig.dice.uniform(1, 5)
        finally:
            bring_back(root)
            rig.away.discard(root)

    return fault


# The forge


def _turn_flag(rig):
    yield 0
    rig.ask(
        "insert into feature_flags (name, enabled) values ('bulk_delete_job_artifacts_high_concurrency', %s)"
        " on conflict (name) do update set enabled = excluded.enabled",
        rig.dice.random() < 0.5,
    )


def _arm(rig):
    """Let a service be started anew with a failpoint armed."""
    service = rig.dice.choice(rig.workers)
    service.kill()
    rig.begin(service, armed=True)
    yield rig.dice.uniform(2, 5)


FAULTS = {
    "worker process killed": _kill_worker_process,
    "master killed": _kill_master,
    "worker killed as a whole": _kill_group,
    "scheduler killed": _kill_scheduler,
    "process stopped for a while": _stop_and_continue,
    "SIGTERM": _ask_to_end,
    "worker started with a failpoint": _arm,
    "Redis emptied": _empty_redis,
    "Redis refuses": _on_the_way("redis_proxy", "refuse"),
    "connections to Redis cut": _on_the_way("redis_proxy", "cut", longest=0.6),
    "Redis a black hole": _on_the_way("redis_proxy", "black_hole"),
    "Redis slow": _on_the_way("redis_proxy", "passing", latency=0.2),
    "replies of Redis lost": _on_the_way("redis_proxy", "drop_replies", 2, longest=2, then_cut=True),
    "reply of Redis swallowed": _on_the_way("redis_proxy", "drop_replies", 1, longest=3),
    "Redis paused": _pause_redis,
    "Redis full": _fill_redis,
    "scripts flushed": _forget_scripts,
    "Redis read-only": _make_redis_read_only,
    "sessions terminated": _terminate_sessions,
    "connections to PostgreSQL cut": _on_the_way("database_proxy", "cut", longest=0.6),
    "PostgreSQL refuses": _on_the_way("database_proxy", "refuse"),
    "PostgreSQL a black hole": _on_the_way("database_proxy", "black_hole"),
    "PostgreSQL restarted": _restart_postgres,
    "store away": _take_away("root"),
    "repositories away": _take_away("repositories"),
    "number of buckets turned": _turn_flag,
}


OFTEN = ("worker process killed", "master killed", "process stopped for a while", "worker started with a failpoint")
"""These meet a run only if they come at the right moment."""


def some(dice):
    """Choose the faults of a round."""
    return dice.sample([*sorted(FAULTS), *OFTEN, *OFTEN], dice.choice([2, 3, 3, 4, 5]))


@contextmanager
def nothing_armed(rig):
    """Let what is started from here on live."""
    armed, rig.armed = rig.armed, False
    yield
    rig.armed = armed
