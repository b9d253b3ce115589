"""A primary of PostgreSQL is killed under load, and its standby promoted."""

import time
from contextlib import ExitStack, closing, suppress
from threading import Event, Thread

import psycopg2
import pytest
import redis

from forgekeeper.api.batches import BATCHES
from tests.harness.waiting import scale_timeout, wait_until

from .replication import ReplicatedServers

LIMIT = 60.0
RECOVERY_SECONDS = 10.0
"""Time from the promotion to the next run that succeeds, as the design page on shipping asks."""
BATCH = "user_status_cleanup"
SETTINGS = {f"cron_{batch}": "off" for batch in BATCHES} | {f"cron_{BATCH}": "* * * * * *", "log_format": "json"}
USERS_PER_INSERT = 20
INSERT_STATUSES = """
    insert into user_statuses (user_id, clear_status_at)
    select number, now() - interval '1 hour' from generate_series(%s, %s) as number
"""
COUNT_STATUSES = "select count(*) from user_statuses"
# Each row of the audit has the ids of the rows that a chunk has deleted.
SELECT_DELETED = """
    select array(select one from audit_deletions, unnest(ids) as one where batch = 'user_status_cleanup' and phase = 'done')
"""
NEWEST_SUCCESS = "select extract(epoch from max(started_at)) from job_runs where batch = %s and state = 'succeeded'"


class Producer(Thread):
    """Inserts expired statuses, through both hosts, until it is stopped."""

    def __init__(self, servers):
        super().__init__(daemon=True)
        self._servers, self._stopped = servers, Event()
        self.next_user = 1
        self.unknown = set()
        """Users whose insert was not acknowledged."""

    def run(self):
        while not self._stopped.wait(0.02):
            users = range(self.next_user, self.next_user + USERS_PER_INSERT)
            self.next_user = users.stop
            try:
                self._servers.ask(INSERT_STATUSES, (users[0], users[-1]))
            except psycopg2.Error:
                self.unknown |= set(users)

    def stop(self):
        self._stopped.set()
        self.join()


@pytest.fixture
def servers():
    with ExitStack() as stack:
        yield ReplicatedServers(stack)


def newest_success(servers):
    with suppress(psycopg2.Error):
        return float(servers.ask(NEWEST_SUCCESS, (BATCH,))[0] or 0)
    return 0.0


def test_after_a_promotion_the_next_run_succeeds_and_each_row_is_deleted_once(servers, services, urls, tmp_path, say):
    facts = SETTINGS | {"database_url": servers.url, "redis_url": urls.redis}
    with closing(redis.from_url(urls.redis)) as client:
        # It may belong to the installation of another test.
        client.flushdb()
    for words in (("migrate",), ("seed",), ("release", BATCH, "--reason", "test"), ("resume", BATCH)):
        assert services("setup", *words, **facts).process.wait(LIMIT) == 0
    servers.ask("delete from user_statuses")
    servers.replicate_synchronously()
    services("scheduler", "scheduler", **facts)
    services("worker", "worker", "--processes", "1", "--threads", "2", **facts)
    producer = Producer(servers)
    producer.start()
    began = time.time()
    assert wait_until(lambda: newest_success(servers) > began, LIMIT)

    servers.kill_primary()
    servers.promote_standby()
    promoted, since = time.time(), time.monotonic()
    assert wait_until(lambda: newest_success(servers) > promoted, LIMIT)
    recovery = time.monotonic() - since
    producer.stop()
    assert wait_until(lambda: servers.ask(COUNT_STATUSES) == (0,), LIMIT)

    (deleted,) = servers.ask(SELECT_DELETED)
    say(f"the next run succeeded {recovery:.1f} s after the promotion; {len(deleted)} rows were deleted")
    assert (len(deleted), recovery <= scale_timeout(RECOVERY_SECONDS)) == (len(set(deleted)), True)
    assert set(range(1, producer.next_user)) - producer.unknown <= set(deleted)
