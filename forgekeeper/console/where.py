"""Where one is: installation, servers and places, whether they belong together, and whether their clocks agree."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import NamedTuple

from forgekeeper.cli import check_places
from forgekeeper.cli.check_places import Finding
from forgekeeper.runs import preconditions
from forgekeeper.settings import Settings
from forgekeeper.settings.addresses import of_database, of_redis, of_store
from forgekeeper.storage.installation import Installation, objection
from metrics.exporter import Probe, asked

AGAIN, PATIENCE = 10.0, 0.7
"""Seconds after which places are asked again, as some cost a request each; and that all have together to answer."""


class Fact(NamedTuple):
    """What one of it is, where it is, and what is *wrong* with it, None where nothing is."""

    what: str
    at: str
    wrong: str | None = None


class Places:
    """The repositories' root and the stores; one that hangs holds up nobody, and is asked once at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._probes: dict[tuple[str, str], Probe] = {}
        self._again = 0.0
        self._found: list[Fact] = []
        self._ours: str | None = None

    def look(self, settings: Settings, ours: str | None) -> list[Fact]:
        """Say what is wrong with each, as `check` does; the settings are always the same."""
        self._ours = ours
        with self._lock:
            if time.monotonic() >= self._again:
                self._probes = self._probes or self._all(settings)
                answers = asked(list(self._probes.values()), PATIENCE)
                self._found = [Fact(*which, _wrong(found)) for which, found in zip(self._probes, answers, strict=True)]
                self._again = time.monotonic() + AGAIN
            return self._found

    def _all(self, settings: Settings) -> dict[tuple[str, str], Probe]:
        probes = {
            (f"Store {name}", of_store(url.get_secret_value())): Probe(name, partial(self._store, settings, name))
            for name, url in settings.object_stores.items()
        }
        if settings.repositories_root is None:
            return probes
        return {
            ("Repositories", str(settings.repositories_root)): Probe("root", partial(self._root, settings))
        } | probes

    def _store(self, settings: Settings, name: str) -> Finding:
        return check_places.store(name, settings.object_stores[name], self._ours, init=False)

    def _root(self, settings: Settings) -> Finding:
        return next(check_places.repositories(settings, self._ours, init=False))


PLACES = Places()


def _wrong(found: Finding | None) -> str | None:
    if found is None:
        return "it does not answer"
    return None if found.level == "ok" else found.message


def facts(settings: Settings, trouble: str | None) -> list[Fact]:
    """Say where one is; *trouble* is what is wrong with Redis."""
    ours = Installation.known()
    return [
        Fact("Installation", ours or "none", None if ours else "there is none: run `forgekeeper migrate`"),
        Fact("PostgreSQL", of_database(settings.require_database()), objection()),
        Fact("Redis", of_redis(settings.require_redis()), trouble),
        *PLACES.look(settings, ours),
        _clocks(settings, redis=trouble is None),
    ]


def _clocks(settings: Settings, *, redis: bool) -> Fact:
    found = preconditions.differences("postgresql", *(["redis"] if redis else []), "host")
    wrong = [one.sentence() for one in found if one.exceeds(settings.clock_tolerance)]
    at = f"{max(abs(one.seconds) for one in found):.1f} s apart at most"
    return Fact("Clocks", at if redis else f"{at}, without Redis's", "; ".join(wrong) or None)
