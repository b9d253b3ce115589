"""The command `console`: a page to look at, and to act on; and its users."""

from __future__ import annotations

import contextvars
import getpass
import os
import socket
import sys
from datetime import timedelta
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer

from forgekeeper import shutdown
from forgekeeper.cli.connection import configured, recorded
from forgekeeper.cli.terminal import Json, Problem, answer, emit, group, table, wrong_use
from forgekeeper.connections import Limits, connect
from forgekeeper.console.users import BY_PROXY, LONGEST, Role, User, Users, fits, hashed_password
from forgekeeper.process import lifetime
from forgekeeper.settings import PREFIX, Settings
from metrics.endpoint import PortTaken, listen
from metrics.threads import Vital, ended_itself

if TYPE_CHECKING:
    from uvicorn import Config

BRIEF = timedelta(seconds=2)
LIMITS = Limits(BRIEF, timedelta(seconds=15), BRIEF, BRIEF, BRIEF, timedelta(seconds=0.7))
"""How long the console waits for its servers: only the statements of a preview take long."""
CONNECTIONS = 8
DRAIN = 2
"""Seconds in which requests may be answered before it ends."""
SHORTEST = 8
"""Characters of a password."""
EXTRA = ("argon2", "itsdangerous", "jinja2", "markdown_it", "starlette", "uvicorn", "yaml")

log = structlog.get_logger(__name__)
console = typer.Typer(name="console", help="Serve a page that shows what the commands say, and acts as they do.")


@console.callback(invoke_without_command=True)
def serve(context: typer.Context) -> None:
    """Serve a page that shows what the commands say, and acts as they do.

    It listens on FORGEKEEPER_CONSOLE_HOST and FORGEKEEPER_CONSOLE_PORT.  PostgreSQL and Redis may be away.  SIGTERM
    and Ctrl-C end it.
    """
    if missing := [name for name in EXTRA if find_spec(name) is None]:
        wrong_use(f"this needs the extra `console`, for {missing[0]}: pip install 'forgekeeper[console]'")
    if context.invoked_subcommand is not None:
        return
    settings = configured()
    _refuse_what_is_open(settings)
    asked = shutdown.requests()
    connect(settings, LIMITS, name="console", connections=CONNECTIONS)
    with recorded(settings):
        serving = _Serving(_served(settings), _listening(settings))
        serving.start()
        lifetime.tell_supervisor("READY=1", f"STATUS=serves {url(settings)}")
        log.info("console started", url=url(settings))
        asked.get()
        serving.end()
    log.info("console stopped")
    # A question to a server that hangs would hold up the interpreter's end.
    os._exit(int(ended_itself()))


def listing(*, json: Json = False) -> None:
    """List the users."""
    found = [(one.name, one.role, one.hash == BY_PROXY) for one in _users().known().values()]
    if json:
        emit([{"name": name, "role": role, "proxy": proxy} for name, role, proxy in found])
    else:
        table(["user", "role", "known by"], ((*one, "proxy" if proxy else "password") for *one, proxy in found))


user = group("user", "See and change who may use the console.", listing)
console.add_typer(user)


@user.command("add")
def add(
    name: Annotated[str, typer.Argument(help="Who it is, as one types it to log in, or as the proxy says it.")],
    role: Annotated[Role, typer.Option(help="A viewer looks, an operator acts.")],
    *,
    proxy: Annotated[bool, typer.Option("--proxy", help="Only a proxy names this user: there is no password.")] = False,
    json: Json = False,
) -> None:
    """Add a user, or give one that there is another role and password, which ends that user's sessions.

    It asks for the password, or reads it from standard input, a line.
    """
    users = _users()
    if not fits(name):
        wrong_use(f"a name has 1 to {LONGEST} characters that can be printed, no colon, and no space around it")
    hashed = BY_PROXY if proxy else hashed_password(_password())
    with users.changed() as known:
        done = "changed" if name in known else "added"
        known[name] = User(name, role, hashed)
    text = f"{done} {name}, {role}{', whom a proxy names' if proxy else ''}"
    answer({"name": name, "role": role, "proxy": proxy, "done": done}, text, json=json)


