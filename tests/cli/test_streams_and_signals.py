"""Ctrl-C at any moment, an output that is full, closed or read no further, and --help and --json of every command."""

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from forgekeeper.ledger import heartbeats
from tests.harness.every import every
from tests.harness.pipes import full_pipe
from tests.harness.thorough import select_rows, whole_only
from tests.harness.waiting import scale_timeout, wait_until

from ..system.proxy import postgres_through  # noqa: TID252, pytest puts no folder on the path
from .every_command import commands, serves

ALL = dict(commands())
NAME = "user_status_cleanup"
LIMIT = 60.0
ANSWERS = ["--help", "metrics --json", "status", f"run {NAME}"]
INTERRUPTED = {-signal.SIGINT, 128 + signal.SIGINT}
# The thread that brings a store's answer has woken the one that waits for it, and comes back to Python again and again.
LINGERING = """
import sys, threading, time
from asyncio.selector_events import BaseSelectorEventLoop as Loop
from forgekeeper.cli import main
wake = Loop._write_to_self
def linger(loop):
    wake(loop)
    while threading.get_ident() != threading.main_thread().ident:
        time.sleep(0.001)
Loop._write_to_self = linger
main()
"""


@pytest.fixture
def start(environment, tmp_path):
    """Start `forgekeeper <arguments>`; what is still there in the end is killed."""
    started = []

    def call(*arguments, settings=(), **options):
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
        line = [sys.executable, "-m", "forgekeeper.cli", *arguments]
        started.append(subprocess.Popen(line, env=environment(**dict(settings)), cwd=tmp_path, text=True, **streams))
        return started[-1]

    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_ctrl_c_during_the_imports_ends_it_without_a_word(start, monkeypatch, tmp_path):
    begun = tmp_path / "begun"
    (tmp_path / "psycopg2.py").write_text(f"import time; open({str(begun)!r}, 'w'); time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = start("status")
    assert wait_until(begun.exists, LIMIT)

    process.send_signal(signal.SIGINT)

    assert process.communicate(timeout=scale_timeout(LIMIT)) == ("", "")
    assert process.returncode in INTERRUPTED


@whole_only
def test_a_command_ends_with_its_own_status_whatever_the_client_for_stores_still_does(
    environment, database, root, store, tmp_path
):
    line, limit = [sys.executable, "-c", LINGERING, "check"], scale_timeout(LIMIT)

    ended = subprocess.run(
        line, check=False, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=limit
    )

    assert (ended.returncode, ended.stderr) == (0, "")
    assert "artifacts has its sentinel" in ended.stdout


@whole_only
def test_ctrl_c_while_a_worker_is_still_importing_drains_it(start, database):
    process = start("worker", "--processes", "1", stdout=subprocess.DEVNULL)
    # The command has become the program `workers`, which takes a second to import what it needs.
    assert wait_until(
        lambda: "forgekeeper.process" in Path(f"/proc/{process.pid}/cmdline").read_text().split("\0"), LIMIT
    )

    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=scale_timeout(LIMIT))

    assert "Traceback" not in err
    assert process.returncode == 0


@whole_only
@pytest.mark.usefixtures("database")
@pytest.mark.parametrize(("command", "statement"), [("status", b"processes"), (f"run {NAME}", b"user_statuses")])
def test_ctrl_c_ends_a_command_though_the_database_hangs(start, urls, command, statement):
    proxy, url = postgres_through(urls.database)
    with proxy:
        proxy.drop_replies(to=statement)
        process = start(*command.split(), settings={"DATABASE_URL": url, "SHUTDOWN_TIMEOUT": "1"})
        assert wait_until(lambda: proxy.dropped or process.poll() is not None, LIMIT)

        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=scale_timeout(LIMIT))

    assert process.returncode in INTERRUPTED
    assert "Traceback" not in err


@pytest.fixture
def unread():
    """A pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@whole_only
@every("command", select_rows(ANSWERS))
def test_where_standard_output_is_full_one_sentence_says_so(start, database, command):
    with Path("/dev/full").open("w") as full:
        process = start(*command.split(), stdout=full)
        _out, err = process.communicate(timeout=scale_timeout(LIMIT))

    assert sentences(err) == ["forgekeeper: cannot write to standard output: No space left on device"]
    assert process.returncode == 1


@whole_only
@every("command", select_rows(ANSWERS))
def test_where_nobody_reads_on_it_ends_as_by_sigpipe_and_without_a_word(start, database, unread, command):
    process = start(*command.split(), stdout=unread)
    _out, err = process.communicate(timeout=scale_timeout(LIMIT))

    assert (process.returncode, sentences(err)) == (128 + signal.SIGPIPE, [])


@pytest.mark.parametrize("command", ["scheduler", "worker --processes 1"])
def test_what_serves_works_and_ends_though_nobody_reads_its_log(start, database, command):
    with full_pipe() as (_reading, writing):
        process = start(*command.split(), stdout=subprocess.DEVNULL, stderr=writing)
        assert wait_until(
            lambda: heartbeats.Process.select().where(heartbeats.Process.kind == command.split()[0]), LIMIT
        )

        process.send_signal(signal.SIGTERM)

        assert process.wait(scale_timeout(LIMIT)) == 0


@whole_only
def test_a_run_ends_though_nobody_reads_its_log(start, database):
    with full_pipe() as (_reading, writing):
        process = start("run", NAME, "--json", stderr=writing)
        out, _err = process.communicate(timeout=scale_timeout(LIMIT))

    assert process.returncode == 0
    assert '"deleted": 0' in out


def sentences(err):
    return [line for line in err.splitlines() if not line.startswith("{")]


@whole_only
def test_a_run_whose_standard_error_nobody_reads_is_done_and_answered(start, database, unread):
    process = start("run", NAME, stderr=unread)
    out, _err = process.communicate(timeout=scale_timeout(LIMIT))

    assert (out, process.returncode) == (f"{NAME}: deleted=0 batches=0 stopped=drained\n", 0)


@whole_only
@every("number", [1, 2])
def test_a_stream_that_is_closed_is_no_failure(start, database, number):
    process = start("status", preexec_fn=lambda: os.close(number))
    out, err = process.communicate(timeout=scale_timeout(LIMIT))

    assert (process.returncode, out == "", err) == (0, number == 1, "")


@whole_only
def test_a_character_that_the_output_does_not_know_is_no_failure(start, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("PYTHONUTF8", "0")
    process = start("why", "--help")
    _out, err = process.communicate(timeout=scale_timeout(LIMIT))

    assert (process.returncode, err) == (0, "")


@whole_only
@every("command", ["", *sorted(ALL)])
def test_every_command_has_help(main, command):
    result = main(*command.split(), "--help")

    assert (result.status, result.stderr) == (0, "")
    assert f"Usage: forgekeeper {command}".rstrip() in result.stdout


@every("command", sorted(name for name, one in ALL.items() if not serves(one)))
def test_every_command_that_ends_has_json(command):
    options = {option for parameter in ALL[command].params for option in parameter.opts}

    assert "--json" in options or hasattr(ALL[command], "commands")


def test_the_version_is_told(main):
    result = main("--version")

    assert (result.status, result.stdout) == (0, f"forgekeeper {version('forgekeeper')}\n")
