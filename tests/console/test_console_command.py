"""The command `console`: what it refuses, how it begins and ends, and its users."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from forgekeeper.cli.console import command
from forgekeeper.cli.console.named_lines import LineFile
from forgekeeper.cli.console.users import USER_FORMAT, is_correct_password
from forgekeeper.platform.settings import PREFIX
from tests.harness import forks
from tests.harness.every import every
from tests.harness.ports import free_ports
from tests.harness.programs import ROOT
from tests.harness.thorough import whole_only
from tests.harness.waiting import scale_timeout

from ..system.proxy import postgres_through  # noqa: TID252, pytest puts no folder on the path

PASSWORD = "correct horse"
INSTALL = "this needs the extra `console`, for no_such_module: pip install 'forgekeeper-"


@pytest.fixture
def start(settings, tmp_path):
    """Start a console that ends by itself; return status, output and complaint."""

    def call(**given):
        own = {"console_port": free_ports(1)[0], "console_users": ""} | given
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        environment |= {PREFIX + name.upper(): str(value) for name, value in own.items()}
        ended = forks.run(["-m", "forgekeeper.cli", "console"], env=environment, cwd=tmp_path)
        return ended.returncode, ended.stdout, ended.stderr

    return call


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Run `forgekeeper console user <arguments>`; return what it says, or the `Problem` that it ends with."""

    def call(*arguments, line=""):
        ended = CliRunner().invoke(command.console, ["user", *arguments], input=line)
        return ended.exception or ended.stdout

    monkeypatch.setenv(PREFIX + "CONSOLE_USERS", str(tmp_path / "users"))
    return call


# What is refused

TLS = f"{PREFIX}CONSOLE_TLS_CERTIFICATE and {PREFIX}CONSOLE_TLS_KEY"
NAME_USERS = f"set {PREFIX}CONSOLE_USERS to a file (`forgekeeper console user add`), or {PREFIX}CONSOLE_PROXY"
THROUGH = f"set {TLS}, or name a proxy that speaks TLS in {PREFIX}CONSOLE_PROXY"
PAIR = {"console_tls_certificate": "a", "console_tls_key": "b"}
HOW = "`forgekeeper settings --help` says how settings are given"
NETWORKS, NAMED = "write addresses or networks such as 10.0.0.0/28", "name the proxies"
REFUSED = [
    ({"console_port": 0}, f"{PREFIX}CONSOLE_PORT is 0: set it to the console's port"),
    ({"console_actions": "on"}, f"anybody who reaches 127.0.0.1 could act: {NAME_USERS}"),
    ({"console_tls_certificate": "a"}, f"set both {TLS}, or neither"),
    ({"console_host": "0.0.0.0"}, f"passwords sent to 0.0.0.0 would not be encrypted: {THROUGH}"),
    ({"console_host": "forge.example"}, f"passwords sent to forge.example would not be encrypted: {THROUGH}"),
    (
        {"console_host": "192.0.2.1", "console_users": "users"},
        f"passwords sent to 192.0.2.1 would not be encrypted: {THROUGH}",
    ),
    ({"console_host": "0.0.0.0"} | PAIR, f"anybody who reaches 0.0.0.0 could look: {NAME_USERS}"),
    (
        {"console_users": "nowhere"},
        "there is no nowhere: `forgekeeper console user add` creates it",
    ),
    (
        {"console_tokens": "nowhere"},
        "there is no nowhere: `forgekeeper console token add` creates it",
    ),
    (
        PAIR,
        "cannot use a with the key b: No such file or directory; name a certificate and its key, both as PEM",
    ),
    (
        {"console_proxy": "proxy.example"},
        f"bad value of {PREFIX}CONSOLE_PROXY: 'proxy.example' is not an address: {NETWORKS}; {HOW}",
    ),
    (
        {"console_proxy": "0.0.0.0/0"},
        f"bad value of {PREFIX}CONSOLE_PROXY: 0.0.0.0/0 contains every address: {NAMED}; {HOW}",
    ),
    (
        {"console_proxy_header": "X User:"},
        f"bad value of {PREFIX}CONSOLE_PROXY_HEADER: not the name of a header such as X-Forwarded-User; {HOW}",
    ),
]


