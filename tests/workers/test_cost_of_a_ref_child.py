"""The servers' work for the child of a small project: docs/performance.md names these limits."""

import pytest

from forgekeeper.engine.message_attempt import MessageAttempt
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from models import GitRefDeletion, Project
from tests.harness.git_samples import BareRepository
from tests.harness.performing import runner_of
from tests.harness.ref_deletions import count_git_commands, row
from workers.git_ref_cleanup import clean_project_refs

PROJECTS = range(1, 26)
REFS = [f"refs/mr/{number}" for number in range(1, 6)]
MAX_GIT_PROCESSES, MAX_TRANSACTIONS, MAX_REDIS_COMMANDS = 1, 5, 2
NUMBER_OF_TRANSACTION = """
    select split_part(virtualtransaction, '/', 2)::bigint from pg_locks
    where pid = pg_backend_pid() and locktype = 'virtualxid'
"""
LAST_COMMAND = "the last command"

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def work(configured, root):
    """Work on a message with children of small projects, each with five refs, after another message of the process."""
    repositories = {number: BareRepository(root, f"{number}.git") for number in PROJECTS}
    for number, one in repositories.items():
        Project.create(id=number, disk_path=one.disk_path)

    def prepare():
        for number, one in repositories.items():
            one.packed(*REFS)
            for ref in REFS:
                row(ref, project=number)

    with runner_of(configured) as runner:

        def work():
            calls = [(f"clean_project_refs:{number}", (number,)) for number in PROJECTS]
            attempt = MessageAttempt(runner, clean_project_refs, calls, run_number=None)
            attempt.work_if_allowed()
            attempt.close(None)

        prepare()
        work()
        prepare()
        yield work
        assert not GitRefDeletion.select_pending().exists()


def test_a_small_project_starts_git_once(work, tmp_path, monkeypatch):
    calls = count_git_commands(tmp_path, monkeypatch)

    work()

    assert calls() / len(PROJECTS) <= MAX_GIT_PROCESSES


def test_a_small_project_needs_few_transactions(work):
    def transaction():
        return database.execute_sql(NUMBER_OF_TRANSACTION).fetchone()[0]

    before = transaction()

    work()

    assert (transaction() - before) / len(PROJECTS) <= MAX_TRANSACTIONS


def test_a_small_project_needs_few_redis_commands(work):
    with client.monitor() as monitor:
        work()
        client.echo(LAST_COMMAND)
        sent = []
        while LAST_COMMAND not in (one := monitor.next_command())["command"]:
            sent.append(one)

    commands = [one["command"] for one in sent if one["client_type"] != "lua"]
    assert len([one for one in commands if not one.startswith(("PING", "HELLO"))]) / len(PROJECTS) <= MAX_REDIS_COMMANDS
