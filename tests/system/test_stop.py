"""`forgekeeper stop --all` in the middle of the work: how long after it the last deletion is committed.

Ten children destroy artifacts, others delete the refs of many projects, and a run deletes statuses, in real workers;
then everything is stopped by the command.  A trigger notes when each deletion is made.
"""

import os
import threading
from contextlib import closing

import psycopg2
import pytest

from demo import sample_data as sample
from forgekeeper.api.batches import BATCHES, FeatureFlag
from forgekeeper.platform.settings import PREFIX
from tests.harness import forks, many_rows
from tests.harness.artifacts import due_artifacts
from tests.harness.git_samples import BareRepository
from tests.harness.programs import ROOT
from tests.harness.waiting import scale_timeout, wait_until

from .proxy import redis_through

ARTIFACTS, STATUSES = 40_000, 30_000
REPOSITORIES, REFS_EACH = 30, 100
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
    # What each child does in a second: there is something to stop for a minute, however busy the machine.
    "pace_expired_job_artifacts": "50",
    "pace_git_ref_cleanup": "25",
    "pace_user_status_cleanup": "500",
}

# One statement is one transaction here: it is committed right after this clock is read.
WATCH = """
    create table gone (what text, at timestamptz, records bigint);
    create function watch() returns trigger language plpgsql as $$ begin
        insert into gone select tg_table_name, clock_timestamp(), count(*) from went having count(*) > 0; return null;
    end $$;
"""
WATCHED = """
    create trigger watch after {} referencing old table as went for each statement execute function watch()
"""
DELETIONS = "delete on ci_job_artifacts", "delete on user_statuses", "update on batched_git_ref_updates_deletions"
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
        for deletion in DELETIONS:
            self.ask(WATCHED.format(deletion))
        for flag in ("bulk_delete_job_artifacts", "bulk_delete_job_artifacts_high_concurrency"):
            FeatureFlag.turn(flag, on=True)
        due_artifacts(ARTIFACTS, step=1)
        many_rows.statuses(STATUSES)
        projects, refs = sample.add_projects(REPOSITORIES), [f"refs/doomed/{ref}" for ref in range(REFS_EACH)]
        self.bares = [BareRepository(root, disk_path) for disk_path in projects.values()]
        for bare in self.bares:
            bare.packed(*refs)
        sample.add_ref_deletions(list(projects), refs)
        self.ask("analyze ci_job_artifacts, user_statuses, batched_git_ref_updates_deletions")
        services("scheduler", "scheduler", **settings)
        self.worker = services("worker", *WORKER, **settings)

    def ask(self, sql, **values):
        with self.connection.cursor() as cursor:
            cursor.execute(sql, values)
            return cursor.fetchall() if cursor.description else None

    def under_way(self):
        """Wait until all three are."""
        kinds = "select count(distinct what) from gone where at > %(since)s"
        (before,) = self.ask("select clock_timestamp()")[0]
        assert wait_until(lambda: self.ask(kinds, since=before)[0][0] == 3, PATIENCE), "not all is under way"

    def stop(self):
        """Stop everything."""
        command = ("-m", "forgekeeper.cli", "stop", "--all", "--reason", "a drill")
        done = forks.run(command, env={**os.environ, "PYTHONPATH": str(ROOT), **self._environment}, cwd=self._root)
        assert done.returncode == 0, done.stderr

    def refs_after(self, seconds):
        """Return how many refs there are so much later."""
        threading.Event().wait(seconds)
        return sum(name.startswith("refs/doomed/") for bare in self.bares for name in bare.refs())

    def last(self):
        """Wait until it would be late; return what was deleted last after the stop of each kind, and how many of it."""
        ((since,),) = self.ask("select min(since) from holds")
        refs = self.refs_after(scale_timeout(SOON))
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
    assert longest(last) < scale_timeout(SOON)
    assert town.ask("select count(*) from job_runs where state = 'started'") == [(0,)]
    assert not town.worker.said("child failed")


def test_a_stop_works_while_redis_is_away(town, proxy):
    town.under_way()
    proxy[0].black_hole()

    town.stop()

    assert longest(town.last()) < scale_timeout(SOON)
