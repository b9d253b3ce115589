"""Objects of a store that nothing names: found, and put into the register (batch 100)."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from forgekeeper.cli.console import Problem, wrong_use
from forgekeeper.connections import client
from forgekeeper.database import now
from forgekeeper.settings import Settings
from forgekeeper.storage import owners, stores
from forgekeeper.storage.objects import StoreUnavailable
from models import JobArtifact
from workers.stale_direct_uploads import MAX_UPLOAD_DURATION, adoption

ORPHAN_AFTER = timedelta(days=1)
"""An upload may last three hours; whatever is a day old and named by nothing was left behind."""
MOST_UNNAMED = 0.1
"""A larger share of the objects that nothing names speaks of another database, or of a store that others share."""
PAGE = 1_000


class Found(NamedTuple):
    """What lies below a prefix: how many objects older than a day, how many of them the database names, and the rest.

    *orphans* are those that nothing names, not even the register; *outside* counts such as may not be deleted.
    """

    examined: int
    named: int
    orphans: list[str]
    outside: int = 0

    def refusal(self, expect: int | None) -> str | None:
        """Return why the orphans must not be registered, None if they may; *expect* is their number, repeated."""
        number = len(self.orphans)
        if expect is not None:
            return None if expect == number else f"{expect} objects were expected and {number} are named by nothing"
        repeat = f"if they may all go, repeat their number: --expect {number}"
        if number and not self.named:
            return f"nothing in this database names any of the {self.examined} objects: is it the right one? {repeat}"
        if number > MOST_UNNAMED * self.examined:
            return f"{number} of {self.examined} objects are named by nothing, more than {MOST_UNNAMED:.0%}; {repeat}"
        return None


def look(location: str, prefix: str, settings: Settings) -> Found:
    """Find what was left behind below *prefix*; ends the command where the store cannot be used."""
    if location not in settings.object_stores:
        wrong_use(f"there is no object store {location!r}; there are: {', '.join(settings.object_stores) or 'none'}")
    try:
        store = stores.at(location, settings)
        assert store is not None
        horizon = now() - ORPHAN_AFTER
        found = list(store.listed(prefix, before=horizon))
        named, unnamed = _sorted_out(location, found, settings)
        allowed = [path for path in unnamed if store.may_delete(path)]
        # A listing may spell a name otherwise than its object does, and so mean another.
        orphans = [path for path in allowed if store.has(path, before=horizon)]
        return Found(len(found), named, orphans, len(unnamed) - len(allowed))
    except StoreUnavailable as error:
        hint = "leave a name that cannot be listed out with --prefix; else `forgekeeper check` looks for the cause"
        raise Problem(f"object store {error}; {hint}") from error


def _sorted_out(location: str, paths: list[str], settings: Settings) -> tuple[int, list[str]]:
    """Count the *paths* that the database names, and return those that neither it nor the register does."""
    named, unnamed = 0, []
    for page in pages(paths):
        in_database = owners.answered_for(JobArtifact, location, page, settings)
        named += len(in_database)
        known = in_database.keys() | adoption.registered(client, location, page)
        unnamed += [path for path in page if path not in known]
    return named, unnamed


def adopt(location: str, paths: list[str]) -> int:
    """Put the objects into the register; return how many were not in it."""
    return adoption.adopt(client, location, paths, stale_after=MAX_UPLOAD_DURATION)


def pages(paths: list[str]) -> list[list[str]]:
    """Cut *paths* into pages, each as much as goes into one command."""
    return [paths[start : start + PAGE] for start in range(0, len(paths), PAGE)]
