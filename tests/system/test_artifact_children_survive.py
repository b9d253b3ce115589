"""Ten children destroy 200,000 artifacts, in real workers: left alone, while the flag flips, while they are killed.

CHILDREN_CHAOS_SECONDS sets for how long workers are killed; CHAOS_SEED repeats a schedule
of kills (their effects depend on timing all the same).
"""

import os
import random
import shutil
import threading
import time
from collections import Counter
from contextlib import closing
from datetime import datetime
from itertools import accumulate, cycle

import orjson
import psycopg2
import pytest

from forgekeeper.storage import sentinel
from tests.harness.installation import INSTALLATION
from tests.harness.waiting import wait_until

DURATION = float(os.environ.get("CHILDREN_CHAOS_SECONDS", "20"))
SEED = int(os.environ.get("CHAOS_SEED", random.randrange(2**32)))
ARTIFACTS, PROJECTS, FOLDERS = 200_000, 97, 64
CHILDREN = 10
FLIP_EVERY = 1.0
PACES = {"flips": "1000", "kills": "700"}
"""Artifacts a second for each child: slow enough that the faults last and hit children at work."""
READY = "Worker process is ready for action."
PATIENCE = 180.0
LOOK_EVERY = 0.1
WORKERS, PROCESSES = 2, 2
# A process may fetch all the children at once, and then has to have a thread for each, and for a run of both batches.
WORKER = ("worker", "--processes", str(PROCESSES), "--threads", str(CHILDREN + 2))
ENVIRONMENT = {
    "cron_expired_job_artifacts": "* * * * * *",
    "cron_delete_objects": "*/2 * * * * *",
    "cron_user_status_cleanup": "off",
    "cron_stale_direct_uploads": "off",
    "cron_stale_imports": "off",
    "cron_prune": "off",
    "retry_after": "1",
    "poll_interval": "0.5",
    "database_lock_timeout": "10",
    "log_format": "json",
}
IMPATIENT = {"bucket_silent_after": "2", "object_visibility": "3", "dead_after": "2"}
"""Where workers die, and only there: a busy machine must not be taken for a dead worker."""
PATIENT = {"bucket_silent_after": "30", "object_visibility": "30", "dead_after": "30"}
PATIENT |= {"database_connect_timeout": "15", "redis_timeout": "15"}

# Five of eight are deletable; the others are traces, locked or not due yet.
SEED_ARTIFACTS = f"""
    insert into ci_job_artifacts (project_id, job_id, file_type, file_final_path, size, expire_at, locked)
    select 1 + id % {PROJECTS}, id, case id % 8 when 0 then 3 else 1 end, (id % {FOLDERS}) || '/' || id, id * 7919 % 100003,
        now() - interval '1 day' + case id % 8 when 1 then interval '2 days' else id * interval '1 ms' end,
        case id % 8 when 2 then 1 else 0 end
    from generate_series(1, {ARTIFACTS}) as id
"""
SEED_STATISTICS = """
    insert into project_statistics select project_id, 1000 + sum(size) from ci_job_artifacts group by project_id
"""
DELETABLE = "expire_at < now() and locked = 0 and file_type <> 3"
ANY_DELETABLE = f"select exists (select from ci_job_artifacts where {DELETABLE})"
SURVIVORS = f"""
    select count(*), bit_xor(hashtextextended(artifact::text, 1)) from ci_job_artifacts as artifact
    where not ({DELETABLE})
"""
WRONG_STATISTICS = """
    select project_id from project_statistics
    left join (select project_id, sum(size) as left_over from ci_job_artifacts group by project_id) as artifacts
        using (project_id)
    where build_artifacts_size <> 1000 + coalesce(left_over, 0)
"""
TURN = """
    insert into feature_flags (name, enabled) values (%s, %s)
    on conflict (name) do update set enabled = excluded.enabled, updated_at = now()
"""
# Every object that was ever recorded, whatever becomes of its row.
WATCH = """
    create table recorded (path text);
    create function watch() returns trigger language plpgsql as
        $$ begin insert into recorded select store_dir || '/' || file from added; return null; end $$;
    create trigger watch after insert on ci_deleted_objects referencing new table as added
        for each statement execute function watch();
"""
DEADLOCKS = "select deadlocks from pg_stat_database where datname = current_database()"
# A session counts its deadlocks at the latest when it ends.
OTHERS = """
    select from pg_stat_activity
    where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()
        and application_name <> 'forgekeeper tests'
"""
FLAG = "bulk_delete_job_artifacts"
HIGH_CONCURRENCY_FLAG = f"{FLAG}_high_concurrency"


