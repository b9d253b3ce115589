"""The command `console`, which serves the page, and the management of its users."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from getpass import getpass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import structlog
import typer

from forgekeeper.cli.connection import configured, recorded
from forgekeeper.cli.console.users import BY_PROXY, HERE, LONGEST, Role, User, Users, fits, hashed_password
from forgekeeper.cli.terminal import Json, Problem, answer, emit, group, table, wrong_use
from forgekeeper.platform import lifetime
from forgekeeper.platform.connections import Limits, connect
from forgekeeper.platform.extras import say_how_to_install
from forgekeeper.platform.settings import PREFIX, Settings
from metrics.endpoint import listen
from metrics.threads import ended_itself

if TYPE_CHECKING:
    from uvicorn import Config

BRIEF = timedelta(seconds=2)
LIMITS = Limits(BRIEF, timedelta(seconds=15), BRIEF, BRIEF, BRIEF, timedelta(seconds=0.7))
"""Timeouts of the console's servers: only statements of a preview may take long."""
CONNECTIONS = 8
DRAIN = 2
"""Seconds to finish open requests during shutdown."""
SHORTEST = 8
"""Minimum characters of a password."""
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
        wrong_use(f"this needs the extra `console`, for {missing[0]}: {say_how_to_install('console')}")
    if context.invoked_subcommand is not None:
        return
    from uvicorn import Server

    settings = configured()
    _refuse_what_is_open(settings)
    connect(settings, LIMITS, name="console", connections=CONNECTIONS)
    with recorded(settings):
        server = Server(_served(settings))
        # Uvicorn raises the signal again after its end, which would kill us before the cleanup.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.handle_exit)
        listening = listen(settings.console_host, settings.console_port, "the console")
        lifetime.tell_supervisor("READY=1", f"STATUS=serves {url(settings)}")
        log.info("console started", url=url(settings))
        server.run(sockets=[listening])
    log.info("console stopped")
    raise typer.Exit(int(ended_itself()))


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


def url(settings: Settings) -> str:
    """Return the console's address."""
    host = f"[{settings.console_host}]" if ":" in settings.console_host else settings.console_host
    return f"http{'s' if settings.console_tls_certificate else ''}://{host}:{settings.console_port}/"


def _served(settings: Settings) -> Config:
    """Return uvicorn's configuration; refuse an unusable file of users or certificate."""
    from uvicorn import Config

    from forgekeeper.cli.console.access import HEADERS
    from forgekeeper.cli.console.app import application
    from forgekeeper.cli.console.connections import Connections

    if settings.console_users:
        _users().known()
    # Only uvicorn's warnings and errors are useful, and they appear in our log.
    made = Config(
        application(settings),
        http=Connections(settings.console_proxy).protocol(),
        ws="none",
        lifespan="off",
        headers=list(HEADERS.items()),
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        log_level="warning",
        timeout_graceful_shutdown=DRAIN,
        ssl_certfile=settings.console_tls_certificate,
        ssl_keyfile=settings.console_tls_key,
    )
    try:
        made.load()
    except OSError as error:
        pair = f"{made.ssl_certfile} with the key {made.ssl_keyfile}"
        wrong_use(f"cannot use {pair}: {error.strerror or error}; name a certificate and its key, both as PEM")
    return made


def _refuse_what_is_open(settings: Settings) -> None:
    """Refuse settings that would let unauthorized people look or act."""
    host, certificate, proxy = settings.console_host, settings.console_tls_certificate, settings.console_proxy
    beyond, tls = host not in HERE, f"{PREFIX}CONSOLE_TLS_CERTIFICATE and {PREFIX}CONSOLE_TLS_KEY"
    if not settings.console_port:
        wrong_use(f"{PREFIX}CONSOLE_PORT is 0: a console without a port has nothing to do")
    if bool(certificate) != bool(settings.console_tls_key):
        wrong_use(f"set both {tls}, or neither")
    if beyond and not (certificate or proxy):
        through = f"set {tls}, or name a proxy that speaks TLS in {PREFIX}CONSOLE_PROXY"
        wrong_use(f"others would see passwords on their way to {host}: {through}")
    if (beyond or settings.console_actions == "on") and not (settings.console_users or proxy):
        users = f"set {PREFIX}CONSOLE_USERS to a file (`forgekeeper console user add`), or {PREFIX}CONSOLE_PROXY"
        wrong_use(f"anybody who reaches {host} could {'look' if beyond else 'act'}: {users}")


def _users() -> Users:
    if (path := configured().console_users) is None:
        wrong_use(f"{PREFIX}CONSOLE_USERS is not set: set it to the file that has, or shall have, the console's users")
    return Users(path)


def _password() -> str:
    if not sys.stdin.isatty():
        password = sys.stdin.readline().rstrip("\r\n")
    elif (password := getpass("password: ")) != getpass("again: "):
        wrong_use("these were two different passwords; nothing was changed")
    if len(password) < SHORTEST:
        wrong_use(f"a password has {SHORTEST} characters or more; nothing was changed")
    return password
