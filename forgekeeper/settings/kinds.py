"""What kinds of value a setting can have, and how each is read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlsplit

import psycopg2
from psycopg2.extensions import parse_dsn
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, SecretStr
from pydantic_settings import NoDecode

from forgekeeper.settings.cron import Cron, parse

REDIS_OPTIONS = {
    "db",
    "password",
    "protocol",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_keyfile",
    "username",
}
CERTIFICATES = ("none", "optional", "required")
UNQUOTED = "host or port make no sense: percent-encode special characters in the user and the password"


def _duration(value: object) -> object:
    """Let a bare number mean seconds."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("not a number of seconds") from None


def _schedule(value: object) -> Cron | None:
    assert isinstance(value, str), "schedules come from the environment or from a default, both text"
    return parse(value)


def _database_url(value: SecretStr) -> SecretStr:
    try:
        parts = parse_dsn(value.get_secret_value())
    except psycopg2.ProgrammingError:
        # libpq's own message repeats the whole URL, password included.
        raise ValueError("not a PostgreSQL URL such as postgresql://user@host/name") from None
    port_is_number = all(port.isdigit() for port in parts.get("port", "0").split(","))
    looks_split = any("@" in parts.get(key, "")[1:] for key in ("host", "dbname"))
    if not port_is_number or (looks_split and not parts.get("host", "").startswith("/")):
        # Half of the password has become a host or a port, and would be printed as one.
        raise ValueError(UNQUOTED)
    return value


def _redis_url(value: SecretStr) -> SecretStr:
    try:
        url = urlsplit(value.get_secret_value())
        pairs = parse_qsl(url.query, strict_parsing=bool(url.query))
        _port = url.port
    except ValueError:
        raise ValueError(UNQUOTED) from None
    if url.scheme not in {"redis", "rediss", "unix"} or not (url.hostname or url.scheme == "unix"):
        raise ValueError("not a Redis URL such as redis://host:6379/0, rediss://host:6379/0 or unix:///path/redis.sock")
    if url.scheme != "unix" and (url.fragment or not re.fullmatch(r"/?\d*", url.path)):
        # What follows the host is a number; anything else is the rest of a password.
        raise ValueError(UNQUOTED)
    options = dict(pairs)
    if not options.keys() <= REDIS_OPTIONS or not options.get("db", "0").isdigit():
        raise ValueError(f"the options of a Redis URL are {', '.join(sorted(REDIS_OPTIONS))}; db is a number")
    if len(options) < len(pairs):
        # It is not clear which of two counts.
        raise ValueError("an option is given twice")
    if url.scheme != "rediss" and (of_tls := sorted(name for name in options if name.startswith("ssl_"))):
        raise ValueError(f"{of_tls[0]} goes with TLS, which is rediss://")
    if options.get("ssl_cert_reqs", "required") not in CERTIFICATES:
        raise ValueError(f"ssl_cert_reqs is one of {', '.join(CERTIFICATES)}")
    return value


def _stores(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("not valid JSON") from None


def _folders(value: tuple[str, ...]) -> tuple[str, ...]:
    """Take folders without the slash at their end; raise for what is none, and for no folder at all."""
    folders = tuple(folder.removesuffix("/") for folder in value)
    if not folders:
        raise ValueError("an empty list would let nothing be deleted there: name a folder, or leave the location out")
    for folder in folders:
        parts = folder.split("/")
        if {"", ".", ".."}.intersection(parts) or not folder.isprintable():
            raise ValueError(f"{folder!r} is no folder of a store: write a/b, without a slash in front, '.' or '..'")
    return folders


def _modules(value: object) -> tuple[str, ...]:
    names = tuple(name.strip() for name in str(value).split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{name!r} is no module: name modules such as workers, with commas between them")
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class Kind:
    """What people call the kind of a value, where its type alone does not say."""

    name: str


# Three weeks: PostgreSQL counts its time-outs in milliseconds, in 31 bits.
Duration = Annotated[timedelta, BeforeValidator(_duration), Field(gt=timedelta(0), le=timedelta(weeks=3))]
Visibility = Annotated[Duration, Field(ge=timedelta(seconds=2))]
Schedule = Annotated[Cron | None, PlainValidator(_schedule), NoDecode]
DatabaseUrl = Annotated[SecretStr, AfterValidator(_database_url)]
RedisUrl = Annotated[SecretStr, AfterValidator(_redis_url)]
Share = Annotated[float, Field(ge=0, le=1), Kind("share, 0 to 1")]
Pace = Annotated[float, Field(gt=0), Kind("per second")]
Count = Annotated[int, Field(ge=1), Kind("count")]
Bytes = Annotated[int, Field(ge=1), Kind("bytes")]
Days = Annotated[int, Field(ge=31, le=36_500), Kind("days")]
Port = Annotated[int, Field(ge=0, le=65535), Kind("port")]
Grace = Annotated[timedelta, BeforeValidator(_duration), Field(ge=timedelta(0))]
ObjectStores = Annotated[dict[str, SecretStr], NoDecode, BeforeValidator(_stores)]
ObjectPrefixes = Annotated[
    dict[str, Annotated[tuple[str, ...], AfterValidator(_folders)]], NoDecode, BeforeValidator(_stores)
]
Modules = Annotated[tuple[str, ...], PlainValidator(_modules), NoDecode]
CatchUp = Literal["once", "skip"]


def setting(default: Any, sentence: str) -> Any:
    """Declare a setting: its default, written as an operator would, and what it is for."""
    return Field(default=default, description=sentence, validate_default=True)
