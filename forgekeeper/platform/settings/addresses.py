"""URLs of servers and stores: validation, display without secrets, skipped verification."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

import psycopg2
from psycopg2.extensions import parse_dsn
from pydantic import SecretStr
from redis.connection import parse_url

from forgekeeper.platform.settings.sentinel_url import SentinelUrl, SentinelUrlError

if TYPE_CHECKING:
    from forgekeeper.platform.settings import Settings

MASK = "********"
SHOWN_STORE_OPTIONS = {"account_name", "allow_http", "endpoint", "region", "virtual_hosted_style_request"}
"""Options of a store's URL that are shown; anything else may be a secret, for example a half of a key."""
REDIS_OPTIONS = {"db", "password", "protocol", "username"}
TLS_OPTIONS = {"ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile"}
UNQUOTED_URL_MESSAGE = "host or port is invalid: percent-encode special characters in the user and the password"

Unverified = Literal["nothing", "redis", "stores", "everything"]
FALSE_VALUES = {"", "0", "f", "false", "n", "no", "off"}
WEBHOOK_SECRET_PREFIX = "whsec_"  # noqa: S105, it begins each secret
WEBHOOK_KEY_BYTES = range(24, 65)
"""Lengths of the key of a webhook that Standard Webhooks allows."""
INVALID_CERTIFICATES_OPTION = "allow_invalid_certificates"


def check_database_url(value: SecretStr) -> SecretStr:
    """Validate a URL or DSN for libpq; no message repeats it, unlike libpq's own messages."""
    try:
        parts = parse_dsn(value.get_secret_value())
    except psycopg2.ProgrammingError:
        raise ValueError("not a PostgreSQL URL such as postgresql://user@host/name") from None
    # Of several hosts, each may lack its port.
    port_is_number = all(port.isdigit() or not port for port in parts.get("port", "").split(","))
    looks_split = any("@" in parts.get(key, "")[1:] for key in ("host", "dbname"))
    if not port_is_number or (looks_split and not parts.get("host", "").startswith("/")):
        # Half of the password was parsed as a host or a port, and would be printed as such.
        raise ValueError(UNQUOTED_URL_MESSAGE)
    return value


def check_redis_url(value: SecretStr) -> SecretStr:
    """Validate a URL for redis-py, with options that redis-py knows, or a URL of Sentinels."""
    try:
        sentinel = SentinelUrl.parse(value.get_secret_value())
        url = urlsplit(sentinel.redis_url if sentinel else value.get_secret_value())
        options = dict(parse_qsl(url.query, strict_parsing=bool(url.query)))
        _port = url.port
    except SentinelUrlError:
        raise
    except ValueError:
        raise ValueError(UNQUOTED_URL_MESSAGE) from None
    if url.scheme not in {"redis", "rediss", "unix"} or not (url.hostname or url.scheme == "unix"):
        raise ValueError("not a Redis URL such as redis://host:6379/0, rediss://host:6379/0 or unix:///path/redis.sock")
    if url.scheme != "unix" and (url.fragment or not re.fullmatch(r"/?\d*", url.path)):
        # Only a number may follow the host; anything else is the rest of a password.
        raise ValueError(UNQUOTED_URL_MESSAGE)
    known = REDIS_OPTIONS | (TLS_OPTIONS if url.scheme == "rediss" else set())
    if not options.keys() <= known or not options.get("db", "0").isdigit():
        raise ValueError(f"a {url.scheme}:// URL may have the options {', '.join(sorted(known))}; db is a number")
    if options.get("protocol", "3") != "3":
        raise ValueError("forgekeeper needs protocol 3 of Redis: remove the option protocol")
    return value


def check_webhook_url(value: SecretStr) -> SecretStr:
    """Validate the URL of a webhook: http or https, without user and password, which no request would contain."""
    text = value.get_secret_value()
    try:
        url = urlsplit(text)
        is_usable = url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not re.fullmatch(r"[!-~]+", text):
        raise ValueError("not a URL such as https://host/path")
    if "@" in url.netloc:
        raise ValueError("it has a user or a password: write a token into the path or the query")
    return value


