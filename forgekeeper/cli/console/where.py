"""Installation, servers and places: whether they belong together and their clocks agree."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import NamedTuple

from forgekeeper.cli import check_places
from forgekeeper.guards import preconditions
from forgekeeper.platform.installation import Installation, objection
from forgekeeper.platform.settings import Settings
from forgekeeper.platform.settings.addresses import of_database, of_redis, of_store
from metrics.threads import Probe, asked

AGAIN, PATIENCE = 10.0, 0.7
"""Seconds between checks of places, and time limit of all checks together.

A check costs some places a request.
"""


class Fact(NamedTuple):
    """A server or place, its address, and its error, or None."""

    what: str
    at: str
    wrong: str | None = None


class Places:
    """Checks of the repositories' root and the stores.

    A place that hangs delays nobody and is checked once at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._probes: dict[tuple[str, str], Probe] = {}
        self._again, self._found = 0.0, list[Fact]()

    def look(self, settings: Settings, ours: str | None) -> list[Fact]:
        """Return the state of each place, as `check` does.

        Settings and installation must not change between calls.
        """
        with self._lock:
            if time.monotonic() >= self._again:
                self._probes = self._probes or _probes(settings, ours)
                found = zip(self._probes, asked(list(self._probes.values()), PATIENCE), strict=True)
                self._found = [
                    Fact(*place, "it does not answer" if one is None else None if one.level == "ok" else one.message)
                    for place, one in found
                ]
                self._again = time.monotonic() + AGAIN
            return self._found


def _probes(settings: Settings, ours: str | None) -> dict[tuple[str, str], Probe]:
    root, probes = settings.repositories_root, dict[tuple[str, str], Probe]()
    if root is not None:
        probes["Repositories", str(root)] = Probe(
            "root", lambda: next(check_places.repositories(settings, ours, init=False))
        )
    for name, url in settings.object_stores.items():
        look = partial(check_places.store, name, url, ours, init=False)
        probes[f"Store {name}", of_store(url.get_secret_value())] = Probe(name, look)
    return probes


PLACES = Places()


def facts(settings: Settings, trouble: str | None) -> list[Fact]:
    """Return installation, servers, places and clocks; *trouble* is an error of Redis."""
    ours = Installation.known()
    clocks = preconditions.differences("postgresql", *([] if trouble else ["redis"]), "host")
    wrong = [one.sentence() for one in clocks if one.exceeds(settings.clock_tolerance)]
    apart = (
        f"{max(abs(one.seconds) for one in clocks):.1f} s apart at most{', without those of Redis' if trouble else ''}"
    )
    return [
        Fact("Installation", ours or "none", None if ours else "there is none: run `forgekeeper migrate`"),
        Fact("PostgreSQL", of_database(settings.require_database()), objection()),
        Fact("Redis", of_redis(settings.require_redis()), trouble),
        *PLACES.look(settings, ours),
        Fact("Clocks", apart, "; ".join(wrong) or None),
    ]
