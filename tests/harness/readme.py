"""Read the commands of README.md, run them as printed, and serve the database that `peek` looks at."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psycopg2

from demo.tour import require_batches
from forgekeeper.api.batches import BATCHES
from forgekeeper.platform.settings import PREFIX
from tests.harness import gitlab_tables
from tests.harness.adopted import SMALL
from tests.harness.ports import free_ports
from tests.harness.shell import TIMEOUT_SECONDS, ShellCommand, Terminal
from tests.system.proxy import postgres_through

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SHELL_LANGUAGES = {"", "bash", "sh", "shell"}
OTHER_LANGUAGES = {"python"}
"""Languages of blocks without commands; tests/docs/test_writing_a_batch.py reads those of Python."""
OTHER_SPANS = {*BATCHES, ".forgekeeper/", "DELETE", "redis-server", "valkey-server"}
"""Texts between backquotes that are no commands."""
PAGE_TIMEOUT_SECONDS = 60.0
WORKER_READY = "Worker process is ready for action."


class KnownCommand(NamedTuple):
    """A pattern of commands that a test knows how to run.

    *place* names the test's own folder and servers.  A command with *ready* runs until Ctrl-C, and prints that text
    once it works; a command without it ends by itself.
    """

    place: str
    pattern: str
    ready: str = ""


KNOWN_COMMANDS = (
    KnownCommand("install", r"python3 -m venv .+ && \S+/pip install .+"),
    KnownCommand("sample", r"\.venv/bin/forgekeeper up --sample", WORKER_READY),
    KnownCommand("peek", r"\.venv/bin/forgekeeper peek postgresql://\S+"),
    KnownCommand("make demo", "make demo"),
    KnownCommand("make test", "make test"),
    KnownCommand("up", "forgekeeper up", WORKER_READY),
    KnownCommand("production", r"forgekeeper (migrate|check --init|run \w+ --dry-run|release --all .+)"),
    KnownCommand("production", "forgekeeper scheduler", "scheduler ready"),
    KnownCommand("production", "forgekeeper worker .+", WORKER_READY),
    KnownCommand("production", "forgekeeper exporter", "exporter started"),
    KnownCommand("production", "forgekeeper console", "console started"),
)


def read_commands(text: str = README) -> list[str]:
    """Return the lines of shell blocks, and the texts between backquotes that are not in `OTHER_SPANS`."""
    assert text.count("```") % 2 == 0, "README.md has a block without an end"
    blocks = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
    languages = {language for language, _lines in blocks.findall(text)}
    assert languages <= SHELL_LANGUAGES | OTHER_LANGUAGES, f"README.md has blocks in {languages}"
    shell = "".join(lines for language, lines in blocks.findall(text) if language in SHELL_LANGUAGES)
    lines = shell.replace("\\\n", "").splitlines()
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", blocks.sub("", text))]
    commands = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return commands + [span for span in spans if span not in OTHER_SPANS]


def find_known(line: str) -> KnownCommand:
    """Return how the command is run; fail unless exactly one pattern matches the command without its comment."""
    command = re.sub(r"\s+#.*", "", line)
    found = [known for known in KNOWN_COMMANDS if re.fullmatch(known.pattern, command)]
    assert len(found) == 1, f"README.md has a command that KNOWN_COMMANDS has {len(found)} times: {command}"
    return found[0]


def commands_at(place: str) -> list[str]:
    """Return the commands of the place in the order of README.md; fail if there are none."""
    found = [line for line in read_commands() if find_known(line).place == place]
    assert found, f"README.md has no command for {place!r} any more: remove it from KNOWN_COMMANDS"
    return found


@contextmanager
def run_commands(
    place: str, folder: Path, environment: Mapping[str, str], *, timeout_seconds: float = TIMEOUT_SECONDS
) -> Iterator[list[ShellCommand]]:
    """Run the commands of the place as printed, in order; yield them when each has ended or is ready.

    At the end press Ctrl-C in the commands that still run.  Fail unless every command ends with status 0, and unless
    all their processes have ended.
    """
    with Terminal(folder, environment) as terminal:
        commands, serving = [], []
        for line in commands_at(place):
            commands.append(command := terminal.start(line))
            if ready := find_known(line).ready:
                serving.append((command, ready))
            else:
                require_success(command, timeout_seconds)
        for command, ready in serving:
            assert command.wait_for_output(ready), f"{command.line}:\n{command.read_output()}"
        yield commands
        for command, _ready in serving:
            command.interrupt()
        for command, _ready in serving:
            require_success(command, timeout_seconds)
        assert terminal.leaves_no_process(), terminal.find_processes()


def require_success(command: ShellCommand, timeout_seconds: float) -> None:
    """Wait until the command has ended, and fail unless its status is 0."""
    assert command.wait_for_status(timeout_seconds) == 0, f"{command.line}:\n{command.read_output()}"


def require_console(command: ShellCommand) -> None:
    """Open the address of the console that the command prints; fail unless the page names every batch."""
    # It is printed once the console listens.
    assert command.wait_for_output("the console is at "), command.read_output()
    (address,) = re.findall(r"^the console is at (http://\S+)$", command.read_output(), re.MULTILINE)
    require_batches(address, timeout=PAGE_TIMEOUT_SECONDS)


def free_addresses() -> dict[str, str]:
    """Return settings with addresses that no other process of this machine listens at.

    README.md prints a fixed port for metrics, so the settings change the host to another address of loopback.
    """
    (port,) = free_ports(1)
    return {f"{PREFIX}METRICS_HOST": f"127.{port >> 8}.{port & 255}.1", f"{PREFIX}CONSOLE_PORT": str(port)}


def copy_checkout(folder: Path) -> Path:
    """Clone the repository into *folder*, and copy the changes that are not committed."""
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).rstrip("\0").split("\0"):
        source, copy = ROOT / name, folder / name
        copy.unlink(missing_ok=True)
        if source.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy, follow_symlinks=False)
    return folder


@contextmanager
def gitlab_at_the_url_of_peek(server: str) -> Iterator[dict[str, str]]:
    """Fill a database of the PostgreSQL at the URL *server* as a GitLab with the names in README.md's URL for `peek`.

    Yield variables for the environment of `peek`: libpq connects to PGHOSTADDR instead of the host in the URL.
    """
    (line,) = commands_at("peek")
    url = urlsplit(re.findall(r"postgresql://\S+", line)[0])
    role, name = url.username, url.path[1:]
    with _session(server) as cursor:
        cursor.execute(f"create role {role} login")
        cursor.execute(f"create database {name}")
    with _session(urlsplit(server)._replace(path=url.path).geturl()) as cursor:
        cursor.execute(gitlab_tables.SQL.read_text())
        gitlab_tables.fill(cursor, **SMALL)
        cursor.execute(f"grant select on all tables in schema public to {role}")
    with postgres_through(server)[0] as proxy:
        yield {"PGHOSTADDR": "127.0.0.1", "PGPORT": str(proxy.port)}


@contextmanager
def _session(url: str) -> Iterator[psycopg2.extensions.cursor]:
    with closing(psycopg2.connect(url)) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        yield cursor
