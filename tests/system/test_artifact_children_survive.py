"""Artifacts and their objects, deleted by real workers that are killed while the flag flips.

CHILDREN_CHAOS_SECONDS sets how long; CHAOS_SEED repeats a schedule of faults (their
effects depend on timing all the same).
"""

import os
import random
import sys
import threading
import time
from collections import Counter
from contextlib import closing

import orjson
import psycopg2
import pytest

from embedded.waiting import wait_until
from storage import sentinel

DURATION = float(os.environ.get("CHILDREN_CHAOS_SECONDS", "30"))
SEED = int(os.environ.get("CHAOS_SEED", random.randrange(2**32)))
ARTIFACTS = 16_000
PACE = 70
"""Artifacts a second for each child: slow enough that most kills hit one at work, and no living one is silent for long."""
RECOVERY = 60.0
LOOK_EVERY = 0.05
ENVIRONMENT = {
    "cron_expired_job_artifacts": "* * * * * *",
    "cron_delete_objects": "*/2 * * * * *",
    "cron_user_status_cleanup": "off",
    "cron_stale_direct_uploads": "off",
    "cron_stale_imports": "off",
    "cron_prune": "off",
    "pace_expired_job_artifacts": str(PACE),
    "bucket_silent_after": "2",
    "dead_after": "2",
    "poll_interval": "0.5",
    "log_format": "json",
}

# Five of eight are deletable; the others are traces, locked or not due yet.
SEED_ARTIFACTS = """
    insert into ci_job_artifacts (project_id, job_id, file_type, file_final_path, size, expire_at, locked)
    select 1 + id %% 97, id, case id %% 8 when 0 then 3 else 1 end, (id %% 64) || '/' || id, id * 7919 %% 100003,
        now() - interval '1 day' + case id %% 8 when 1 then interval '2 days' else id * interval '1 ms' end,
        case id %% 8 when 2 then 1 else 0 end
    from generate_series(1, %s) as id
"""
SEED_STATISTICS = """
    insert into project_statistics select project_id, 1000 + sum(size) from ci_job_artifacts group by project_id
"""
DELETABLE = "expire_at < now() and locked = 0 and file_type <> 3"
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
# A killed `delete_objects` keeps what it has claimed for ten minutes, which is a constant.
AGE_CLAIMS = "update ci_deleted_objects set pick_up_at = now() where pick_up_at > now()"
# Every object that was ever recorded, whatever becomes of its row.
WATCH = """
    create table recorded (store_dir text, file text);
    create function watch() returns trigger language plpgsql as
        $$ begin insert into recorded values (new.store_dir, new.file); return new; end $$;
    create trigger watch before insert on ci_deleted_objects for each row execute function watch();
"""
FLAG = "bulk_delete_job_artifacts"
FLAGS = (FLAG, f"{FLAG}_high_concurrency")


def ask(connection, sql, *values):
    with connection.cursor() as cursor:
        cursor.execute(sql, values or None)
        return cursor.fetchall() if cursor.description else None


@pytest.fixture
def connection(database, urls):
    with closing(psycopg2.connect(urls.database)) as connection:
        connection.autocommit = True
        yield connection


@pytest.fixture
def recorded(connection):
    """Tell how often each object was recorded so far."""
    ask(connection, WATCH)
    yield lambda: Counter(path for (path,) in ask(connection, "select store_dir || '/' || file from recorded"))
    ask(connection, "drop function watch cascade; drop table recorded")


@pytest.fixture
def store(tmp_path):
    root = tmp_path / "store"
    root.mkdir()
    (root / sentinel.NAME).write_bytes(sentinel.TEXT)
    return root


def paths(connection, condition="true"):
    return {path for (path,) in ask(connection, f"select file_final_path from ci_job_artifacts where {condition}")}


def objects(store):
    return {str(file.relative_to(store)) for file in store.rglob("*") if file.is_file()} - {sentinel.NAME}


