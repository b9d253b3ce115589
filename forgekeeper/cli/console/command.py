"""The command `console`, which serves the page, and the management of its users and tokens."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from getpass import getpass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import structlog
import typer

from forgekeeper.cli.connection import load_and_configure_logging, record_acts
from forgekeeper.cli.console.named_lines import NAME_RULE, LineFile, is_valid_name
from forgekeeper.cli.console.token_command import token
from forgekeeper.cli.console.tokens import TOKEN_FORMAT
from forgekeeper.cli.console.users import LOCAL_HOST_NAMES, PROXY_USER_HASH, USER_FORMAT, Role, User, hash_password
from forgekeeper.cli.terminal import Json, create_group, print_answer, print_json, print_table, wrong_use
from forgekeeper.platform.connections import ServerTimeouts, configure_clients
from forgekeeper.platform.extras import install_command
from forgekeeper.platform.settings import PREFIX, Settings
from metrics.endpoint import open_listening_socket
from metrics.supervisor import start_watchdog, tell_supervisor
from metrics.threads import ended_itself

if TYPE_CHECKING:
    from uvicorn import Config

SHORT_TIMEOUT = timedelta(seconds=2)
CONSOLE_LIMITS = ServerTimeouts(
    SHORT_TIMEOUT, timedelta(seconds=15), SHORT_TIMEOUT, SHORT_TIMEOUT, SHORT_TIMEOUT, timedelta(seconds=0.7)
)
"""Timeouts of the console's servers: only statements of a preview may take long."""
MAX_DATABASE_CONNECTIONS = 8
SHUTDOWN_DRAIN_SECONDS = 2
"""Seconds to finish open requests during shutdown."""
MIN_PASSWORD_LENGTH = 8
"""Minimum characters of a password."""
REQUIRED_MODULES = ("argon2", "babel", "itsdangerous", "jinja2", "markdown_it", "starlette", "uvicorn", "yaml")

log = structlog.get_logger(__name__)
console = typer.Typer(name="console", help="Serve web pages with the facts and actions of the commands.")


@console.callback(invoke_without_command=True)
def serve_console(context: typer.Context) -> None:
    """Serve web pages with the facts and actions of the commands.

    It listens on FORGEKEEPER_CONSOLE_HOST and FORGEKEEPER_CONSOLE_PORT.  It also runs without PostgreSQL and Redis.
    SIGTERM and Ctrl-C end it.
    """
    if missing := [name for name in REQUIRED_MODULES if find_spec(name) is None]:
        wrong_use(f"this needs the extra `console`, for {missing[0]}: {install_command('console')}")
    if context.invoked_subcommand is not None:
        return
    from uvicorn import Server

    settings = load_and_configure_logging()
    _refuse_open_access(settings)
    configure_clients(settings, CONSOLE_LIMITS, name="console", connections=MAX_DATABASE_CONNECTIONS)
    with record_acts(settings):
        server = Server(_configure_server(settings))
        # Uvicorn raises the signal again after its end, which would kill us before the cleanup.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.handle_exit)
        listening = open_listening_socket(settings.console_host, settings.console_port, "the console")
        start_watchdog()
        tell_supervisor("READY=1", f"STATUS=serves {console_url(settings)}")
        log.info("console started", url=console_url(settings))
        server.run(sockets=[listening])
    log.info("console stopped")
    raise typer.Exit(int(ended_itself()))


def list_users(*, json: Json = False) -> None:
    """List the users."""
    found = [(one.name, one.role, one.hash == PROXY_USER_HASH) for one in _require_user_file().read_lines().values()]
    if json:
        print_json([{"name": name, "role": role, "proxy": proxy} for name, role, proxy in found])
    else:
        print_table(
            ["user", "role", "authentication"], ((*one, "proxy" if proxy else "password") for *one, proxy in found)
        )


user = create_group("user", "List and change the users of the console.", list_users)
console.add_typer(user)
console.add_typer(token)


