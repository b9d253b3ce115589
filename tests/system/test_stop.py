"""`forgekeeper stop --all` in the middle of the work: how long after it the last deletion is committed.

Ten children destroy artifacts, others delete the refs of many projects, and a run deletes statuses, in real workers;
then everything is stopped by the command.  A trigger notes when each deletion is made.
"""

import os
import subprocess
import sys
import threading
from contextlib import closing

import psycopg2
import pytest

from forgekeeper.batches import BATCHES
from forgekeeper.settings import PREFIX
from models import Project
from tests.harness.git_samples import Bare
from tests.harness.programs import ROOT
from tests.harness.waiting import patient, wait_until

from .proxy import redis_through

ARTIFACTS, STATUSES = 20_000, 30_000
REPOSITORIES, REFS_EACH = 30, 100
PROJECTS = 97
CHILDREN = 10
SOON = 5.0
"""Seconds in which a stop has to work, everywhere."""
STILL = 6.0
"""Seconds after these in which nothing more may go: longer than a retry, a heartbeat and a turn of the scheduler take."""
PATIENCE = 120.0
WORKER = ("worker", "--processes", "2", "--threads", str(CHILDREN + 4))
ENVIRONMENT = {f"cron_{name}": "off" for name in BATCHES} | {
    "cron_expired_job_artifacts": "* * * * * *",
    "cron_git_ref_cleanup": "* * * * * *",
    "cron_user_status_cleanup": "* * * * * *",
    "retry_after": "1",
    # Children that die with Redis leave their buckets behind.
    "bucket_silent_after": "5",
    "poll_interval": "0.5",
    "database_lock_timeout": "10",
    "log_format": "json",
    # So that there is something left to stop: it is what each child does in a second.
    "pace_expired_job_artifacts": "300",
    "pace_git_ref_cleanup": "25",
    "pace_user_status_cleanup": "3000",
}

ADD_ARTIFACTS = f"""
    insert into ci_job_artifacts (project_id, job_id, file_type, file_final_path, size, expire_at, locked)
    select 1 + id %% {PROJECTS}, id, 1, 'due/' || id, id, now() - interval '1 day', 0
    from generate_series(1, %s) as id
"""
ADD_STATUSES = """
    insert into user_statuses (user_id, clear_status_at)
    select coalesce((select max(user_id) from user_statuses), 0) + id, now() - interval '1 day'
    from generate_series(1, %s) as id
"""
DOOM = """
    insert into batched_git_ref_updates_deletions (project_id, ref)
    select project, 'refs/doomed/' || id from generate_series(1, %s) as project, generate_series(1, %s) as id
"""
FLAGS = """
    insert into feature_flags (name, enabled)
    values ('bulk_delete_job_artifacts', true), ('bulk_delete_job_artifacts_high_concurrency', true)
    on conflict (name) do update set enabled = true
"""
# One statement is one transaction here: it is committed right after this clock is read.
WATCH = """
    create table gone (what text, at timestamptz, records bigint);
    create function watch() returns trigger language plpgsql as $$ begin
        insert into gone select tg_table_name, clock_timestamp(), count(*) from went having count(*) > 0; return null;
    end $$;
    create trigger watch after delete on ci_job_artifacts referencing old table as went
        for each statement execute function watch();
    create trigger watch after delete on user_statuses referencing old table as went
        for each statement execute function watch();
    create trigger watch after update on batched_git_ref_updates_deletions referencing old table as went
        for each statement execute function watch();
"""
LAST = """
    select what, extract(epoch from max(at) - %(since)s)::float, sum(records) filter (where at > %(since)s)
    from gone group by what having max(at) > %(since)s
"""


class Town:
    """Work of three kinds, and the workers that do it."""

    def __init__(self, connection, root, services, redis_url):
        self.connection, self._root = connection, root
        settings = ENVIRONMENT | {"repositories_root": str(root), "redis_url": redis_url}
        self._environment = {PREFIX + name.upper(): value for name, value in settings.items()}
        self.ask(WATCH)
        self.ask(FLAGS)
        self.ask(ADD_ARTIFACTS, ARTIFACTS)
        self.ask(ADD_STATUSES, STATUSES)
        self.bares = [Bare(root, f"{number}.git") for number in range(1, REPOSITORIES + 1)]
        for number, bare in enumerate(self.bares, 1):
            Project.create(id=number, disk_path=bare.disk_path)
            bare.packed(*(f"refs/doomed/{ref}" for ref in range(1, REFS_EACH + 1)))
        self.ask(DOOM, REPOSITORIES, REFS_EACH)
        self.ask("analyze ci_job_artifacts, user_statuses, batched_git_ref_updates_deletions")
        services("scheduler", "scheduler", **settings)
        self.worker = services("worker", *WORKER, **settings)

    def ask(self, sql, *values, **named):
        with self.connection.cursor() as cursor:
            cursor.execute(sql, values or named or None)
            return cursor.fetchall() if cursor.description else None

    def under_way(self):
        """Wait until all three are."""
        kinds = "select count(distinct what) from gone where at > %(since)s"
        (before,) = self.ask("select clock_timestamp()")[0]
        assert wait_until(lambda: self.ask(kinds, since=before)[0][0] == 3, PATIENCE), "not all is under way"

    def stop(self):
        """Stop everything."""
        done = subprocess.run(
            [sys.executable, "-m", "forgekeeper.cli", "stop", "--all", "--reason", "a drill"],
            cwd=self._root,
            env={**os.environ, "PYTHONPATH": str(ROOT), **self._environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def refs_after(self, seconds):
        """Return how many refs there are so much later."""
        threading.Event().wait(seconds)
        return sum(name.startswith("refs/doomed/") for bare in self.bares for name in bare.refs())

    def last(self):
        """Wait until it would be late; return what was deleted last after the stop of each kind, and how many of it."""
        ((since,),) = self.ask("select min(since) from holds")
        refs = self.refs_after(patient(SOON))
        assert self.refs_after(STILL) == refs, "refs went long after the stop"
        return {what: (round(seconds, 2), int(records)) for what, seconds, records in self.ask(LAST, since=since)}


@pytest.fixture
def proxy(urls):
    proxy, url = redis_through(urls.redis)
    with proxy:
        yield proxy, url


@pytest.fixture
def town(database, urls, root, services, proxy):
    with closing(psycopg2.connect(urls.database)) as connection:
        connection.autocommit = True
        town = Town(connection, root, services, proxy[1])
        yield town
        town.ask("drop function watch cascade; drop table gone")


def longest(last):
    return max((seconds for seconds, _ in last.values()), default=0.0)


def test_a_stop_ends_every_run_and_child_within_five_seconds(town, say):
    town.under_way()

    town.stop()
    last = town.last()

    say(f"seconds from the stop to the last deletion, and how many went meanwhile: {last}")
    assert longest(last) < patient(SOON)
    assert town.ask("select count(*) from job_runs where state = 'started'") == [(0,)]
    assert not town.worker.said("child failed")


def test_a_stop_works_while_redis_is_away(town, proxy):
    town.under_way()
    proxy[0].black_hole()

    town.stop()

    assert longest(town.last()) < patient(SOON)
