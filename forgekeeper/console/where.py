"""Where one is: installation, servers and places, whether they belong together, and whether their clocks agree."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from forgekeeper.cli import check_places
from forgekeeper.cli.check_places import Finding
from forgekeeper.runs import preconditions
from forgekeeper.settings import Settings
from forgekeeper.settings.addresses import of_database, of_redis, of_store
from forgekeeper.storage.installation import Installation, objection
from metrics.exporter import Probe, asked

LATEST = 10.0
"""Places are asked no sooner again than after so many seconds: some cost a request each."""
PATIENCE = 0.7
"""Seconds that all places have together; a page has little more."""


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
        self._until = 0.0
        self._found: list[Fact] = []
        self._ours: str | None = None

    def look(self, settings: Settings, ours: str | None) -> list[Fact]:
        """Say what is wrong with each, as `check` does; the settings are always the same."""
        self._ours = ours
        with self._lock:
            if time.monotonic() >= self._until:
                self._probes = self._probes or dict(self._all(settings))
                answers = asked(list(self._probes.values()), PATIENCE)
                self._found = [_fact(*which, found) for which, found in zip(self._probes, answers, strict=True)]
                self._until = time.monotonic() + LATEST
            return self._found

    def _all(self, settings: Settings) -> Iterator[tuple[tuple[str, str], Probe]]:
        looks: list[tuple[str, str, Callable[[], Finding]]] = [
            (f"Store {name}", of_store(url.get_secret_value()), partial(self._store, name, settings))
            for name, url in settings.object_stores.items()
        ]
        if settings.repositories_root is not None:
            looks.insert(0, ("Repositories", str(settings.repositories_root), partial(self._root, settings)))
        for what, at, look in looks:
            yield (what, at), Probe(what, look)

    def _store(self, name: str, settings: Settings) -> Finding:
        return check_places.store(name, settings.object_stores[name], self._ours, init=False)

    def _root(self, settings: Settings) -> Finding:
        return next(check_places.repositories(settings, self._ours, init=False))


PLACES = Places()


def _fact(what: str, at: str, found: Finding | None) -> Fact:
    if found is None:
        return Fact(what, at, "it does not answer")
    return Fact(what, at, None if found.level == "ok" else found.message)


def facts(settings: Settings, trouble: str | None) -> list[Fact]:
    """Say where one is; *trouble* is what is wrong with Redis."""
    ours = Installation.known()
    return [
        Fact("Installation", ours or "none", None if ours else "the database says of no installation: run `migrate`"),
        Fact("PostgreSQL", of_database(settings.require_database()), objection()),
        Fact("Redis", of_redis(settings.require_redis()), trouble),
        *PLACES.look(settings, ours),
        _clocks(settings, redis=trouble is None),
    ]


def _clocks(settings: Settings, *, redis: bool) -> Fact:
    found = preconditions.differences(*(() if redis else ("postgresql", "host")))
    most = max(abs(one.seconds) for one in found)
    wrong = [one.sentence() for one in found if one.exceeds(settings.clock_tolerance)]
    of = "PostgreSQL, Redis and this machine" if redis else "PostgreSQL and this machine"
    return Fact("Clocks", f"of {of} differ by {most:.1f} s", "; ".join(wrong) or None)


def serving(found: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the schedulers, and who serves each queue, of what `status.gather` has found."""
    known = found["processes"]
    schedulers = [one for one in known if one["kind"] == "scheduler"]
    by_queue = [(queue, [one for one in known if queue in (one["queues"] or ())]) for queue in found["queues"]]
    return [("timetable", schedulers), *by_queue]