class Forge:
    """Artifacts, what they add up to, a file for each, and the workers that are to destroy some."""

    def __init__(self, connection, store, services):
        self.connection = connection
        self.store = store
        self._services = services
        self.ask(WATCH)
        self.ask(SEED_ARTIFACTS)
        self.ask(SEED_STATISTICS)
        self._make_files()
        self.deletable, self.survivors = self.paths(DELETABLE), self.paths(f"not ({DELETABLE})")
        self.untouched = self.ask(SURVIVORS)
        self.deadlocks = self.ask(DEADLOCKS)
        self.turn(FLAG, on=True)
        self.turn(HIGH_CONCURRENCY_FLAG, on=True)

    def _make_files(self):
        # Links: ext4 takes minutes to make so many files of their own where as many have just been deleted.
        for folder in range(FOLDERS):
            (self.store / str(folder)).mkdir()
            (self.store.parent / str(folder)).touch()
        for path in self.paths():
            os.link(self.store.parent / path.partition("/")[0], self.store / path)

    def ask(self, sql, *values):
        with self.connection.cursor() as cursor:
            cursor.execute(sql, values or None)
            return cursor.fetchall() if cursor.description else None

    def paths(self, condition="true"):
        return {path for (path,) in self.ask(f"select file_final_path from ci_job_artifacts where {condition}")}

    def count(self, table):
        return self.ask(f"select count(*) from {table}")[0][0]

    def files(self):
        folders = [(os.path.relpath(folder, self.store), names) for folder, _, names in os.walk(self.store)]
        return {os.path.normpath(f"{folder}/{name}") for folder, names in folders for name in names} - {sentinel.NAME}

    def turn(self, flag, *, on):
        self.ask(TURN, flag, on)

    def start(self, **environment):
        stores = {"object_stores": orjson.dumps({"artifacts": f"file://{self.store}"}).decode()}
        environment = ENVIRONMENT | stores | environment
        self.workers = [self._services(f"worker{number}", *WORKER, **environment) for number in range(WORKERS)]
        assert wait_until(lambda: len(self.lines(READY)) == WORKERS * PROCESSES, 90), "not all workers came up"
        self.scheduler = self._services("scheduler", "scheduler", **environment)
        self.began = time.monotonic()
        assert wait_until(lambda: self.count("recorded") > 0, 90), "nothing was ever destroyed"

    def until(self, condition, seconds=PATIENCE):
        """Wait for *condition*; a worker that has died is started again meanwhile."""
        pacing = threading.Event()

        def holds():
            pacing.wait(LOOK_EVERY)
            for worker in self.workers:
                worker.restart_if_dead()
            return condition()

        return wait_until(holds, seconds)

    def all_destroyed(self):
        return self.ask(ANY_DELETABLE) == [(False,)]

    def finish(self):
        """Wait until there is nothing to do; then each deletable one went once, and nothing else was touched."""
        assert self.until(self.all_destroyed), "deletable artifacts were left"
        destroyed = time.monotonic() - self.began
        assert self.until(lambda: self.count("ci_deleted_objects") == 0), "the outbox did not become empty"
        emptied = time.monotonic() - self.began
        statuses = [service.stop() for service in (self.scheduler, *self.workers)]
        assert wait_until(lambda: not self.ask(OTHERS), 30)

        assert self.ask(SURVIVORS) == self.untouched
        assert self.paths() == self.survivors
        assert self.ask(WRONG_STATISTICS) == []
        recorded = Counter(path for (path,) in self.ask("select path from recorded"))
        assert recorded == dict.fromkeys(self.deletable, 1)
        assert self.files() == self.survivors
        assert self.ask(DEADLOCKS) == self.deadlocks
        assert statuses == [0, 0, 0]
        return (
            f"{len(self.deletable):,} of {ARTIFACTS:,} artifacts destroyed after {destroyed:.1f} s,"
            f" their objects after {emptied:.1f} s"
        )

    def lines(self, message):
        return [line for worker in self.workers for line in worker.lines() if line.get("message") == message]

    def endings(self):
        return Counter(line["stopped"] for line in self.lines("child finished") if line["destroyed"])

    def most_at_once(self):
        """Return how many children that destroyed something were at work at the same moment."""
        steps = []
        for line in self.lines("child finished"):
            if line["destroyed"]:
                ended = datetime.fromisoformat(line["at"]).timestamp()
                steps += [(ended - line["seconds"], 1), (ended, -1)]
        return max(accumulate(step for _, step in sorted(steps)))


