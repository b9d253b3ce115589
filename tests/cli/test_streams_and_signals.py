"""Ctrl-C before a command has begun, an output that is full, closed or read no further: no trace, the right status."""

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.harness.every import every
from tests.harness.waiting import wait_until

from ..system.proxy import postgres_through  # noqa: TID252, pytest puts no folder on the path
from .every_command import commands, serves

PROGRAMS = {"psql", "redis"}
ALL = dict(commands())
NAME = "user_status_cleanup"
ANSWERS = [
    ("--help",),
    ("--version",),
    ("settings",),
    ("metrics", "--json"),
    ("status",),
    ("status", "--json"),
    ("run", NAME),
]
FULL = Path("/dev/full")


def words(value):
    return value if isinstance(value, str) else " ".join(value)


@pytest.fixture
def start(environment, tmp_path):
    """Start `forgekeeper <arguments>`; what is still there in the end is killed."""
    started = []

    def call(*arguments, program=("-m", "forgekeeper.cli"), **options):
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
        process = subprocess.Popen(
            [sys.executable, *program, *arguments], env=environment(), cwd=tmp_path, text=True, **streams
        )
        started.append(process)
        return process

    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def interrupted_at(module, *arguments):
    """A program that is `forgekeeper <arguments>`, and gets a Ctrl-C when it imports *module*."""
    return f"""
import builtins, os, signal, sys
imported = builtins.__import__
def interrupting(name, *rest, **named):
    if name == {module!r} and not sent:
        sent.append(name)
        os.kill(os.getpid(), signal.SIGINT)
    return imported(name, *rest, **named)
sent = []
builtins.__import__ = interrupting
sys.argv = ["forgekeeper", *{arguments!r}]
from forgekeeper import cli
cli.main()
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        *((module, "status") for module in ("typer", "redis", "peewee", "obstore", "forgekeeper.cli.commands")),
        ("forgekeeper.cli.glance", "status"),
        ("dramatiq", "send"),
        ("forgekeeper.cli.replay", "refs"),
    ],
)
def test_ctrl_c_during_the_imports_ends_it_without_a_word(start, module, command):
    process = start(program=("-c", interrupted_at(module, command)))

    assert (process.communicate(timeout=30), process.returncode) == (("", ""), 130)


def test_ctrl_c_while_a_worker_is_still_importing_drains_it(start, database):
    process = start("worker", "--processes", "1", stdout=subprocess.DEVNULL)
    # The command has become the program `workers`, which takes a second to import what it needs.
    assert wait_until(lambda: "forgekeeper.process" in _command_line(process.pid).split("\0"), 30)

    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=30)

    assert "Traceback" not in err
    assert process.returncode == 0


@pytest.fixture
def proxy(database, urls):
    proxy, url = postgres_through(urls.database)
    with proxy:
        proxy.url = url
        yield proxy


@pytest.mark.parametrize(("command", "statement"), [(("status",), b"processes"), (("run", NAME), b"user_statuses")])
def test_ctrl_c_ends_a_command_though_the_database_hangs(environment, proxy, tmp_path, command, statement):
    proxy.drop_replies(to=statement)
    environment = environment(DATABASE_URL=proxy.url, SHUTDOWN_TIMEOUT="1")
    with (tmp_path / "err").open("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "forgekeeper.cli", *command], env=environment, cwd=tmp_path, stderr=err
        )
        try:
            assert wait_until(lambda: proxy.dropped or process.poll() is not None, 30)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()
            process.wait()
        err.seek(0)
        assert "Traceback" not in err.read()


def _command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_whoever_has_ctrl_c_ignored_goes_on_ignoring_it(start):
    program = interrupted_at("typer", "--version")
    process = start(program=("-c", program), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))

    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == 0


@pytest.mark.parametrize("command", ANSWERS, ids=words)
def test_where_standard_output_is_full_one_sentence_says_so(start, database, command):
    with FULL.open("w") as full:
        process = start(*command, stdout=full)
        _out, err = process.communicate(timeout=30)

    said = [line for line in err.splitlines() if not line.startswith("{")]
    assert said == ["forgekeeper: cannot write to standard output: No space left on device"]
    assert process.returncode == 1


@pytest.mark.parametrize("command", ANSWERS, ids=words)
def test_where_nobody_reads_on_it_ends_as_by_sigpipe_and_without_a_word(start, database, command):
    reading, writing = os.pipe()
    os.close(reading)
    process = start(*command, stdout=writing)
    os.close(writing)
    _out, err = process.communicate(timeout=30)

    assert [line for line in err.splitlines() if not line.startswith("{")] == []
    assert process.returncode == 128 + signal.SIGPIPE


def test_where_standard_error_is_full_the_status_is_the_same(start):
    with FULL.open("w") as full:
        process = start("ticks", "nonsense", stderr=full)
        process.communicate(timeout=30)

    assert process.returncode == 2


def test_a_run_whose_standard_error_nobody_reads_is_done_and_answered(start, database):
    reading, writing = os.pipe()
    os.close(reading)
    process = start("run", NAME, stderr=writing)
    os.close(writing)
    out, _err = process.communicate(timeout=30)

    assert (out, process.returncode) == (f"{NAME}: deleted=0 batches=0 stopped=drained\n", 0)


@pytest.mark.parametrize("number", [1, 2])
def test_a_stream_that_is_closed_is_no_failure(start, database, number):
    process = start("status", preexec_fn=lambda: os.close(number))
    out, err = process.communicate(timeout=30)

    assert process.returncode == 0
    assert (out == "") == (number == 1)
    assert err == ""


def test_a_character_that_the_output_does_not_know_is_no_failure(environment, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "forgekeeper.cli", "why", NAME, "--help"],
        env=environment() | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, b"")


# What becomes another program passes `-h` on to it: psql's is a host.
HELP = [(command, option) for command in ("", *sorted(ALL)) for option in ("-h", "--help")]
HELP = [(command, option) for command, option in HELP if option == "--help" or command not in PROGRAMS]


@every("command, option", HELP)
def test_every_command_has_help(main, command, option):
    result = main(*command.split(), option)

    assert (result.status, result.stderr) == (0, "")
    assert f"Usage: forgekeeper {command}".rstrip() in result.stdout


@every("command", sorted(name for name, one in ALL.items() if not serves(one)))
def test_every_command_that_ends_has_json(command):
    options = {option for parameter in ALL[command].params for option in parameter.opts}

    assert "--json" in options or hasattr(ALL[command], "commands") or command in PROGRAMS


def test_the_version_is_told(main):
    result = main("--version")

    assert (result.status, result.stdout) == (0, f"forgekeeper {version('forgekeeper')}\n")


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("forgekeeper pau", {"pause"}),
        ("forgekeeper uploads ret", {"retry"}),
        ("forgekeeper run st", {"stale_direct_uploads", "stale_imports"}),
        ("forgekeeper why prun", {"prune"}),
        ("forgekeeper pause git", {"git_ref_cleanup"}),
        ("forgekeeper worker --queues ob", {"objects"}),
        ("forgekeeper worker --queues cron,gi", {"cron,git"}),
        ("forgekeeper flags on bulk_delete_job_artifacts_", {"bulk_delete_job_artifacts_high_concurrency"}),
    ],
)
def test_a_shell_completes_commands_and_names(main, monkeypatch, line, completed):
    monkeypatch.setenv("_FORGEKEEPER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))

    result = main()

    assert (result.status, set(result.stdout.split())) == (0, completed)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_of_a_shell_is_shown(main, monkeypatch, shell):
    # The shell that it is called from is looked for among its parents: in tests that run detached there is none.
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))

    result = main("--show-completion")

    assert result.status == 0
    assert "_FORGEKEEPER_COMPLETE" in result.stdout