def seed(connection, store):
    """Add artifacts, what they add up to, and a file for each."""
    ask(connection, SEED_ARTIFACTS.replace("%%", "%").replace("%s", str(ARTIFACTS)))
    ask(connection, SEED_STATISTICS)
    for path in paths(connection):
        (store / path).parent.mkdir(exist_ok=True)
        (store / path).write_bytes(b"bytes")


def test_artifacts_and_objects_go_once_while_workers_are_killed(connection, services, store, recorded, capsys):
    seed(connection, store)
    environment = ENVIRONMENT | {"object_stores": orjson.dumps({"artifacts": f"file://{store}"}).decode()}
    deletable, survivors = paths(connection, DELETABLE), paths(connection, f"not ({DELETABLE})")
    for flag in FLAGS:
        ask(connection, TURN, flag, True)
    scheduler = services("scheduler", "scheduler", **environment)
    arguments = ("worker", "--processes", "2", "--threads", "3")
    workers = [services(f"worker{n}", *arguments, **environment) for n in range(2)]
    assert wait_until(lambda: len(paths(connection)) < ARTIFACTS, 30), "nothing was ever destroyed"

    faults, during = torment(connection, workers)

    ended = time.monotonic()
    destroyed = eventually(workers, lambda: not paths(connection, DELETABLE))
    ask(connection, AGE_CLAIMS)
    forgotten = eventually(workers, lambda: ask(connection, "select count(*) from ci_deleted_objects") == [(0,)])
    recovery = time.monotonic() - ended
    statuses = [service.stop() for service in (scheduler, *workers)]
    with capsys.disabled():
        sys.stdout.write(summary(faults, during, workers, len(deletable), recovery))

    assert destroyed, "deletable artifacts were left"
    assert forgotten, "the outbox did not become empty"
    assert paths(connection) == survivors
    assert ask(connection, WRONG_STATISTICS) == []
    assert objects(store) == survivors
    assert recorded() == dict.fromkeys(deletable, 1)
    assert statuses == [0, 0, 0]
    assert during["destroyed while workers were killed"] > 0


def eventually(workers, condition):
    """Wait; a worker that lost a process ends a little later, and has to be started again."""

    def looked():
        for worker in workers:
            worker.restart_if_dead()
        return condition()

    return wait_until(looked, RECOVERY)


def torment(connection, workers):
    """Kill a worker or a process of one every second or two, and flip the flags."""
    dice, faults = random.Random(SEED), Counter()
    before = len(paths(connection))
    ending, next_fault = time.monotonic() + DURATION, time.monotonic() + 1
    pacing = threading.Event()
    while time.monotonic() < ending:
        pacing.wait(LOOK_EVERY)
        for worker in workers:
            worker.restart_if_dead()
        if time.monotonic() >= next_fault:
            faults[inject(dice, connection, workers)] += 1
            next_fault += dice.uniform(0.5, 3)
    return faults, {"destroyed while workers were killed": before - len(paths(connection))}


def inject(dice, connection, workers):
    kind = dice.choice(["a worker with its master", "a worker process", "a worker process", "the number of buckets"])
    if kind == "the number of buckets":
        on = dice.choice([True, False])
        ask(connection, TURN, FLAGS[1], on)
        return f"{kind} set to {10 if on else 5}"
    if kind == "a worker with its master":
        dice.choice(workers).kill()
    elif not dice.choice(workers).kill_a_child(dice):
        return "nobody there"
    return f"{kind} killed"


def lines(workers, message):
    return [line for worker in workers for line in worker.lines() if line.get("message") == message]


def summary(faults, during, workers, deletable, recovery):
    endings = Counter(line["stopped"] for line in lines(workers, "child finished"))
    said = [f"\nseed {SEED}, {DURATION:.0f} s, {deletable:,} of {ARTIFACTS:,} artifacts deletable, {during}"]
    for title, counts in (("faults", faults), ("children that ended", endings)):
        said += [f"  {title} ({counts.total()})", *(f"    {count:5} {name}" for name, count in counts.most_common())]
    failed = len(lines(workers, "child failed"))
    return "\n".join([*said, f"  {failed} children failed; all done {recovery:.1f} s after the last fault\n"])