@user.command("add")
def add_user(
    name: Annotated[str, typer.Argument(help="The user's name, as for the login, or as the proxy sends it.")],
    role: Annotated[Role, typer.Option(help="A viewer reads, an operator also acts.")],
    *,
    proxy: Annotated[
        bool, typer.Option("--proxy", help="A proxy authenticates this user, who has no password.")
    ] = False,
    json: Json = False,
) -> None:
    """Add a user, or change a user's role and password, which ends the user's sessions.

    It asks for the password, or reads it as a line from standard input.
    """
    users = _require_user_file()
    if not is_valid_name(name):
        wrong_use(NAME_RULE)
    hashed = PROXY_USER_HASH if proxy else hash_password(_read_password())
    with users.edit_lines() as known:
        done = "changed" if name in known else "added"
        known[name] = User(name, role, hashed)
    text = f"{done} {name}, {role}{', authenticated by a proxy' if proxy else ''}"
    print_answer({"name": name, "role": role, "proxy": proxy, "done": done}, text, json=json)


@user.command("remove")
def remove_user(name: Annotated[str, typer.Argument(help="The user's name.")], *, json: Json = False) -> None:
    """Remove a user, and end the user's sessions."""
    _require_user_file().remove_line(name)
    print_answer({"name": name, "done": "removed"}, f"removed {name}", json=json)


def console_url(settings: Settings) -> str:
    """Return the console's address."""
    host = f"[{settings.console_host}]" if ":" in settings.console_host else settings.console_host
    return f"http{'s' if settings.console_tls_certificate else ''}://{host}:{settings.console_port}/"


def _configure_server(settings: Settings) -> Config:
    """Return uvicorn's configuration; refuse an unusable file of users or certificate."""
    from uvicorn import Config

    from forgekeeper.cli.console.access import RESPONSE_HEADERS
    from forgekeeper.cli.console.app import create_application
    from forgekeeper.cli.console.connections import OpenConnections

    if settings.console_users:
        _require_user_file().read_lines()
    if settings.console_tokens:
        LineFile(settings.console_tokens, TOKEN_FORMAT).read_lines()
    # Only uvicorn's warnings and errors are useful, and they appear in our log.
    made = Config(
        create_application(settings),
        http=OpenConnections(settings.console_proxy).protocol_class(),
        ws="none",
        lifespan="off",
        headers=list(RESPONSE_HEADERS.items()),
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        log_level="warning",
        timeout_graceful_shutdown=SHUTDOWN_DRAIN_SECONDS,
        ssl_certfile=settings.console_tls_certificate,
        ssl_keyfile=settings.console_tls_key,
    )
    try:
        made.load()
    except OSError as error:
        pair = f"{made.ssl_certfile} with the key {made.ssl_keyfile}"
        wrong_use(f"cannot use {pair}: {error.strerror or error}; name a certificate and its key, both as PEM")
    return made


def _refuse_open_access(settings: Settings) -> None:
    """Refuse settings that would let unauthorized people look or act."""
    host, certificate, proxy = settings.console_host, settings.console_tls_certificate, settings.console_proxy
    beyond, tls = host not in LOCAL_HOST_NAMES, f"{PREFIX}CONSOLE_TLS_CERTIFICATE and {PREFIX}CONSOLE_TLS_KEY"
    if not settings.console_port:
        wrong_use(f"{PREFIX}CONSOLE_PORT is 0: set it to the console's port")
    if bool(certificate) != bool(settings.console_tls_key):
        wrong_use(f"set both {tls}, or neither")
    if beyond and not (certificate or proxy):
        through = f"set {tls}, or name a proxy that speaks TLS in {PREFIX}CONSOLE_PROXY"
        wrong_use(f"passwords sent to {host} would not be encrypted: {through}")
    if (beyond or settings.console_actions == "on") and not (settings.console_users or proxy):
        users = f"set {PREFIX}CONSOLE_USERS to a file (`forgekeeper console user add`), or {PREFIX}CONSOLE_PROXY"
        wrong_use(f"anybody who reaches {host} could {'look' if beyond else 'act'}: {users}")


def _require_user_file() -> LineFile[User]:
    if (path := load_and_configure_logging().console_users) is None:
        wrong_use(f"{PREFIX}CONSOLE_USERS is not set: set it to the path of the file with the console's users")
    return LineFile(path, USER_FORMAT)


def _read_password() -> str:
    if not sys.stdin.isatty():
        password = sys.stdin.readline().rstrip("\r\n")
    elif (password := getpass("password: ")) != getpass("again: "):
        wrong_use("the two passwords differ; nothing was changed")
    if len(password) < MIN_PASSWORD_LENGTH:
        wrong_use(f"a password has at least {MIN_PASSWORD_LENGTH} characters; nothing was changed")
    return password
