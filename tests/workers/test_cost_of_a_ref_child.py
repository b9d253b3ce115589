"""The servers' work for a child of one project: docs/performance.md names these limits."""

import pytest

from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from models import GitRefDeletion
from tests.harness.performing import run_attempt, runner_of
from tests.harness.ref_deletions import PROJECT, count_git_commands, rows
from workers.git_ref_cleanup import clean_project_refs

MAX_GIT_PROCESSES, MAX_TRANSACTIONS, MAX_REDIS_COMMANDS = 2, 16, 5
NUMBER_OF_TRANSACTION = """
    select split_part(virtualtransaction, '/', 2)::bigint from pg_locks
    where pid = pg_backend_pid() and locktype = 'virtualxid'
"""
LAST_COMMAND = "the last command"

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def work(configured, repository):
    """Let a child work on five refs, after another child of its process."""
    with runner_of(configured) as runner:

        def work():
            rows(*(f"refs/mr/{number}" for number in range(1, 6)))
            run_attempt(runner.create_child_attempt(clean_project_refs, f"clean_project_refs:{PROJECT}"), PROJECT)
            assert not GitRefDeletion.select_pending().exists()

        work()
        repository.packed(*(f"refs/mr/{number}" for number in range(1, 6)))
        yield work


def test_a_child_of_one_project_starts_git_twice(work, tmp_path, monkeypatch):
    calls = count_git_commands(tmp_path, monkeypatch)

    work()

    assert calls() <= MAX_GIT_PROCESSES


def test_a_child_of_one_project_needs_few_transactions(work):
    def transaction():
        return database.execute_sql(NUMBER_OF_TRANSACTION).fetchone()[0]

    before = transaction()

    work()

    # Five rows are inserted, rows are looked for, and this is asked.
    assert transaction() - before - 5 - 1 - 1 <= MAX_TRANSACTIONS


def test_a_child_of_one_project_needs_few_redis_commands(work):
    with client.monitor() as monitor:
        work()
        client.echo(LAST_COMMAND)
        sent = []
        while LAST_COMMAND not in (one := monitor.next_command())["command"]:
            sent.append(one)

    commands = [one["command"] for one in sent if one["client_type"] != "lua"]
    assert len([one for one in commands if not one.startswith(("PING", "HELLO"))]) <= MAX_REDIS_COMMANDS, commands
