"""The embedded servers end with the process that started them, and leave nothing behind."""

import os
import signal

import pytest

from demo.servers import EmbeddedError, servers
from tests.harness.waiting import wait_until

LIMIT = 60.0
LONG_LIVED_FORK = """
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print("forked", flush=True)
"""
SURVIVE_AN_INTERRUPT = """
try:
    print("waiting", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def servers_of(program):
    """Name the processes below the program whose titles are a server's."""
    return [line for line in program.process_table()[0] if "redis-server" in line or "postgres" in line]


@pytest.mark.parametrize("deadly", [signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_its_killed_parent(host, deadly):
    parent = host()
    assert servers_of(parent)

    parent.ends(deadly)

    assert parent.leaves_no_process(), parent.process_table()


def test_no_server_outlives_a_parent_that_is_killed_during_the_start(host):
    parent = host(ready=False)
    assert wait_until(lambda: any(parent.temporary.glob("*/postgres.unfinished")), LIMIT)

    parent.ends(signal.SIGKILL)

    assert parent.leaves_no_process(), parent.process_table()


def test_a_fork_that_outlives_the_parent_does_not_keep_the_folder(host, temporary_root):
    parent = host(temporary_root / "folder", then=LONG_LIVED_FORK)
    assert parent.says("forked")

    parent.ends(signal.SIGKILL)

    with servers(temporary_root / "folder"):
        pass


def test_an_interrupt_at_the_terminal_does_not_reach_the_servers(host, query):
    parent = host(then=SURVIVE_AN_INTERRUPT)
    assert parent.says("waiting")

    os.killpg(parent.process.pid, signal.SIGINT)

    assert parent.says("interrupted")
    assert query(parent.said.splitlines()[0], "select 1") == [(1,)]


@pytest.mark.parametrize("sudden", [signal.SIGKILL, signal.SIGSTOP])
def test_leaving_works_after_the_servers_were_killed_or_paused(sudden, temporary_root):
    with servers() as started:
        os.kill(started.postgres_pid, sudden)
        os.kill(started.redis_pid, sudden)

    assert list(temporary_root.iterdir()) == []


def test_a_server_that_does_not_start_is_an_error_with_the_end_of_its_log_and_leaves_nothing(temporary_root):
    with pytest.raises(EmbeddedError) as raised, servers(postgres_options={"work_mem": "much"}):
        pass

    assert str(raised.value).startswith("The embedded PostgreSQL did not start; the end of its log:\n")
    assert 'invalid value for parameter "work_mem": "much"' in str(raised.value)
    assert list(temporary_root.iterdir()) == []