@user.command("remove")
def remove(name: Annotated[str, typer.Argument(help="Who it is.")], *, json: Json = False) -> None:
    """Remove a user, and end that user's sessions."""
    users = _users()
    with users.changed() as known:
        if known.pop(name, None) is None:
            raise Problem(f"there is no user {name!r} in {users.path}; there are: {', '.join(known) or 'none'}")
    answer({"name": name, "done": "removed"}, f"removed {name}", json=json)


class _Serving(Vital):
    """Serves the console; the process ends where it does."""

    def __init__(self, served: Config, listening: socket.socket) -> None:
        from uvicorn import Server

        super().__init__("console")
        self._server, self._socket = Server(served), listening
        self._context = contextvars.copy_context()

    def work(self) -> None:
        """Serve until it is asked to end."""
        self._context.run(self._server.run, sockets=[self._socket])

    def end(self) -> None:
        """Answer what was asked, and end."""
        self.stopped.set()
        self._server.should_exit = True
        self.join(DRAIN + 1)


def url(settings: Settings) -> str:
    """Return where the console is."""
    host = f"[{settings.console_host}]" if ":" in settings.console_host else settings.console_host
    return f"http{'s' if settings.console_tls_certificate else ''}://{host}:{settings.console_port}/"


def _served(settings: Settings) -> Config:
    """Return what uvicorn serves, and how; refuse a file of users or a certificate that cannot be used."""
    from uvicorn import Config

    from forgekeeper.console.access import HEADERS
    from forgekeeper.console.app import application

    if settings.console_users:
        _users().known()
    certificate, key = settings.console_tls_certificate, settings.console_tls_key
    # Of what uvicorn has to say only what went wrong is of use, and our log has it.
    quiet: dict[str, Any] = {"access_log": False, "log_config": None, "log_level": "warning", "server_header": False}
    made = Config(
        application(settings),
        http="h11",
        ws="none",
        lifespan="off",
        headers=list(HEADERS.items()),
        proxy_headers=False,
        timeout_graceful_shutdown=DRAIN,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        **quiet,
    )
    try:
        made.load()
    except OSError as error:
        why = error.strerror or error
        wrong_use(f"cannot use {certificate} with the key {key}: {why}; name a certificate and its key, both as PEM")
    return made


def _listening(settings: Settings) -> socket.socket:
    try:
        return listen(settings.console_host, settings.console_port)
    except PortTaken as taken:
        raise PortTaken(str(taken).replace("metrics", "the console", 1)) from None


def _refuse_what_is_open(settings: Settings) -> None:
    """Refuse settings by which somebody could look or act who should not."""
    host, certificate, key = settings.console_host, settings.console_tls_certificate, settings.console_tls_key
    asks, beyond = bool(settings.console_users or settings.console_proxy), not _is_loopback(host)
    tls = f"{PREFIX}CONSOLE_TLS_CERTIFICATE and {PREFIX}CONSOLE_TLS_KEY"
    users = f"set {PREFIX}CONSOLE_USERS to a file (`forgekeeper console user add`), or {PREFIX}CONSOLE_PROXY"
    through = f"set {tls}, or name a proxy that speaks TLS in {PREFIX}CONSOLE_PROXY"
    refused = {
        f"{PREFIX}CONSOLE_PORT is 0: a console without a port has nothing to do": not settings.console_port,
        f"set both {tls}, or neither": bool(certificate) != bool(key),
        f"{PREFIX}CONSOLE_ACTIONS is on, but anybody here could act: {users}": settings.console_actions == "on"
        and not asks,
        f"others would see passwords on their way to {host}: {through}": beyond
        and not (certificate or settings.console_proxy),
        f"anybody who reaches {host} could look: {users}": beyond and not asks,
    }
    for sentence in (sentence for sentence, so in refused.items() if so):
        wrong_use(sentence)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _users() -> Users:
    if (path := configured().console_users) is None:
        wrong_use(f"{PREFIX}CONSOLE_USERS is not set: set it to the file that has, or shall have, the console's users")
    return Users(path)


def _password() -> str:
    if sys.stdin.isatty():
        password = getpass.getpass("password: ")
        if getpass.getpass("again: ") != password:
            wrong_use("these were two different passwords; nothing was changed")
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if len(password) < SHORTEST:
        wrong_use(f"a password has {SHORTEST} characters or more; nothing was changed")
    return password
