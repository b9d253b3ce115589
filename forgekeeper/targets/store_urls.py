"""Open the object store behind a URL.

    s3://bucket/prefix?endpoint=http://127.0.0.1:9000&allow_http=true&region=eu-west-1&access_key_id=…&secret_access_key=…
    gs://bucket/prefix?service_account=/etc/forgekeeper/google.json
    az://container/prefix?account_name=…&account_key=…
    file:///srv/objects

The store's options follow the question mark.  `STORE_OPTIONS` lists all of them; `&`, `#` and `%` in them are
percent-encoded.  Missing options are taken from the environment under the store's usual names (`AWS_ACCESS_KEY_ID`, …).
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import from_url

from metrics.threads import end_process

if TYPE_CHECKING:
    from obstore.store import ObjectStore

HTTP_OPTIONS = frozenset({"allow_http", "allow_invalid_certificates", "proxy_url"})
STORE_OPTIONS = {
    "file": frozenset[str](),
    "s3": HTTP_OPTIONS
    | {"access_key_id", "secret_access_key", "session_token", "skip_signature"}
    | {"endpoint", "region", "virtual_hosted_style_request", "disable_bulk_delete"},
    "gs": HTTP_OPTIONS
    | {"service_account", "service_account_key", "application_credentials", "base_url", "skip_signature"},
    "az": HTTP_OPTIONS
    | {"account_name", "account_key", "sas_key", "client_id", "client_secret", "tenant_id"}
    | {"endpoint", "use_emulator", "skip_signature"},
}
STORE_ERRORS = (BaseError, OSError, ValueError, TypeError)
"""All exceptions of obstore, its own and built-in ones."""

MAX_REASON_CHARACTERS = 200
_RETRY_DETAILS = re.compile(r" in [\d.]+[nµm]?s(, after \d+ retries, max_retries: \d+, retry_timeout: \S+)? +(?=- )")
_URL_QUERY = re.compile(r"\?[^\s,]*")
_S3_ERROR = re.compile(r"(<\?xml[^>]*>\s*)?<Error>.*?<Code>(\w+)</Code>.*", re.DOTALL)

StoreAnswer = TypeVar("StoreAnswer")
_opening_process = cache(os.getpid)


def open_store(url: str, *, request_timeout: timedelta, retries: int, retry_timeout: timedelta) -> ObjectStore:
    """Open the store behind *url*; raise one of `STORE_ERRORS` if the URL or its folder is wrong.

    Sends no request.  A request without an answer within *request_timeout* has failed.  A request that may be repeated
    is retried up to *retries* times, but not after *retry_timeout*.

    Empty folders of a local store stay: the forge may be about to write into them.  The client's own bulk deletion at
    S3 is off: it counts an object as deleted unless the answer names it as failed.
    """
    check_process()
    address, options = split_url(url)
    if address.startswith("file:"):
        return from_url(address)
    if address.startswith("s3:"):
        options["disable_bulk_delete"] = "true"
    client: Any = {"timeout": request_timeout} | {key: options.pop(key) for key in HTTP_OPTIONS & options.keys()}
    config: Any = options
    retry: Any = {"max_retries": retries, "retry_timeout": retry_timeout}
    return from_url(address, config=config, client_options=client, retry_config=retry)


async def send_request(
    request: Callable[..., Awaitable[StoreAnswer]], *arguments: object, timeout_seconds: float | None
) -> StoreAnswer:
    """Send a request to a store; raise `TimeoutError` without an answer *within* seconds.

    A folder has no timeout of its own: its disk may hang, and a request without a free thread waits for a thread.  If
    the store's client cannot start, it never will: the process ends itself.
    """
    try:
        async with asyncio.timeout(timeout_seconds):
            return await request(*arguments)
    except BaseException as error:
        # An exception of Rust, which Python cannot import.
        if type(error).__name__ == "PanicException":
            end_process("the client for object stores crashed", exc_info=error)
        raise


def split_url(url: str) -> tuple[str, dict[str, str]]:
    """Split a store's URL into its address and its decoded options.

    Raises ValueError for an unknown option.
    """
    address, _, query = url.partition("?")
    parts = urlsplit(address)
    if parts.scheme not in STORE_OPTIONS:
        raise ValueError("not a URL such as s3://bucket/prefix, gs://…, az://… or file:///folder")
    if "#" in url or "@" in parts.netloc:
        raise ValueError("write keys after the question mark, with '#' percent-encoded: ?access_key_id=…")
    # Not parse_qsl: it reads '+' as a space, and secret keys contain it.
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    # A part without "=" may be the rest of a key with an unencoded "&".
    options = {name if equals else "without a value": unquote(value) for name, equals, value in pairs}
    if unknown := sorted(options.keys() - STORE_OPTIONS[parts.scheme]):
        known = ", ".join(sorted(STORE_OPTIONS[parts.scheme])) or "none"
        raise ValueError(f"unknown option {', '.join(unknown)}; {parts.scheme}:// has: {known}")
    return address, options


def describe_error(error: Exception) -> str:
    """Return the error as one short line, without an address's options: they may be secret."""
    line = (_S3_ERROR.sub(r"\2", str(error)).strip().splitlines() or [type(error).__name__])[0]
    line = _URL_QUERY.sub("", _RETRY_DETAILS.sub(" ", line)).strip()
    # Long paths are at the beginning, and the server's message is at the end.
    half = MAX_REASON_CHARACTERS // 2
    return line if len(line) <= MAX_REASON_CHARACTERS else f"{line[: half - 1]}…{line[-half:]}"


def check_process() -> None:
    """Raise if this process was forked after obstore was used.

    A child lacks obstore's threads and would wait forever.
    """
    if _opening_process() != os.getpid():
        raise RuntimeError(
            f"process {_opening_process()} used object stores before it forked: open object stores in the child only"
        )