def check_webhook_secret(value: SecretStr) -> SecretStr:
    """Validate the secret of a webhook: base64 after a prefix, as Standard Webhooks describes."""
    text = value.get_secret_value()
    try:
        key = base64.b64decode(text.removeprefix(WEBHOOK_SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not text.startswith(WEBHOOK_SECRET_PREFIX) or len(key) not in WEBHOOK_KEY_BYTES:
        raise ValueError(f'not a secret: create one with `echo "{WEBHOOK_SECRET_PREFIX}$(openssl rand -base64 32)"`')
    return value


def check_sentry_dsn(value: SecretStr) -> SecretStr:
    """Validate a DSN of Sentry: a URL with a public key and the number of a project."""
    text = value.get_secret_value()
    try:
        url = urlsplit(text)
        is_usable = url.scheme in {"http", "https"} and bool(url.hostname and url.username) and url.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not re.fullmatch(r"[!-~]+/\d+", text):
        raise ValueError("not a DSN such as https://KEY@host/1: copy it from the project's settings in Sentry")
    return value


def show_database_url(url: str) -> str:
    """Return the URL of PostgreSQL for display: user, host or socket's folder, port and name."""
    at = parse_dsn(url)
    user = at.get("user", "")
    name = at.get("dbname") or user or "postgres"
    ports = ",".join(port or "5432" for port in at.get("port", "").split(","))
    return f"postgresql://{user}{'@' if user else ''}{at.get('host', '')}:{ports}/{name}"


def show_redis_url(url: str) -> str:
    """Return the URL of Redis for display: host and port, or socket, or Sentinels and master, and database number."""
    if (sentinel := SentinelUrl.parse(url)) is not None:
        return sentinel.show()
    at, scheme = parse_url(url), urlsplit(url).scheme  # type: ignore[no-untyped-call]
    place = at.get("path") or f"{at.get('host')}:{at.get('port', 6379)}"
    return f"{scheme}://{place}/{at.get('db', 0)}"


def show_store_url(url: str) -> str:
    """Return the URL of an object store for display, masked as a whole if it is malformed."""
    address, mark, query = url.partition("?")
    if not re.fullmatch(r"\w+://[^@#]*", address):
        return MASK
    # A part without "=" is not an option: it may be the rest of a key that contains an "&".
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    return (
        address + mark + "&".join(f"{name}={_show_option(name, value)}" if value else MASK for name, _, value in pairs)
    )


def _show_option(name: str, value: str) -> str:
    value = unquote(value)
    return value if name in SHOWN_STORE_OPTIONS and not {"@", "#", "?"} & set(value) else MASK


def find_unverified_servers(settings: Settings) -> Iterator[str]:
    """Yield a sentence for each server with an unverified certificate that no setting permits.

    Anyone on the network path can pose as such a server: he learns the password and decides about deletions.
    """
    for kind, place in _list_unverified(settings):
        if settings.tls_unverified not in {kind, "everything"}:
            yield (
                f"{place}, so anybody on the network path can pose as that server: remove it, and install the server's"
                f" certificate authority on this machine, or set FORGEKEEPER_TLS_UNVERIFIED={kind} (everything: both"
                " Redis and stores)"
            )


def _list_unverified(settings: Settings) -> Iterator[tuple[Unverified, str]]:
    url = settings.redis_url.get_secret_value() if settings.redis_url else ""
    for name, value in parse_qsl(url.partition("?")[2]):
        if (name == "ssl_cert_reqs" and value != "required") or (
            name == "ssl_check_hostname" and value.lower() in FALSE_VALUES
        ):
            yield "redis", f"FORGEKEEPER_REDIS_URL sets {name}"
    urls = {location: url.get_secret_value() for location, url in settings.object_stores.items()}
    for location, url in urls.items():
        options = dict(parse_qsl(url.partition("?")[2]))
        if options.get(INVALID_CERTIFICATES_OPTION, "").lower() not in FALSE_VALUES:
            yield "stores", f"FORGEKEEPER_OBJECT_STORES ({location}) sets {INVALID_CERTIFICATES_OPTION}"
    # The stores' libraries also read their options from the environment.
    remote = not all(url.startswith("file:") for url in urls.values())
    for name in ("AWS", "AZURE", "GOOGLE") if remote else ():
        if os.environ.get(f"{name}_{INVALID_CERTIFICATES_OPTION.upper()}", "").lower() not in FALSE_VALUES:
            yield "stores", f"{name}_{INVALID_CERTIFICATES_OPTION.upper()} is set"


def read_s3_option(options: Mapping[str, str], name: str) -> str:
    """Return an option of an S3 store from its URL or the environment; "" if neither has it."""
    return options.get(name) or os.environ.get(f"AWS_{name.upper()}", "")
