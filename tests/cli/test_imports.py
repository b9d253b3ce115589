"""What a command does not need it does not import: that is most of what it takes of a processor."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from forgekeeper.cli import commands, listing
from tests.harness.every import every

ROOT = Path(__file__).parents[2]
IMPORTED = """
import sys
from forgekeeper.cli.commands import run
status = run(sys.argv[1:])
print(*sys.modules, file=sys.stderr)
sys.exit(status)
"""
LIBRARIES = {
    "apscheduler",
    "dramatiq",
    "obstore",
    "peewee",
    "prometheus_client",
    "psycopg2",
    "pydantic",
    "redis",
    "structlog",
}
SERVING = {"apscheduler.schedulers", "forgekeeper.process.broker", "prometheus_client", "rich.markdown"}


@pytest.fixture
def imported(environment):
    """Run a command in a process of its own; return what it said, and which modules it has imported."""

    def run(*arguments, folder=None, **settings):
        ran = subprocess.run(
            [sys.executable, "-c", IMPORTED, *arguments],
            env={**environment(**settings), "PYTHONPATH": str(ROOT)},
            cwd=folder or ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return ran.stdout, set(ran.stderr.split())

    return run


def listed(panels):
    """Flatten panels into where each command stands, and its line."""
    return [(panel, name, sentence) for panel, sentences in panels.items() for name, sentence in sentences.items()]


def test_the_list_of_commands_is_what_the_commands_say_of_themselves():
    own = {}
    for name, command in get_command(commands.application()).commands.items():
        own.setdefault(command.rich_help_panel, {})[name] = command.help.split("\n\n")[0]

    assert listed(listing.LINES) == listed(own)


def test_help_looks_as_that_of_the_commands(main, monkeypatch):
    short = main("--help")
    monkeypatch.setattr(listing, "OUR_OWN", set())
    monkeypatch.setenv("FORGEKEEPER_BATCHES", "workers")

    assert short == main("--help")


@every("arguments", [(), ("-h",), ("--help",)])
def test_help_imports_neither_batches_nor_what_leads_to_servers(imported, arguments):
    said, modules = imported(*arguments)

    assert "user_status" not in said
    assert modules & (LIBRARIES | {"forgekeeper.batches", "workers"}) == set()


def test_help_asks_the_batches_where_the_environment_names_others(imported):
    _said, modules = imported("--help", BATCHES="workers.prune")

    assert "workers.prune" in modules


def test_help_asks_the_batches_where_a_file_names_others(imported, tmp_path):
    (tmp_path / ".env").write_text("forgekeeper_batches=workers.prune\n")

    _said, modules = imported("--help", folder=tmp_path)

    assert "workers.prune" in modules


@every("command", sorted(commands.LOOKING - {"why", "ticks"}))
def test_who_only_looks_imports_nothing_that_sends_or_serves(imported, database, command):
    _said, modules = imported(command)

    assert modules & SERVING == set()


@every("command", sorted(commands.OURS))
def test_a_command_is_found_without_the_others(command):
    (found,) = get_command(commands._only(command)).commands

    assert found == command