@whole_only
@every("given, sentence", REFUSED)
def test_what_would_let_in_who_should_not_be_is_refused_in_one_sentence(start, given, sentence):
    assert start(**given) == (2, "", f"forgekeeper: {sentence}\n")


def test_a_port_that_is_taken_is_said_in_one_sentence(start):
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        status, output, complaint = start(console_port=port)

    wanted = f"cannot serve the console at 127.0.0.1:{port}: Address already in use"
    assert (status, output) == (1, "")
    assert complaint == f"forgekeeper: {wanted}; stop the program that uses it, or choose another port\n"


def test_a_line_of_the_users_that_is_none_stops_the_start(start, tmp_path):
    (tmp_path / "users").write_text("anna:operator:swordfish\n")

    status, _output, complaint = start(console_users=tmp_path / "users")

    assert (status, "swordfish" in complaint) == (2, False)
    assert complaint.startswith(f"forgekeeper: line 1 of {tmp_path / 'users'} is not a user, or repeats a user: ")


@pytest.mark.usefixtures("user")
def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(command, "REQUIRED_MODULES", ("argon2", "no_such_module"))

    for arguments in ([], ["user", "list"]):
        ended = CliRunner().invoke(command.console, arguments)

        assert str(ended.exception).startswith(INSTALL)


# How it begins and ends


