"""Everything that can be done to servers, services and the ways between them.

A fault is a generator: it breaks something, yields for how many seconds it stays so, and repairs
it when it is resumed or closed.
"""

from __future__ import annotations

import resource
import signal
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psycopg2

from tests.harness.waiting import scale_timeout
from tests.system.worlds import bring_back, take_away

from .settings import DEAD_AFTER, ENVIRONMENT, PAUSE

STOPPED_AT = [("clean_project_refs.announced", DEAD_AFTER)] * 4 + [
    ("delete_artifact_bucket.claimed", float(ENVIRONMENT["bucket_silent_after"])),
    ("delete_objects.marked", float(ENVIRONMENT["object_visibility"])),
    ("stale_direct_uploads.marked", float(ENVIRONMENT["upload_visibility"])),
]
"""Steps after which a worker deletes, and the seconds for which its lease or claim lasts then."""
STEP_SECONDS = 4.0
"""Seconds that the step takes, and within which the worker is stopped; until then it renews its lease."""
LONGEST_WAIT_SECONDS = 10.0
"""Seconds after its start in which a worker may come to the step."""
TAKEN_OVER_SECONDS = 4.0
"""Seconds in which another worker takes over and does the work, if the machine is quick."""


LONGEST_STOP_SECONDS = 20.0
"""Even on a busy machine: no run may take longer than its budget."""


class InTheWay(Exception):
    """Another fault is in the way of this one."""


def _kill_worker_process(rig):
    for _ in range(rig.dice.randint(1, 3)):
        yield rig.dice.uniform(0, 1.5)
        rig.dice.choice(rig.workers).kill_a_child(rig.dice)


def _kill_master(rig):
    yield 0
    service = rig.dice.choice(rig.workers)
    service.signal(signal.SIGKILL, [service.pid])


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
    yield from _stop(service, pids, rig.dice.uniform(DEAD_AFTER, 3 * DEAD_AFTER))


def _stop_between_steps(rig):
    """Stop a worker between two steps, for longer than its lease or claim lasts: another worker does its work."""
    step, claim_seconds = rig.dice.choice(STOPPED_AT)
    service = rig.dice.choice([service for service in rig.workers if service.name != "cron"])
    service.kill()
    rig.begin(service, f"{step}=sleep:{STEP_SECONDS:g}*1")
    for _ in range(round(LONGEST_WAIT_SECONDS / PAUSE)):
        if service.said("failpoint reached"):
            pids = service.group() if rig.dice.random() < 0.5 else service.children
            seconds = claim_seconds + scale_timeout(rig.dice.uniform(TAKEN_OVER_SECONDS, 2 * TAKEN_OVER_SECONDS))
            yield from _stop(service, pids, min(seconds, LONGEST_STOP_SECONDS))
            return
        yield PAUSE
    raise InTheWay


def _stop(service, pids, seconds):
    began = time.monotonic()
    service.signal(signal.SIGSTOP, pids)
    try:
        yield seconds
    finally:
        service.signal(signal.SIGCONT, pids)
        if service.asked is not None:
            service.asked += time.monotonic() - began


def _ask_to_end(rig):
    service = rig.dice.choice(rig.services)
    whom = [service.pid] if rig.dice.random() < 0.5 else service.group()
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
        some = [service for service in rig.services if rig.dice.random() < 0.5]
        proxies = [getattr(service, kind) for service in some or rig.services]
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


def _terminate_sessions(rig):
    yield 0
    _terminate(rig, rig.dice.choice([0.3, 1.0]))


def _terminate(rig, share):
    rig.ask(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name like 'forgekeeper%%' and random() < %s",
        share,
    )


def _use_up_connections(rig):
    """End a part of the sessions and take all connections that there are: what wants one waits."""
    with ExitStack() as taken:
        _terminate(rig, 0.5)
        with suppress(psycopg2.OperationalError):
            while True:
                taken.enter_context(closing(psycopg2.connect(rig.servers.database_url, application_name="hoarder")))
        yield rig.dice.uniform(1, 5)


def _restart_postgres(rig):
    yield 0
    rig.servers.restart_postgres(rig.dice.choice([signal.SIGINT, signal.SIGQUIT]))


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
    rig.begin(service, rig.choose_failpoint())
    yield rig.dice.uniform(2, 5)


HARD = {
    "scripts flushed": _forget_scripts,
    "descriptors used up": _limited(resource.RLIMIT_NOFILE, _descriptors),
    "memory used up": _limited(resource.RLIMIT_AS, _memory("VmSize")),
    "data memory used up": _limited(resource.RLIMIT_DATA, _memory("VmData")),
    "Redis frozen": _frozen("redis"),
    "PostgreSQL frozen": _frozen("postgres"),
    "Redis rolled back": _rolled_back("redis"),
    "PostgreSQL rolled back": _rolled_back("postgres"),
    "disk of Redis full": _fill_redis_disk,
    "no connections left": _use_up_connections,
}
"""One of these is in every round, and each in one of so many."""
FAULTS = HARD | {
    "worker process killed": _kill_worker_process,
    "master killed": _kill_master,
    "worker killed as a whole": _kill_group,
    "scheduler killed": _kill_scheduler,
    "process stopped for a while": _stop_and_continue,
    "worker stopped between two steps": _stop_between_steps,
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
OFTEN = (
    "worker process killed",
    "master killed",
    "process stopped for a while",
    "worker stopped between two steps",
    "worker started with a failpoint",
)
"""These meet a run only if they come at the right moment."""


def rounds(dice):
    """Choose the faults of each round."""
    while True:
        for first in dice.sample(sorted(HARD), len(HARD)):
            rest = dice.sample([*sorted(FAULTS), *OFTEN, *OFTEN], dice.choice([1, 2, 2, 3, 4]))
            yield [first, *rest]
