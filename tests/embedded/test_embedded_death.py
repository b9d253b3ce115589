import os
import signal

import pytest

from forgekeeper.embedded import EmbeddedError, servers

LONG_LIVED_PROGRAM = """
c = subprocess.Popen(["sleep", "60"], close_fds=False)
print(c.pid, flush=True)
"""
LONG_LIVED_FORK = """
c = os.fork()
if c == 0:
    time.sleep(60)
    os._exit(0)
print(c, flush=True)
"""
FORK_THAT_UNWINDS = """
c = os.fork()
if c == 0:
    sys.exit()
os.waitpid(c, 0); print("child left", flush=True)
"""
SURVIVE_AN_INTERRUPT = """
try:
    print("waiting", flush=True)
    signal.pause()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("deadly", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_parent_is_killed(host, deadly):
    parent = host().ready()

    parent.die(deadly)

    assert parent.everything_is_gone()


def test_nothing_is_left_when_the_parent_is_killed_during_the_start(host, temporary_root, eventually):
    parent = host()
    assert eventually(lambda: any(temporary_root.glob("*/postgres.unfinished")))

    parent.die()

    assert eventually(lambda: not any(temporary_root.iterdir()))


def test_a_program_the_parent_started_and_left_behind_does_not_keep_the_servers(host):
    parent = host(then=LONG_LIVED_PROGRAM).ready()
    child = int(parent.says())

    parent.die()

    assert parent.everything_is_gone()
    os.kill(child, signal.SIGKILL)


def test_a_fork_the_parent_left_behind_does_not_keep_the_servers(host):
    parent = host(then=LONG_LIVED_FORK).ready()
    child = int(parent.says())

    parent.die()

    assert parent.everything_is_gone()
    os.kill(child, signal.SIGKILL)


def test_a_fork_that_unwinds_through_the_context_leaves_the_servers_alone(host, query):
    parent = host(then=FORK_THAT_UNWINDS).ready()

    assert parent.says() == "child left"

    assert query(parent.database_url, "SELECT 1") == (1,)


def test_an_interrupt_at_the_terminal_does_not_reach_the_servers(host, query):
    parent = host(then=SURVIVE_AN_INTERRUPT).ready()
    assert parent.says() == "waiting"

    os.killpg(parent.process.pid, signal.SIGINT)

    assert parent.says() == "interrupted"
    assert query(parent.database_url, "SELECT 1") == (1,)


def test_the_keeper_ignores_an_interrupt(host, query):
    parent = host().ready()

    os.kill(parent.keeper_pid, signal.SIGINT)

    assert query(parent.database_url, "SELECT 1") == (1,)


def test_the_keeper_stops_everything_when_it_is_terminated(host):
    parent = host().ready()

    os.kill(parent.keeper_pid, signal.SIGTERM)

    assert parent.everything_is_gone()


def test_the_servers_die_with_a_killed_keeper(host, eventually, gone):
    parent = host().ready()

    os.kill(parent.keeper_pid, signal.SIGKILL)

    assert eventually(lambda: all(map(gone, parent.server_pids)))
    parent.leave()


def test_the_parent_removes_the_folder_of_a_killed_keeper(temporary_root, parent_of):
    with servers() as started:
        os.kill(parent_of(started.redis_pid), signal.SIGKILL)

    assert list(temporary_root.iterdir()) == []


def test_a_keeper_killed_during_the_start_is_an_error(host, temporary_root, eventually):
    parent = host()
    assert eventually(lambda: any(temporary_root.glob("*/postgres.unfinished")))

    os.kill(parent.starting_keeper_pid, signal.SIGKILL)

    assert parent.says() == ""
    assert parent.process.wait() == 1


@pytest.mark.parametrize("sudden", [signal.SIGKILL, signal.SIGSTOP])
def test_leaving_works_after_the_servers_were_killed_or_paused(sudden, temporary_root):
    with servers() as started:
        os.kill(started.postgres_pid, sudden)
        os.kill(started.redis_pid, sudden)

    assert list(temporary_root.iterdir()) == []


@pytest.fixture(scope="module")
def failure(tmp_path_factory):
    """Start a PostgreSQL that cannot start; say what was raised and what is left."""
    root = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(root))
        with pytest.raises(EmbeddedError) as raised, servers(postgres_options={"work_mem": "much"}):
            pass
    return str(raised.value), list(root.iterdir())


def test_a_server_that_fails_to_start_is_an_error_with_the_end_of_its_log(failure):
    message, _ = failure

    assert message.startswith("The embedded PostgreSQL did not start; the end of its log:\n")
    assert 'invalid value for parameter "work_mem": "much"' in message


def test_nothing_is_left_of_servers_that_failed_to_start(failure):
    _, left = failure

    assert left == []
