"""A storm of kills: workers are killed every few seconds, and no batch may stop deleting.

    python -m tests.system.storm --seeds 50

All settings are those of production, but for the schedules, the pace and the breaker.  A supervisor starts workers
again as systemd does; a kill waits until two of the three workers are ready, however slow the machine is.  The report
has the records that each batch deleted, and its longest pause: kills and seconds without a deletion.  The exit status
is 1 if a pause had more than `MAX_KILLS_WITHOUT_DELETION`; the logs of that storm are kept.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from tempfile import mkdtemp
from typing import NamedTuple

import redis

from demo import sample_data as sample
from demo.servers import run_servers
from demo.tables import make_tables
from forgekeeper.api.batches import BATCHES, FeatureFlag
from forgekeeper.platform import migrations
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.database.session_settings import Timeouts
from forgekeeper.platform.database.sessions import open_pool
from forgekeeper.sources.register.keys import RegisterKeys
from tests.harness.installation import INSTALLATION
from tests.system.service import Service
from tests.system.worlds import World
from workers.stale_direct_uploads import UPLOADS_REGISTER

MAX_KILLS_WITHOUT_DELETION = 15
"""After a child's third death quarantine keeps it for a minute, which is eleven kills."""
LOOK_SECONDS = 0.5
RESTART_SECONDS = 2.0
"""As `deploy/systemd` has it."""
SETTINGS = {"object_grace": "0", "breaker_share": "1", "log_format": "json"}
SETTINGS |= {f"metrics_port_{process}": "0" for process in ("worker", "scheduler")}
SETTINGS |= {f"cron_{batch}": "*/10 * * * * *" for batch in BATCHES} | {f"pace_{batch}": "50" for batch in BATCHES}
WORKERS, DUE, PROJECTS, REFS = 3, 30_000, 40, 400
ADD_DUE = f"""
    insert into user_statuses (user_id, clear_status_at) select n, now() from generate_series(1, {DUE}) as n;
    insert into bulk_imports (user_id, status, updated_at)
        select n, 1, now() - interval '2 days' from generate_series(1, {DUE}) as n;
    insert into ci_job_artifacts (project_id, job_id, file_type, file_final_path, size, expire_at, locked)
        select mod(n, 7), n, 1, 'artifact/' || n, 1, now() - interval '1 day', 0 from generate_series(1, {DUE}) as n;
    insert into project_statistics select n, {DUE} from generate_series(0, 6) as n;
    insert into deleted_objects (store_dir, file) select 'object', n from generate_series(1, {DUE}) as n;
    analyze
"""
LEFT = {
    "user_status_cleanup": "user_statuses",
    "stale_imports": "bulk_imports where status = 1",
    "expired_job_artifacts": "ci_job_artifacts",
    "delete_objects": "deleted_objects where store_dir = 'object'",
    "git_ref_cleanup": "batched_git_ref_updates_deletions where status = 1",
}


class Progress(NamedTuple):
    """The records that a batch had deleted after so many seconds and kills."""

    seconds: float = 0.0
    kills: int = 0
    records: int = 0


class Pause(NamedTuple):
    """Kills and seconds without a deletion."""

    kills: int
    seconds: float