@whole_only
@every("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_a_line_and_nothing_but_ours_is_on_its_log(console, number):
    one = console()
    one.get("/")

    os.kill(one.pid, number)

    assert one.process.wait(scale_timeout(30)) == 0
    assert [line["message"] for line in one.lines()] == ["console started", "console stopped"]
    assert one.lines()[0]["url"] == f"{one.url}/"
    assert len(one.text().splitlines()) == 2


def test_the_supervisor_hears_when_it_is_ready(console, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(scale_timeout(30))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

        one = console()

        assert supervisor.recv(4096).decode() == f"READY=1\nSTATUS=serves {one.url}/"


def test_it_starts_while_both_servers_are_away_and_says_so(console):
    (port,) = free_ports(1)
    away = {"database_url": f"postgresql://u@127.0.0.1:{port}/d", "redis_url": f"redis://127.0.0.1:{port}/0"}

    answer = console(**away).get("/")

    assert (answer.status, "cannot use PostgreSQL" in answer.text) == (503, True)


@whole_only
def test_it_ends_though_a_question_hangs(console, urls):
    proxy, url = postgres_through(urls.database)
    with proxy:
        one = console(database_url=url)
        proxy.drop_replies(to=b"processes", replies=1000)
        assert one.get("/").status == 503
        assert proxy.dropped

        assert one.end() == 0

    assert one.said("console stopped")


def test_it_does_not_speak_of_a_request_that_makes_no_sense(console):
    one = console()
    port = int(one.settings["FORGEKEEPER_CONSOLE_PORT"])
    with socket.create_connection(("127.0.0.1", port), timeout=scale_timeout(30)) as connection:
        connection.sendall(b"\x16\x03\x01 what?\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")

    one.end()

    assert all(line.startswith('{"at":') for line in one.text().splitlines())


# Its users


def known(tmp_path):
    return LineFile(tmp_path / "users", USER_FORMAT).read_lines()


def test_a_user_whose_password_came_on_standard_input_can_log_in(user, tmp_path):
    assert user("add", "anna", "--role", "operator", line=f"{PASSWORD}\n") == "added anna, operator\n"

    assert (known(tmp_path)["anna"].role, is_correct_password(known(tmp_path)["anna"], PASSWORD)) == ("operator", True)
    assert PASSWORD not in (tmp_path / "users").read_text()


def test_a_user_who_is_there_gets_another_role_and_password(user, tmp_path):
    user("add", "anna", "--role", "viewer", line="the old one\n")

    assert user("add", "anna", "--role", "operator", line=PASSWORD) == "changed anna, operator\n"
    assert (known(tmp_path)["anna"].role, is_correct_password(known(tmp_path)["anna"], PASSWORD)) == ("operator", True)


def test_a_user_whom_a_proxy_names_has_no_password(user, tmp_path):
    assert user("add", "petra", "--role", "viewer", "--proxy") == "added petra, viewer, authenticated by a proxy\n"
    assert (tmp_path / "users").read_text() == "petra:viewer:-\n"


def test_what_was_done_can_be_had_as_json(user):
    added = user("add", "petra", "--role", "viewer", "--proxy", "--json")
    removed = user("remove", "petra", "--json")

    assert json.loads(added) == {"name": "petra", "role": "viewer", "proxy": True, "done": "added"}
    assert json.loads(removed) == {"name": "petra", "done": "removed"}


def test_users_are_listed_without_their_hashes(user):
    user("add", "petra", "--role", "operator", "--proxy")
    user("add", "vera", "--role", "viewer", line=PASSWORD)

    assert json.loads(user("list", "--json")) == [
        {"name": "petra", "role": "operator", "proxy": True},
        {"name": "vera", "role": "viewer", "proxy": False},
    ]
    assert "argon2" not in user("list")


def test_a_user_who_is_removed_is_gone(user, tmp_path):
    user("add", "petra", "--role", "operator", "--proxy")

    assert user("remove", "petra") == "removed petra\n"
    assert (tmp_path / "users").read_text() == ""
    assert str(user("remove", "petra")) == f"there is no user 'petra' in {tmp_path / 'users'}; there are: none"


BAD = [
    ("anna", "short\n", "a password has at least 8 characters; nothing was changed"),
    ("anna", "", "a password has at least 8 characters; nothing was changed"),
    ("an:na", PASSWORD, "a name has 1 to 100 printable characters, no colon, and no space around it"),
]


@every("name, line, sentence", BAD)
def test_a_user_who_cannot_be_is_refused_and_nothing_is_written(user, tmp_path, name, line, sentence):
    refused = user("add", name, "--role", "viewer", line=line)

    assert (refused.status, str(refused)) == (2, sentence)
    assert not (tmp_path / "users").exists()


def test_without_the_setting_it_says_which_file_is_wanted(user, monkeypatch):
    monkeypatch.setenv(PREFIX + "CONSOLE_USERS", "")

    assert str(user("list")).startswith(f"{PREFIX}CONSOLE_USERS is not set: ")


def typed(tmp_path, *lines):
    """Add a user at a terminal, where these lines are typed; return the status and all that the terminal shows."""
    terminal, its = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), PREFIX + "CONSOLE_USERS": str(tmp_path / "users")}
    line = [sys.executable, "-m", "forgekeeper.cli", "console", "user", "add", "anna", "--role", "viewer"]
    process = subprocess.Popen(line, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True)
    os.close(its)
    shown = b""
    for prompt, text in zip((b"password: ", b"again: "), lines, strict=True):
        while prompt not in shown:
            shown += os.read(terminal, 1024)
        os.write(terminal, f"{text}\n".encode())
    status = process.wait(scale_timeout(60))
    shown += os.read(terminal, 65_536)
    os.close(terminal)
    return status, shown.decode()


@whole_only
@pytest.mark.usefixtures("settings")
def test_at_a_terminal_the_password_is_asked_for_twice_and_not_shown(tmp_path):
    status, shown = typed(tmp_path, PASSWORD, PASSWORD)

    assert (status, PASSWORD in shown) == (0, False)
    assert is_correct_password(LineFile(tmp_path / "users", USER_FORMAT).read_lines()["anna"], PASSWORD)


@pytest.mark.usefixtures("settings")
def test_two_different_passwords_change_nothing(tmp_path):
    status, shown = typed(tmp_path, PASSWORD, "another one")

    assert (status, (tmp_path / "users").exists()) == (2, False)
    assert "the two passwords differ; nothing was changed" in shown
