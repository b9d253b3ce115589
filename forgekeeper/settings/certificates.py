"""Certificates that a setting says are not to be looked at: refused, unless another setting says so in plain words.

Anyone between us and a server whose certificate is not verified can pose as that server: it learns the password, and
says what to delete.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    from forgekeeper.settings import Settings

Unverified = Literal["nothing", "redis", "stores", "everything"]
NO = frozenset({"", "0", "f", "false", "n", "no", "off"})
INVALID = "allow_invalid_certificates"
PROVIDERS = ("AWS", "AZURE", "GOOGLE")
"""Their libraries read options of theirs from the environment, too."""


def unsaid(settings: Settings) -> Iterator[str]:
    """Yield a sentence for each place that would go unverified though FORGEKEEPER_TLS_UNVERIFIED does not say so."""
    said = settings.tls_unverified
    if said in {"nothing", "stores"} and settings.redis_url is not None:
        for option in _of_redis(settings.redis_url.get_secret_value()):
            yield (
                f"FORGEKEEPER_REDIS_URL says {option}, and so anybody on the way could be that Redis: leave it out, and"
                f" name the authority with ssl_ca_certs, or set FORGEKEEPER_TLS_UNVERIFIED={_and('redis', said)}"
            )
    if said in {"nothing", "redis"}:
        for place in _of_stores(settings):
            yield (
                f"{place} says {INVALID}, and so anybody on the way could be that store: leave it out, and give this"
                f" machine the store's authority, or set FORGEKEEPER_TLS_UNVERIFIED={_and('stores', said)}"
            )


def _and(name: str, said: Unverified) -> str:
    return name if said == "nothing" else "everything"


def _of_redis(url: str) -> Iterator[str]:
    for name, value in parse_qsl(urlsplit(url).query):
        if (name == "ssl_cert_reqs" and value != "required") or (name == "ssl_check_hostname" and value.lower() in NO):
            yield f"{name}={value}"


def _of_stores(settings: Settings) -> Iterator[str]:
    remote = False
    for location, url in settings.object_stores.items():
        address, _, query = url.get_secret_value().partition("?")
        remote = remote or not address.startswith("file:")
        pairs = (pair.partition("=") for pair in query.split("&"))
        if any(name == INVALID and value.lower() not in NO for name, _, value in pairs):
            yield f"FORGEKEEPER_OBJECT_STORES ({location})"
    for provider in PROVIDERS if remote else ():
        name = f"{provider}_{INVALID.upper()}"
        if os.environ.get(name, "").lower() not in NO:
            yield name