class Storm:
    """Servers, due work in each batch, a scheduler, and workers that are killed."""

    def __init__(self, stack, folder, seed):
        self.dice, self.kills, self.died_at, self.were_ready = random.Random(seed), 0, {}, set()
        where = stack.enter_context(run_servers())
        open_pool(where.database_url, Timeouts(*[timedelta(minutes=1)] * 5), name="storm", size=1)
        client.connection_pool = redis.ConnectionPool.from_url(where.redis_url)
        stack.enter_context(database.connection_context())
        world = World.make(database, folder)
        self._add_due_work(world)
        settings = SETTINGS | {"database_url": where.database_url, "redis_url": where.redis_url}
        settings |= {name: world.environment[name] for name in ("object_stores", "repositories_root")}
        self.workers = [Service(f"worker{number}", ("worker",), folder, settings) for number in range(WORKERS)]
        for service in (Service("scheduler", ("scheduler",), folder, settings), *self.workers):
            service.start()
            stack.callback(service.kill)
        self.progress = {batch: [Progress()] for batch in (*LEFT, "stale_direct_uploads")}

    def _add_due_work(self, world):
        migrations.apply_pending(database.obj)
        make_tables(database.obj)
        database.execute_sql("update installation set id = %s", (INSTALLATION,))
        FeatureFlag.turn("bulk_delete_job_artifacts", on=True)
        database.execute_sql(ADD_DUE)
        client.zadd(
            RegisterKeys.for_register(UPLOADS_REGISTER.name).pending,
            {f"artifacts:upload/{number}": time.time() - 86_400 for number in range(DUE)},
        )
        refs = [f"refs/merge-requests/{number}/head" for number in range(REFS)]
        projects = sample.add_projects(PROJECTS)
        first, *others = projects.values()
        sample.create_repository(world.repositories, first, refs)
        for path in others:
            shutil.copytree(world.repositories / first, world.repositories / path)
        self.refs, self.listed = {project: list(refs) for project in projects}, 0

    def run(self, kills, every):
        """Kill workers, or processes of theirs, about *every* few seconds; look on for as long after the last kill."""
        began, due = time.monotonic(), self.dice.uniform(0, every)
        while self.kills < kills or time.monotonic() - began < due:
            now = time.monotonic() - began
            self._list_refs()
            self._supervise(now)
            ready = [service for service in self.workers if self._is_ready(service)]
            if now >= due and len(ready) > 1:
                self._kill(self.dice.choice(ready))
                due = now + self.dice.uniform(0.5, 1.5) * every
            for batch, records in self._count_deleted().items():
                if records > self.progress[batch][-1].records:
                    self.progress[batch].append(Progress(now, self.kills, records))
            time.sleep(LOOK_SECONDS)
        for some in self.progress.values():
            some.append(Progress(now, self.kills, some[-1].records))

    def _list_refs(self):
        for project in self.dice.sample(sorted(self.refs), 3):
            some = [self.refs[project].pop() for _ in self.refs[project][:5]]
            sample.add_ref_deletions([project], some)
            self.listed += len(some)

    def _supervise(self, now):
        for service in self.workers:
            if service.process.poll() is not None and now > self.died_at.setdefault(service, now) + RESTART_SECONDS:
                del self.died_at[service]
                service.restart_if_dead()

    def _is_ready(self, service):
        if service.process.poll() is None and service.log not in self.were_ready and service.said("worker ready"):
            self.were_ready.add(service.log)
        return service.process.poll() is None and service.log in self.were_ready

    def _kill(self, service):
        how = self.dice.choice(["process", "master", "whole"])
        self.kills += 1
        if how == "process":
            service.kill_a_child(self.dice)
            return
        kill = os.kill if how == "master" else os.killpg
        with suppress(ProcessLookupError):
            kill(service.pid, signal.SIGKILL)

    def _count_deleted(self):
        made = dict.fromkeys(self.progress, DUE) | {"git_ref_cleanup": self.listed}
        left = {
            batch: database.execute_sql(f"select count(*) from {rows}").fetchone()[0] for batch, rows in LEFT.items()
        }
        left["stale_direct_uploads"] = client.zcard(RegisterKeys.for_register(UPLOADS_REGISTER.name).pending)
        return {batch: made[batch] - count for batch, count in left.items()}


def main():
    """Run a storm for each seed; exit with 1 if a batch deleted nothing for too long."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.storm", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="How many storms, one after another.")
    parser.add_argument("--first", type=int, default=1, help="The first seed.  It repeats whom the kills choose.")
    parser.add_argument("--kills", type=int, default=18, help="Kills in each storm.")
    parser.add_argument("--every", type=float, default=5.5, help="Mean seconds between two kills.")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    pauses = {}
    for seed in range(options.first, options.first + options.seeds):
        folder = Path(mkdtemp(prefix=f"forgekeeper-storm-{seed}-"))
        with ExitStack() as stack:
            storm = Storm(stack, folder, seed)
            storm.run(options.kills, options.every)
        found = {batch: find_longest_pause(some) for batch, some in storm.progress.items()}
        _say(f"seed {seed}: {storm.kills} kills, logs in {folder}")
        for batch, pause in found.items():
            _say(f"  {batch:22} {storm.progress[batch][-1].records:6} records, longest pause {_describe(pause)}")
            pauses.setdefault(batch, []).append(pause)
        if max(found.values()).kills <= MAX_KILLS_WITHOUT_DELETION:
            shutil.rmtree(folder)
    for batch, some in pauses.items():
        _say(
            f"{batch:22} longest pause {_describe(max(some))}, in the median of the storms {_describe(median_low(some))}"
        )
    sys.exit(max(map(max, pauses.values())).kills > MAX_KILLS_WITHOUT_DELETION)


def find_longest_pause(progress):
    """Return the kills and the seconds of the longest time without a deletion."""
    both = pairwise(progress)
    return max(Pause(later.kills - earlier.kills, later.seconds - earlier.seconds) for earlier, later in both)


def _describe(pause):
    return f"{pause.kills} kills, {pause.seconds:.0f} s"


def _say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
