"""Services and proxies of a soak, and the faults that are under way."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psycopg2
import redis

from forgekeeper.api.batches import list_queues
from forgekeeper.platform.settings import PREFIX
from tests.harness import forks
from tests.harness.failpoints import failpoints
from tests.harness.machine import MachineDelay
from tests.harness.ports import free_ports
from tests.harness.programs import ROOT
from tests.harness.waiting import scale_timeout
from tests.system.proxy import postgres_through, redis_through
from tests.system.service import LIMIT, Service
from tests.system.worlds import World

from . import rights
from .faults import FAULTS, InTheWay
from .servers import Servers
from .settings import ENVIRONMENT, ORPHANS, OUTLIVED, PATIENT, PAUSE, SECRET

REPLACED = {"Redis emptied", "Redis rolled back", "PostgreSQL rolled back"}
"""After these faults Redis may lack the register that PostgreSQL remembers."""
ACCEPT_ATTEMPTS = 20


class Watched(Service):
    """A service behind proxies of its own."""

    began, died = 0.0, None
    asked = None
    """When it was asked to end as a whole, by SIGTERM to its master, and for how long processes have been held up."""

    def __init__(self, name, arguments, folder, settings, *, redis_proxy, database_proxy, threads, port):
        super().__init__(name, arguments, folder, settings)
        self.redis_proxy, self.database_proxy = redis_proxy, database_proxy
        self.threads = threads
        """So many threads each of its processes has at least; 0 for a scheduler."""
        self.port = port
        """Where its page is; 0 for a scheduler."""

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
                    if int(group) == self.pid and state not in "ZX":
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
            self.asked, self._held = time.monotonic(), MachineDelay(self.group, servers)

    def outlives(self):
        """Return the seconds that the process has lived beyond its time limit after SIGTERM; 0 within the limit."""
        if self.asked is None:
            return 0.0
        seconds = time.monotonic() - self.asked
        return seconds if self._held.over(OUTLIVED, seconds) else 0.0


class Rig:
    """Everything that a soak has to do with."""

    def __init__(self, stack, path, history, seed):
        self.history, self.seed, self.dice = history, seed, random.Random(seed)
        self.servers, self.world, self.services = Servers(stack), World.make(None, path), []
        self.faults, self.begun, self.restarts = Counter(), 0, 0
        self.armed, self.away = True, set()
        stack.callback(self.close)
        worker = ("worker", "--threads")
        self.add("scheduler1", "scheduler")
        self.add("scheduler2", "scheduler")
        self.add("general1", *worker, "3", "--processes", "2")
        self.add("general2", *worker, "2", "--processes", "1")
        self.add("cron", *worker, "2", "--processes", "1", "--queues", "cron")
        self.add("exporter", "exporter")
        self.client = stack.enter_context(self.servers.redis())

    def add(self, name, *arguments):
        port = free_ports(1)[0] if arguments[0] in {"worker", "exporter"} else 0
        redis_proxy, redis_url = redis_through(self.servers.redis_url)
        database_proxy, database_url = postgres_through(self.servers.database_url)
        settings = {**self.world.environment, **ENVIRONMENT, f"metrics_port_{arguments[0]}": port}
        settings |= rights.urls(arguments[0], database_url, redis_url, SECRET)
        folder = self.world.root.parent / name
        folder.mkdir()
        consumed = 1 if "cron" in arguments else len(list_queues())
        # Its main thread and its heartbeat, and for each queue one that fetches and one for what is delayed.
        threads = int(arguments[2]) + 2 * consumed + 2 if arguments[0] == "worker" else 0
        proxies = {"redis_proxy": redis_proxy, "database_proxy": database_proxy}
        self.services.append(Watched(name, arguments, folder, settings, **proxies, threads=threads, port=port))

    def person(self):
        """Return the environment of a command that a person types where the first service is."""
        there = self.services[0].settings
        urls = rights.urls("a command", there[f"{PREFIX}DATABASE_URL"], there[f"{PREFIX}REDIS_URL"], SECRET)
        return there | {PREFIX + name.upper(): url for name, url in urls.items()}

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
        options = {"application_name": "soak", "connect_timeout": int(LIMIT)}
        with closing(psycopg2.connect(self.servers.database_url, **options)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(sql, values or None)
                return cursor.fetchall() if cursor.description else None

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
                if time.monotonic() - service.died < scale_timeout(ORPHANS):
                    continue
                self.history.sample("orphans", service=service.name, pids=left)
                service.kill()
            armed = self.armed and self.dice.random() < 0.2
            self.faults["started again with a failpoint"] += armed
            self.begin(service, self.choose_failpoint() if armed else "")

    def note_outlived(self, service, pids, seconds):
        """Write down who has outlived their SIGTERM, and end them."""
        self.history.sample("outlived", service=service.name, who=pids, seconds=round(seconds, 1))
        service.asked = None
        service.kill()

    def choose_failpoint(self):
        how = ["kill", "raise*2", "sleep:1*2", "sleep:4*1"]
        return f"{self.dice.choice(failpoints())}={self.dice.choice(how)}"

    def begin(self, service, failpoint=""):
        service.settings[f"{PREFIX}FAILPOINTS"] = failpoint
        service.began, service.died, service.asked = time.monotonic(), None, None
        self.restarts += 1
        service.start()

    def be_patient(self):
        """Let what is started from here on take its time."""
        for service in self.services:
            service.settings |= {PREFIX + name.upper(): value for name, value in PATIENT.items()}

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
        if REPLACED.intersection(names):
            self._accept_redis()

    def _accept_redis(self):
        """Let the operator say that Redis was replaced, as the documentation asks: until then no upload is deleted."""
        options = ("--init", "--redis-replaced", "--reason", "the soak emptied it, or rolled a server back")
        for _ in range(ACCEPT_ATTEMPTS):
            said = forks.run(
                ("-m", "forgekeeper.cli", "check", *options),
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.person()},
            )
            # Findings are no matter here: a service that has just been killed may have left some.
            if said.stdout:
                return
            self.let_pass(PAUSE)

    def _go_on(self, name, fault, dice):
        mine, self.dice = self.dice, dice
        try:
            return next(fault, None)
        except (redis.RedisError, psycopg2.Error, InTheWay):
            self.faults[name] -= 1
            return None
        finally:
            self.dice = mine

    @contextmanager
    def noted(self, server, do):
        """Write down when it was done to that server."""
        operation, outcome = self.history.begin(server, do), "failed"
        try:
            yield
            outcome = "ok"
        finally:
            operation.end(outcome)

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


@contextmanager
def nothing_armed(rig):
    """Let what is started from here on live."""
    armed, rig.armed = rig.armed, False
    yield
    rig.armed = armed
