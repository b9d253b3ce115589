"""The master of a Redis is killed under load, and Sentinels promote its replica; servers that are refused."""

import socket
import subprocess
import time
from contextlib import ExitStack

import pytest
from redis.backoff import NoBackoff
from redis.retry import Retry

from demo.servers.machine import find_redis
from forgekeeper.api.batches import BATCHES
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.database import database as db
from forgekeeper.platform.redis_connections import open_connections
from tests.harness.certificates import Certificate
from tests.harness.ports import accepts_connections, free_ports
from tests.harness.waiting import scale_timeout, wait_until

from .sentinels import WatchedRedis

LIMIT = 60.0
RECOVERY_SECONDS = 10.0
"""Time from the promotion to the next run that succeeds, as after a failover of PostgreSQL."""
BATCH = "user_status_cleanup"
SETTINGS = {f"cron_{batch}": "off" for batch in BATCHES} | {f"cron_{BATCH}": "* * * * * *", "log_format": "json"}
WORKER = ("worker", "--processes", "1", "--threads", "2")
SELECT_DELETED = "select one from audit_deletions, unnest(ids) as one where batch = %s and phase = 'done'"
INSERT_STATUSES = """
    insert into user_statuses (user_id, clear_status_at)
    select number, now() - interval '1 hour' from generate_series(%s, %s) as number
"""


@pytest.fixture
def watch(tmp_path):
    """Start a master, a replica and Sentinels."""
    with ExitStack() as stack:
        yield lambda certificate=None: WatchedRedis(stack, tmp_path, certificate)


def succeeded_after(instant):
    succeeded = JobRun.select().where(JobRun.batch == BATCH, JobRun.state == "succeeded")
    return any(run.started_at.timestamp() > instant for run in succeeded)


def fail_over(watched, services, say):
    """Kill the master under load.

    Return the deleted ids, and whether the next run succeeded within `RECOVERY_SECONDS` after the promotion.
    """
    facts = SETTINGS | {"redis_url": watched.url}
    services("scheduler", "scheduler", **facts)
    services("worker", *WORKER, **facts)
    began = time.time()
    assert wait_until(lambda: succeeded_after(began), LIMIT)
    db.execute_sql(INSERT_STATUSES, (1, 500))

    watched.kill_master()
    db.execute_sql(INSERT_STATUSES, (501, 1000))
    assert wait_until(watched.replica_is_master, LIMIT)
    promoted, since = time.time(), time.monotonic()
    assert wait_until(lambda: succeeded_after(promoted), LIMIT)
    recovery = time.monotonic() - since
    assert wait_until(lambda: db.execute_sql("select count(*) from user_statuses").fetchone() == (0,), LIMIT)

    deleted = [one for (one,) in db.execute_sql(SELECT_DELETED, (BATCH,)).fetchall()]
    say(f"the next run succeeded {recovery:.1f} s after the promotion")
    return sorted(deleted), recovery <= scale_timeout(RECOVERY_SECONDS)


def test_after_a_failover_the_next_run_succeeds_and_each_row_is_deleted_once(database, watch, services, say):
    assert fail_over(watch(), services, say) == (list(range(1, 1001)), True)


def test_a_failover_of_servers_with_tls_only_is_followed_as_well(database, watch, services, say, tmp_path):
    assert fail_over(watch(Certificate(tmp_path)), services, say) == (list(range(1, 1001)), True)


def test_a_sentinel_that_does_not_answer_is_asked_once(watch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = watch().url.replace("@", f"@127.0.0.1:{silent.getsockname()[1]},")
        connections = open_connections(url, socket_timeout=1.0, protocol=3, retry=Retry(NoBackoff(), 0))
        for made in [connections.get_connection() for _ in range(2)]:
            made.disconnect()

        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def start_server(stack, folder, *options):
    """Start a Redis; return its port when it accepts connections."""
    (port,) = free_ports(1)
    command = [find_redis(), *options, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert wait_until(lambda: accepts_connections(port), LIMIT)
    return port


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [("cluster", "this is a node of a Redis Cluster"), ("sentinel", "this is a Sentinel, not a Redis")],
)
def test_a_server_of_another_kind_is_refused_with_a_sentence(database, services, tmp_path, mode, sentence):
    file = tmp_path / "server.conf"
    file.touch()
    options = {"cluster": ["--cluster-enabled", "yes"], "sentinel": [str(file), "--sentinel"]}
    with ExitStack() as stack:
        url = f"redis://127.0.0.1:{start_server(stack, tmp_path, *options[mode])}/0"
        checked = services("check", "check", redis_url=url)
        worker = services("worker", *WORKER, redis_url=url)
        checked.process.wait(LIMIT)

        assert wait_until(lambda: sentence in worker.text(), LIMIT)
        assert (checked.process.returncode, sentence in checked.text()) == (1, True)
