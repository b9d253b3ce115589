"""Servers, services and proxies of a soak, and everything that can be done to them.

A fault is a generator: it breaks something, yields for how many seconds it stays so, and mends
it when it is resumed or closed.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg2
import redis

from demo.servers import folder, postgres, redis_server
from demo.servers.machine import Programs
from demo.servers.server import Server, spawn
from forgekeeper import boot
from forgekeeper.batches import BATCHES, queues
from tests.harness.machine import Held
from tests.harness.ports import free_ports
from tests.harness.waiting import wait_until

from . import rights
from .proxy import postgres_through, redis_through
from .service import LIMIT, Service
from .worlds import World, bring_back, take_away

SECRET = "swordfish-9b1c"
"""The password in every URL that a service is given."""
DEAD_AFTER = 2.0
CRONS = dict.fromkeys(BATCHES, "*/2 * * * * *") | {"user_status_cleanup": "* * * * * *", "prune": "*/3 * * * * *"}
PERIODS = {batch: {"*/2": 2, "*": 1, "*/3": 3}[cron.split()[0]] for batch, cron in CRONS.items()}
STATEMENT_TIMEOUT = 5.0
SHUTDOWN_TIMEOUT = 10.0
OUTLIVED = SHUTDOWN_TIMEOUT + 5
"""A process that lives for so many seconds after its SIGTERM, and those for which the machine held it up, outlives it."""
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
    "shutdown_timeout": f"{SHUTDOWN_TIMEOUT:g}",
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
    """PostgreSQL and Redis as our own children, so that they can be started anew, also from older files."""

    def __init__(self, stack):
        # What has been committed must outlive PostgreSQL's sudden end, as it does wherever forgekeeper is used; and
        # a copy of its files is small.
        options = {"deadlock_timeout": "100ms", "synchronous_commit": "on", "max_wal_size": "64MB"}
        self._programs, self._options = Programs.found(), options | {"min_wal_size": "32MB"}
        self.site = stack.enter_context(folder.opened(None))
        self.redis_url = redis_server.url(self.site)
        self._redis_binary = os.environ.get("SOAK_REDIS", self._programs.redis)
        self._start_redis()
        stack.callback(self._stop_redis)
        self.database_url = postgres.url(self.site)
        self._start()
        # Not the methods of the present ones: they may have been followed by others.
        stack.callback(self._stop_postgres)

    def _stop_redis(self):
        self._redis.stop()

    def _stop_postgres(self):
        self._postgres.stop()

    def _start_redis(self):
        """Start Redis with a log of its own, written to disk at every turn, that nobody shortens unasked."""
        self._redis_folder.mkdir(mode=0o700, exist_ok=True)
        options = {
            "port": "0",
            "unixsocket": str(self.site.sockets / "redis.sock"),
            "requirepass": SECRET,
            "dir": str(self._redis_folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "no",
            "auto-aof-rewrite-percentage": "0",
        }
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        # Not by commands: until they have come a server that is started anew would refuse everybody.
        arguments += [word for name, rules in rights.started_with(SECRET) for word in ("--user", name, *rules)]
        # Where a write would pass a limit it shall be told so, as it is on a full disk, instead of being killed.
        command = ["env", "--ignore-signal=XFSZ", self._redis_binary, *arguments]
        log = self.site.folder / "redis.log"
        process = spawn(command, self.site, log=log, dies_by=signal.SIGTERM)
        self._redis = Server("Redis", process, log, (signal.SIGTERM, signal.SIGKILL), self._redis_answers)
        self._redis.wait_until_ready()

    def _redis_answers(self):
        with suppress(redis.RedisError), self.redis(socket_timeout=1) as client:
            return client.ping()
        return False

    @property
    def _redis_folder(self):
        return self.site.folder / "redis"

    @property
    def _postgres_folder(self):
        return self.site.folder / "postgres"

    @property
    def redis_process(self):
        return self._redis.process.pid

    @property
    def redis_log_size(self):
        """Return the size of what it writes to; newer ones have a folder of files."""
        return max(file.stat().st_size for file in self._redis_folder.rglob("*") if file.is_file())

    def shorten_redis_log(self):
        """Let Redis write its log anew, for it grows with every command."""
        with self.redis() as client:
            client.bgrewriteaof()
            wait_until(lambda: not _rewriting(client.info("persistence")), LIMIT)

    @property
    def processes(self):
        """Name both servers, without PostgreSQL's backends."""
        return [self.redis_process, self._postgres.process.pid]

    def freeze(self, server):
        """Stop Redis, or PostgreSQL with all its backends; return who was stopped."""
        pids = [self.redis_process if server == "redis" else self._postgres.process.pid]
        os.kill(pids[0], signal.SIGSTOP)
        if server == "postgres":
            # From now on there is nobody to start another.
            master = pids[0]
            pids += map(int, Path(f"/proc/{master}/task/{master}/children").read_text().split())
            for pid in pids[1:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        return pids

    def thaw(self, pids):
        """Let those go on."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _start(self):
        self._postgres = postgres.start(self.site, self._programs, self._options)
        self._postgres.wait_until_ready()

    def restart_postgres(self, number, *, between=lambda: None):
        """End PostgreSQL with that signal (SIGINT: fast, SIGQUIT: immediate) and start it again."""
        self._postgres.process.send_signal(number)
        try:
            self._postgres.process.wait(LIMIT)
        finally:
            self._postgres.stop()
            between()
            self._start()

    def keep_postgres(self):
        """Take PostgreSQL down for a copy of its files."""
        kept = self._postgres_folder.with_suffix(".kept")
        self.restart_postgres(signal.SIGINT, between=lambda: _copy(self._postgres_folder, kept))

    def return_postgres(self):
        """Let PostgreSQL, ended at once, go back to the copy."""
        self.restart_postgres(signal.SIGQUIT, between=lambda: _put_back(self._postgres_folder))

    def keep_redis(self):
        """Copy Redis's log as far as it is written: a log that ends anywhere is one of an earlier moment."""
        _copy(self._redis_folder, self._redis_folder.with_suffix(".kept"))

    def return_redis(self):
        """Let Redis, killed, go back to the copy."""
        self._redis.process.kill()
        self._redis.stop()
        _put_back(self._redis_folder)
        self._start_redis()

    def redis(self, **options):
        return redis.Redis.from_url(self.redis_url, password=SECRET, **{"socket_timeout": LIMIT, **options})


def _rewriting(info):
    return info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"]


def _copy(folder, kept):
    shutil.rmtree(kept, ignore_errors=True)
    # Copies belong to whom the files belong, which may be another user.
    subprocess.run(["cp", "-a", str(folder), str(kept)], check=True)


def _put_back(folder):
    shutil.rmtree(folder)
    folder.with_suffix(".kept").rename(folder)


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
    asked: float | None = None
    """When it was asked to end as a whole, by SIGTERM to its master, and for how long processes have been held up."""

    @property
    def master(self):
        return self.process.pid

    @property
    def children(self):
        """Return its worker processes; the one that serves its page is none."""
        found = []
        for pid in super().children:
            with suppress(OSError):
                if b"forgekeeper.process" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
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

    def ask_to_end(self, pids, servers):
        """Send SIGTERM; from now on its seconds are counted."""
        self.signal(signal.SIGTERM, pids)
        if self.asked is None:
            self.asked, self._held = time.monotonic(), Held(self.group, servers)

    def outlives(self):
        """Say for how many seconds it has outlived its SIGTERM; 0 while it may still live."""
        if self.asked is None:
            return 0.0
        seconds = time.monotonic() - self.asked
        return seconds if self._held.over(OUTLIVED, seconds) else 0.0


class InTheWay(Exception):
    """Another fault is in the way of this one."""


@dataclass
class Rig:
    """Everything that a soak has to do with."""

    servers: Servers
    world: World
    services: list
    history: object
    dice: object
    faults: Counter = field(default_factory=Counter)
    seed: int = 0
    begun: int = 0
    armed: bool = True
    restarts: int = 0
    away: set = field(default_factory=set)
    restricted: bool = False
    """Whether each service is somebody of its own, with the rights that the documents list."""

    @classmethod
    def make(cls, stack, path, history, seed, *, restricted=False):
        rig = cls(
            *(Servers(stack), World.make(None, path), [], history, random.Random(seed)),
            seed=seed,
            restricted=restricted,
        )
        stack.callback(rig.close)
        worker = ("worker", "--threads")
        rig.add("scheduler1", "scheduler")
        rig.add("scheduler2", "scheduler")
        rig.add("general1", *worker, "3", "--processes", "2")
        rig.add("general2", *worker, "2", "--processes", "1")
        rig.add("cron", *worker, "2", "--processes", "1", "--queues", "cron")
        if restricted:
            rig.add("exporter", "exporter")
        rig.client = stack.enter_context(rig.servers.redis())
        return rig

    def add(self, name, *arguments):
        port = free_ports(1)[0] if arguments[0] in {"worker", "exporter"} else 0
        proxies = redis_through(self.servers.redis_url), postgres_through(self.servers.database_url)
        (redis_proxy, redis_url), (database_proxy, database_url) = proxies
        settings = {
            **self.world.environment,
            **ENVIRONMENT,
            f"metrics_port_{arguments[0]}": str(port),
            "redis_url": redis_url.replace("redis://", f"redis://:{SECRET}@"),
            "database_url": database_url.replace("forgekeeper@", f"forgekeeper:{SECRET}@"),
        }
        settings = {f"FORGEKEEPER_{key.upper()}": value for key, value in settings.items()}
        if self.restricted:
            settings |= rights.urls(arguments[0], database_url, redis_url, SECRET)
        folder = self.world.root.parent / name
        folder.mkdir()
        consumed = 1 if "cron" in arguments else len(queues())
        # Its main thread and its heartbeat, and for each queue one that fetches and one for what is delayed.
        threads = int(arguments[2]) + 2 * consumed + 2 if arguments[0] == "worker" else 0
        service = Watched(
            *(name, arguments, folder, settings),
            redis_proxy=redis_proxy,
            database_proxy=database_proxy,
            threads=threads,
            port=port,
        )
        self.services.append(service)

    def person(self, service):
        """Return the environment of a command that a person types where the service is."""
        found = dict(service.environment)
        if self.restricted:
            there = found["FORGEKEEPER_DATABASE_URL"], found["FORGEKEEPER_REDIS_URL"]
            found |= rights.urls("a command", *there, SECRET)
        return found

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
            if not service.lives:
                continue
            left = service.group()
            if left and (seconds := service.outlives()):
                self.note_outlived(service, left, seconds)
            if service.process.poll() is None:
                continue
            service.died = service.died or time.monotonic()
            if left:
                if time.monotonic() - service.died < ORPHANS:
                    continue
                self.history.sample("orphans", service=service.name, pids=left)
                service.kill()
            armed = self.armed and self.dice.random() < 0.2
            self.faults["started again with a failpoint"] += armed
            self.begin(service, armed=armed)

    def note_outlived(self, service, pids, seconds):
        """Write down who has outlived their SIGTERM, and end them."""
        who = [_command(pid) for pid in pids]
        self.history.sample("outlived", service=service.name, who=who, seconds=round(seconds, 1))
        service.asked = None
        service.kill()

    def begin(self, service, *, armed=False):
        service.environment["FORGEKEEPER_FAILPOINTS"] = self._failpoint() if armed else ""
        service.began, service.died, service.asked = time.monotonic(), None, None
        self.restarts += 1
        service.start()

    def be_patient(self):
        """Let what is started from here on take its time."""
        for service in self.services:
            service.environment |= {f"FORGEKEEPER_{key.upper()}": value for key, value in PATIENT.items()}

    def _failpoint(self):
        return (
            f"{self.dice.choice(boot.model().steps)}={self.dice.choice(['kill', 'raise*2', 'sleep:1*2', 'sleep:4*1'])}"
        )

    def let_pass(self, seconds):
        """Wait, and look after the services meanwhile."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            self.supervise()
            time.sleep(min(PAUSE, left))

    def torment(self, names):
        """Begin the faults one after the other, each before the last is over; return when all is mended."""
        now = time.monotonic()
        running = []
        for name in names:
            # Its own dice: what else asks for numbers depends on timing.
            self.begun += 1
            dice = random.Random(f"{self.seed} {self.begun} {name}")
            running.append([now + dice.uniform(0, 2), name, FAULTS[name](self), dice])
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
            for _, _, fault, _ in running:
                fault.close()

    def _go_on(self, name, fault, dice):
        mine, self.dice = self.dice, dice
        try:
            return next(fault, None)
        except (redis.RedisError, psycopg2.Error, InTheWay):
            # Another fault is in the way of this one.
            self.faults[name] -= 1
            return None
        finally:
            self.dice = mine

    @contextmanager
    def noted(self, server, do):
        """Write down when it was done to that server."""
        number = self.history.intend(server, do, {}, at=None)
        outcome = "failed"
        try:
            yield
            outcome = "ok"
        finally:
            self.history.result(number, server, do, outcome, at=None)

    @contextmanager
    def alone(self, what):
        """Let no two faults of that kind be under way at the same time."""
        if what in self.away:
            raise InTheWay
        self.away.add(what)
        try:
            yield
        finally:
            self.away.discard(what)


def _command(pid):
    with suppress(OSError):
        return " ".join(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[1:4])
    return ""


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
        if service.asked is not None:
            service.asked += 3 * DEAD_AFTER


def _ask_to_end(rig):
    service = rig.dice.choice(rig.services)
    whom = [service.master] if rig.dice.random() < 0.5 else service.group()
    service.ask_to_end(whom, rig.servers.processes)
    yield rig.dice.uniform(0, 2)


def _limited(kind, limit):
    """Make a fault that limits some processes of a service, of whatever sort, to what they use now and little more."""

    def fault(rig):
        service = rig.dice.choice(rig.services)
        pids = sorted(service.group())
        if rig.dice.random() < 0.7:
            pids = [rig.dice.choice(pids)] if pids else []
        before = {}
        with rig.alone(f"limit {kind}"):
            try:
                for pid in pids:
                    # It may have ended meanwhile.
                    with suppress(OSError, KeyError):
                        soft, hard = resource.prlimit(pid, kind)
                        resource.prlimit(pid, kind, (limit(pid, rig.dice), hard))
                        before[pid] = (soft, hard)
                yield rig.dice.uniform(2, 10)
            finally:
                for pid, limits in before.items():
                    with suppress(OSError):
                        resource.prlimit(pid, kind, limits)

    return fault


def _descriptors(pid, dice):
    """Return the number that the next descriptor but one or two would have."""
    taken = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    free = (number for number in range(len(taken) + 3) if number not in taken)
    return sorted(free)[dice.randint(0, 2)]


def _memory(line):
    def limit(pid, dice):
        found = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return 1024 * int(found[line].split()[0]) + dice.choice([0, 100_000, 1_000_000, 8_000_000])

    return limit


# Servers


def _frozen(server):
    """Make a fault that stops a server as a whole: the kernel goes on to answer for it."""

    def fault(rig):
        seconds = rig.dice.uniform(1, 8)
        with rig.alone(f"{server} frozen"), rig.noted(server, "freeze"):
            pids = rig.servers.freeze(server)
            # Whoever mends faults may itself ask the server something meanwhile.
            timer = threading.Timer(seconds, rig.servers.thaw, [pids])
            timer.start()
            try:
                yield seconds
            finally:
                timer.cancel()
                rig.servers.thaw(pids)

    return fault


def _rolled_back(server):
    """Make a fault that lets a server go back to what it knew some seconds ago."""

    def fault(rig):
        with rig.alone("rolled back"):
            with rig.noted(server, "keep"):
                getattr(rig.servers, f"keep_{server}")()
            yield rig.dice.uniform(1, 10)
            with rig.noted(server, "return"):
                getattr(rig.servers, f"return_{server}")()

    return fault


def _fill_redis_disk(rig):
    """Let Redis write no more to its log, as if the disk were full; what it has not written a copy would lack."""
    with rig.alone("rolled back"):
        pid = rig.servers.redis_process
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        room = rig.servers.redis_log_size + rig.dice.choice([0, 100, 10_000])
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, hard))
        try:
            yield rig.dice.uniform(1, 6)
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


# Redis


def _empty_redis(rig):
    yield 0
    with rig.noted("redis", "flush"):
        rig.client.flushall()


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
        with rig.alone(root):
            take_away(root)
            try:
                yield rig.dice.uniform(1, 5)
            finally:
                bring_back(root)

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
    "descriptors used up": _limited(resource.RLIMIT_NOFILE, _descriptors),
    "memory used up": _limited(resource.RLIMIT_AS, _memory("VmSize")),
    "data memory used up": _limited(resource.RLIMIT_DATA, _memory("VmData")),
    "Redis frozen": _frozen("redis"),
    "PostgreSQL frozen": _frozen("postgres"),
    "Redis rolled back": _rolled_back("redis"),
    "PostgreSQL rolled back": _rolled_back("postgres"),
    "disk of Redis full": _fill_redis_disk,
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


HARD = (
    "descriptors used up",
    "memory used up",
    "data memory used up",
    "Redis frozen",
    "PostgreSQL frozen",
    "Redis rolled back",
    "PostgreSQL rolled back",
    "disk of Redis full",
    "scripts flushed",
)
"""One of these is in every round, and each in one of so many."""


def rounds(dice):
    """Choose the faults of each round."""
    while True:
        for first in dice.sample(HARD, len(HARD)):
            rest = dice.sample([*sorted(FAULTS), *OFTEN, *OFTEN], dice.choice([1, 2, 2, 3, 4]))
            yield [first, *rest]


@contextmanager
def nothing_armed(rig):
    """Let what is started from here on live."""
    armed, rig.armed = rig.armed, False
    yield
    rig.armed = armed
