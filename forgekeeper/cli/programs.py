"""`redis` and `psql`: the servers' own clients, led to where the settings lead.

Passwords go by the environment: a command line is everybody's to read.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from typing import Annotated, NoReturn
from urllib.parse import parse_qs, unquote, urlsplit

import typer
from psycopg2.extensions import make_dsn, parse_dsn

from forgekeeper.boot import load
from forgekeeper.cli.console import Problem

REDIS_CLIENTS = ("redis-cli", "valkey-cli")
Arguments = Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Passed on as they are.")]


def redis(arguments: Arguments = None) -> None:
    """Open `redis-cli` at the Redis of the settings, or let it do ARGS: `forgekeeper redis PING`."""
    url = urlsplit(load().require_redis())
    options = {name: values[-1] for name, values in parse_qs(url.query).items()}
    user = unquote(url.username or "") or options.get("username")
    password = unquote(url.password or "") or options.get("password")
    environment = {"REDISCLI_AUTH": password} if password else {}
    program = _installed(*REDIS_CLIENTS, package="redis-tools")
    where = list(_where(url.scheme, unquote(url.path), url.hostname, url.port, options))
    _become(program, [*where, *(["--user", user] if user else []), *(arguments or [])], environment)


def psql(arguments: Arguments = None) -> None:
    """Open `psql` at the database of the settings, or let it do ARGS: `forgekeeper psql -c 'select 1'`."""
    parts = parse_dsn(load().require_database())
    password = parts.pop("password", None)
    # The environment has no place for that of a key: psql asks for it.
    parts.pop("sslpassword", None)
    # Whoever looks at the server's sessions can tell a person from a batch.
    parts.setdefault("fallback_application_name", "forgekeeper psql")
    program = _installed("psql", package="postgresql-client")
    _become(program, ["--dbname", make_dsn(**parts), *(arguments or [])], {"PGPASSWORD": password} if password else {})


def _where(scheme: str, path: str, host: str | None, port: int | None, options: dict[str, str]) -> Iterator[str]:
    """Yield the options that lead redis-cli to a URL's server and database."""
    if scheme == "unix":
        yield from ("-s", path)
    else:
        yield from ("-h", host or "localhost", "-p", str(port or 6379))
    database = options.get("db") or (path.strip("/") if scheme != "unix" else "")
    if database:
        yield from ("-n", database)
    if options.get("protocol") == "3":
        yield "-3"
    if scheme == "rediss":
        yield "--tls"
        yield from _certificates(options)


def _certificates(options: dict[str, str]) -> Iterator[str]:
    names = {"ssl_ca_certs": "--cacert", "ssl_certfile": "--cert", "ssl_keyfile": "--key"}
    for name, option in names.items():
        if name in options:
            yield from (option, options[name])
    if options.get("ssl_cert_reqs") in {"none", "optional"}:
        yield "--insecure"


def _installed(*names: str, package: str) -> str:
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise Problem(f"there is no {' or '.join(names)} on the PATH: install it (Debian: {package})")
    return found


def _become(program: str, arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Go on as *program*: its output, its signals and its exit status are its own."""
    sys.stdout.flush()
    os.execve(program, [program, *arguments], {**os.environ, **environment})  # noqa: S606, that is what was asked for