@pytest.fixture
def store(tmp_path):
    """Make an empty store; pytest would keep the files of three sessions."""
    root = tmp_path / "store"
    root.mkdir()
    (root / sentinel.NAME).write_bytes(sentinel.text(INSTALLATION))
    yield root
    shutil.rmtree(root)


@pytest.fixture
def forge(database, urls, store, services):
    with closing(psycopg2.connect(urls.database)) as connection:
        connection.autocommit = True
        forge = Forge(connection, store, services)
        yield forge
        forge.ask("drop function watch cascade; drop table recorded")


def test_ten_children_destroy_each_artifact_once_and_its_object(forge, say):
    forge.start(**PATIENT)

    figures = forge.finish()

    say(figures, f"  {tally(forge.endings())}; {forge.most_at_once()} children at once")
    assert forge.lines("child failed") == []
    assert forge.most_at_once() == CHILDREN


def test_ten_children_destroy_each_artifact_once_while_the_flag_flips_every_second(forge, say):
    forge.start(pace_expired_job_artifacts=PACES["flips"], **PATIENT)
    flips = 0
    for on in cycle([False, True]):
        if forge.until(forge.all_destroyed, FLIP_EVERY) or flips > PATIENCE:
            break
        forge.turn(HIGH_CONCURRENCY_FLAG, on=on)
        flips += 1

    figures = forge.finish()

    say(figures, f"  {flips} flips; {tally(forge.endings())}")
    assert forge.lines("child failed") == []
    assert flips > 1
    assert forge.endings()["scale_down"] > 0


def test_ten_children_destroy_each_artifact_once_while_workers_are_killed_at_random(forge, say, outcome):
    forge.start(pace_expired_job_artifacts=PACES["kills"], **IMPATIENT)
    dice, kills, before = random.Random(SEED), Counter(), forge.count("recorded")
    bereft = []
    ending = time.monotonic() + DURATION
    while time.monotonic() < ending:
        forge.until(lambda: False, dice.uniform(0.3, 2))
        kills[kill(dice, forge.workers, bereft)] += 1
    meanwhile, ended = forge.count("recorded") - before, time.monotonic()
    # The master of a killed process ends because of it, but seconds later, with a status of its own.
    assert forge.until(lambda: all(master.poll() is not None for master in bereft)), "a master outlived its process"

    figures = forge.finish()
    outcome(1, injected=kills.total() - kills["nobody there"], recovery=[time.monotonic() - ended])

    say(
        f"seed {SEED}: {figures}",
        f"  {tally(kills)} in {DURATION:.0f} s, {meanwhile:,} artifacts destroyed meanwhile",
        f"  {tally(forge.endings())}; {len(forge.lines('child failed'))} children failed",
    )
    assert kills.total() > kills["nobody there"]
    assert 0 < meanwhile < len(forge.deletable)


def kill(dice, workers, bereft):
    """Kill a worker, or a process of it, whose master joins the *bereft*."""
    worker = dice.choice(workers)
    if dice.random() < 0.3:
        worker.kill()
        return "workers killed with their masters"
    if not worker.kill_a_child(dice):
        return "nobody there"
    bereft.append(worker.process)
    return "worker processes killed"


def tally(counts):
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())
