"""Every command of README.md runs as printed in a shell, ends with status 0 and leaves no process.

tests/system/test_readme_installation.py runs the commands that install packages, which takes minutes.
"""

import sys

import pytest

from demo.sample import SAMPLE_PLACES, sample_settings
from demo.servers import run_servers
from demo.tables import make_tables
from forgekeeper.platform import database as db
from forgekeeper.platform.connections import ServerTimeouts, client, configure_clients
from forgekeeper.platform.settings import PREFIX
from tests.harness.every import every
from tests.harness.readme import (
    KNOWN_COMMANDS,
    find_known,
    free_addresses,
    gitlab_at_the_url_of_peek,
    read_commands,
    require_console,
    run_commands,
)
from tests.harness.settings import settings_with
from tests.harness.thorough import whole_only

ONE_PROCESS = {f"{PREFIX}WORKER_PROCESSES": "1"}
"""Two processes, the default, take twice the time to start."""
STATUS = "insert into user_statuses (user_id, clear_status_at) values (1, now() - interval '1 day')"
UNKNOWN = (
    "`forgekeper up`",
    "`forgekeeper`",
    "```\nforgekeeper migrat  # tables\n```",
    "```sh\nforgekeeper migrate\nforgekeeper processes\n```",
    "```\nforgekeeper migrate && \\\n    forgekeeper processes\n```",
    "```\nforgekeeper migrate\napplied: 0001_ledger\n```",
    "```console\n$ forgekeeper migrate\n```",
    "```fish\nforgekeeper migrate\n```",
    "```\nforgekeeper migrate",
)


@pytest.fixture(scope="module")
def own():
    """Servers of this module."""
    with run_servers() as started:
        yield started


@pytest.fixture
def forge(own, tmp_path):
    """Make the tables of a forge with one expired status; return settings for the servers and for empty places."""
    places = tmp_path / "places"
    for place in SAMPLE_PLACES:
        (places / place).mkdir(parents=True)
    urls = {"database_url": own.database_url, "redis_url": own.redis_url}
    settings = settings_with(**urls)
    configure_clients(settings, ServerTimeouts.for_worker(settings), name="tests", connections=1)
    with db.database.connection_context():
        make_tables(db.database.obj)
        db.database.execute_sql(STATUS)
    db.database.close_all()
    client.connection_pool.disconnect()
    return {PREFIX + name.upper(): url for name, url in urls.items()} | sample_settings(places, grace_seconds=60)


def link_environment(folder):
    """Link the environment of the tests to the path of the environment in README.md."""
    (folder / ".venv").symlink_to(sys.prefix)


def test_every_command_of_the_page_is_known_and_every_known_command_is_there():
    assert {find_known(line) for line in read_commands()} == set(KNOWN_COMMANDS)


@every("text", UNKNOWN)
def test_a_command_that_is_misspelled_or_new_is_refused(text):
    with pytest.raises(AssertionError, match=r"README\.md has"):
        _ = [find_known(line) for line in read_commands(text)]


def test_up_runs_everything_on_sample_data_and_prints_the_address_of_the_console(tmp_path):
    link_environment(tmp_path)

    with run_commands("sample", tmp_path, free_addresses() | ONE_PROCESS) as (up,):
        require_console(up)


def test_peek_counts_the_records_that_each_batch_would_delete_from_a_gitlab(tmp_path, own):
    link_environment(tmp_path)

    with (
        gitlab_at_the_url_of_peek(own.database_url) as environment,
        run_commands("peek", tmp_path, environment) as (peek,),
    ):
        assert "190 expired_artifact" in peek.read_output()


@whole_only  # tests/demo/test_up.py runs `up` in each suite, without a shell
def test_up_without_urls_runs_everything_on_servers_in_the_folder(tmp_path):
    with run_commands("up", tmp_path, free_addresses() | ONE_PROCESS) as (up,):
        require_console(up)
        assert (tmp_path / ".forgekeeper" / "postgres").is_dir()


def test_the_commands_for_production_run_in_their_order(tmp_path, forge):
    with run_commands("production", tmp_path, forge | free_addresses() | ONE_PROCESS) as commands:
        (preview,) = (command for command in commands if "--dry-run" in command.line)
        assert "1 would be deleted" in preview.read_output()
