"""Where servers and stores are, as it may be shown: host, port, database, bucket, and never a secret."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

from psycopg2.extensions import parse_dsn

MASK = "********"
SHOWN_OF_A_STORE = frozenset(
    {"account_name", "allow_http", "allow_invalid_certificates", "application_credentials", "base_url"}
    | {"disable_bulk_delete", "endpoint", "region", "service_account", "skip_signature", "tenant_id"}
    | {"use_emulator", "virtual_hosted_style_request"}
)
"""Options of a store's URL that are no secrets; whatever else stands there, a half of a key perhaps, is one."""


def of_database(url: str) -> str:
    """Show where PostgreSQL is, with port and database even where the URL leaves them to libpq."""
    parts = parse_dsn(url)
    user, host, port = (parts.pop(name, "") for name in ("user", "host", "port"))
    name = parts.pop("dbname", "") or user or "postgres"
    login = user + (f":{MASK}" if parts.pop("password", None) else "")
    if "/" in host or "," in host or not host:
        # Sockets, or several servers, each with a port of its own perhaps.
        parts = ({"host": host} if host else {}) | ({"port": port or "5432"}) | parts
        place = ""
    else:
        place = f"[{host}]" if ":" in host else host
        place += f":{port or 5432}"
    query = "&".join(f"{key}={MASK if _is_secret(key) else value}" for key, value in parts.items())
    return f"postgresql://{login}{'@' if login else ''}{place}/{name}{'?' if query else ''}{query}"


def of_redis(url: str) -> str:
    """Show where Redis is, with port and number of the database even where the URL leaves them out."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    user, colon, _password = parts.netloc.rpartition("@")[0].partition(":")
    # A user alone is more often a password whose colon was forgotten.
    login = (f"{unquote(user)}:{MASK}@" if colon else f"{MASK}@") if parts.username is not None else ""
    number = options.pop("db", "") or (parts.path.strip("/") if parts.scheme != "unix" else "") or "0"
    query = "".join(f"&{key}={MASK if _is_secret(key) else value}" for key, value in options.items())
    if parts.scheme == "unix":
        return f"unix://{login}{unquote(parts.path)}?db={number}{query}"
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{login}{host}:{parts.port or 6379}/{number}{query.replace('&', '?', 1)}"


def of_store(url: str) -> str:
    """Show where an object store is; of one that makes no sense, not more than its kind."""
    address, mark, query = url.partition("?")
    scheme, separator, place = address.partition("://")
    if not separator or not scheme.isalnum():
        return MASK
    if "@" in place or "#" in place:
        return f"{scheme}://{MASK}"
    pairs = (pair.partition("=") for pair in query.split("&"))
    options = "&".join(f"{name}={_option(name, value)}" if equals else MASK for name, equals, value in pairs)
    return address + mark + (options if query else "")


def _option(name: str, value: str) -> str:
    return value if name in SHOWN_OF_A_STORE and not {"@", "#", "?"} & set(unquote(value)) else MASK


def _is_secret(name: str) -> bool:
    return any(word in name for word in ("password", "secret", "scram_", "token"))
