"""Installation, servers and places: whether they belong together and their clocks agree."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import NamedTuple

from forgekeeper.cli import check_places
from forgekeeper.cli.console.texts import TranslatableText
from forgekeeper.guards import preconditions
from forgekeeper.platform.installation import Installation, why_misplaced
from forgekeeper.platform.settings import Settings
from forgekeeper.platform.settings.addresses import show_database_url, show_redis_url, show_store_url
from metrics.threads import Probe, ask_probes

CHECK_INTERVAL_SECONDS, CHECK_TIMEOUT_SECONDS = 10.0, 0.7
"""Seconds between checks of places, and time limit of all checks together.

A check costs some places a request.
"""
NO_ANSWER = TranslatableText("it does not answer")


class ServerState(NamedTuple):
    """A server or place, its address, and its error, or None."""

    name: str
    address: str
    error: str | None = None


class PlaceChecks:
    """Checks of the repositories' root and the stores.

    A place that hangs delays nobody and is checked once at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._probes: dict[tuple[str, str], Probe] = {}
        self._next_check_at, self._states = 0.0, list[ServerState]()

    def read_states(self, settings: Settings, installation_id: str | None) -> list[ServerState]:
        """Return the state of each place, as `check` does.

        Settings and installation must not change between calls.
        """
        with self._lock:
            if time.monotonic() >= self._next_check_at:
                self._probes = self._probes or _create_probes(settings, installation_id)
                found = zip(self._probes, ask_probes(list(self._probes.values()), CHECK_TIMEOUT_SECONDS), strict=True)
                self._states = [
                    ServerState(*place, NO_ANSWER if one is None else None if one.level == "ok" else one.message)
                    for place, one in found
                ]
                self._next_check_at = time.monotonic() + CHECK_INTERVAL_SECONDS
            return self._states


def _create_probes(settings: Settings, installation_id: str | None) -> dict[tuple[str, str], Probe]:
    root, probes = settings.repositories_root, dict[tuple[str, str], Probe]()
    if root is not None:
        probes[TranslatableText("Repositories"), str(root)] = Probe(
            "root", lambda: next(check_places.check_repositories(settings, installation_id, init=False))
        )
    for name, url in settings.object_stores.items():
        check_store = partial(check_places.check_store, name, url, installation_id, init=False)
        place = TranslatableText("Store %(name)s", name=name), show_store_url(url.get_secret_value())
        probes[place] = Probe(name, check_store)
    return probes


PLACE_CHECKS = PlaceChecks()


def list_states(settings: Settings, trouble: str | None) -> list[ServerState]:
    """Return installation, servers, places and clocks; *trouble* is an error of Redis."""
    installation_id = Installation.find_id()
    clocks = preconditions.compare_clocks("postgresql", *([] if trouble else ["redis"]), "host")
    wrong = [one.as_sentence() for one in clocks if one.exceeds(settings.clock_tolerance)]
    seconds = f"{max(abs(one.seconds) for one in clocks):.1f}"
    apart = (
        TranslatableText("%(seconds)s s apart at most, without Redis", seconds=seconds)
        if trouble
        else TranslatableText("%(seconds)s s apart at most", seconds=seconds)
    )
    return [
        ServerState(
            TranslatableText("Installation"),
            installation_id or TranslatableText("none"),
            None if installation_id else TranslatableText("there is no installation: run `forgekeeper migrate`"),
        ),
        ServerState("PostgreSQL", show_database_url(settings.require_database()), why_misplaced()),
        ServerState("Redis", show_redis_url(settings.require_redis()), trouble),
        *PLACE_CHECKS.read_states(settings, installation_id),
        ServerState(TranslatableText("Clocks"), apart, "; ".join(wrong) or None),
    ]
