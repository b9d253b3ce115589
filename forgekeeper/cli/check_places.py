"""What `check` finds out about the places from which is deleted: the repositories' root and the object stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import peewee as pw
import redis

from forgekeeper.audit import acts
from forgekeeper.batches import BATCHES
from forgekeeper.cli.failures import sentence
from forgekeeper.settings import Settings
from forgekeeper.storage import sentinel
from forgekeeper.storage.git_command import legible
from forgekeeper.storage.git_repository import RootUnavailable, is_missing, misnamed, objection, too_many_missing
from forgekeeper.storage.objects import OUTSIDE, is_below, is_normal
from metrics.redaction import clean

Named = Callable[[], list[tuple[str, ...]]]
"""Names some things that should be at a place, each by the paths at which it may lie."""
FORBIDDEN = "42501"
SAMPLE = 50
"""So many projects are looked for."""


class Finding(NamedTuple):
    """One line of the report."""

    subject: str
    level: Literal["ok", "warning", "error"]
    message: str


def ok(subject: str, message: str) -> Finding:
    """Report what is as it should be."""
    return Finding(subject, "ok", message)


def warning(subject: str, message: str) -> Finding:
    """Report what may be wrong."""
    return Finding(subject, "warning", message)


def error(subject: str, message: str) -> Finding:
    """Report what is wrong."""
    return Finding(subject, "error", message)


def repositories(settings: Settings, ours: str | None, *, init: bool) -> Iterator[Finding]:
    """Look at the repositories' root, and for some repositories below it."""
    root = settings.repositories_root
    if root is None:
        yield warning("repositories", "FORGEKEEPER_REPOSITORIES_ROOT is not set: no refs can be deleted")
        return
    try:
        found = _sentinel("repositories", sentinel.Folder(root), ours, init=init, named=_repositories_named)
        yield found
        if found.level != "error":
            yield from _sample(root, settings.missing_repositories)
    except (sentinel.Unreadable, RootUnavailable) as unreadable:
        yield error("repositories", str(unreadable))


def stores(settings: Settings, ours: str | None, *, init: bool) -> Iterator[Finding]:
    """Look at each object store."""
    if not settings.object_stores:
        yield warning("object stores", "FORGEKEEPER_OBJECT_STORES is not set: no objects can be deleted")
    for location, url in settings.object_stores.items():
        named = partial(_objects_named, location)
        try:
            store = sentinel.Store(location, url.get_secret_value())
            yield _sentinel("object store", store, ours, init=init, named=named)
            yield from _prefixes(location, settings.object_prefixes.get(location, ()), named)
        except sentinel.Unreadable as unreadable:
            yield error("object store", clean(str(unreadable)))


def _sample(root: Path, share: float) -> Iterator[Finding]:
    """Look for the repositories of projects taken at random; report what is wrong with where they should be."""
    try:
        projects = _projects()
    except pw.PeeweeException:
        return  # reported elsewhere
    missing = [path for path in projects.values() if is_missing(root, path)]
    others = {path: other for path in missing if (other := misnamed(root, path))}
    if others:
        path = next(iter(others))
        yield error("repositories", f"there is none at {path}, but one at {others[path]}: correct disk_path")
    if len(missing) > len(others):
        level: Literal["warning", "error"] = "warning"
        if too_many_missing(len(missing), len(projects), share):
            level = "error"
        said = f"{len(missing)} of {len(projects)} projects taken at random have none"
        yield Finding("repositories", level, said)
    refused = {number: why for number, path in projects.items() if (why := objection(root, path))}
    if refused:
        number = next(iter(refused))
        most = "" if len(refused) == 1 else f" ({len(refused)} of {len(projects)} projects taken at random are refused)"
        where = legible(projects[number].encode(errors="backslashreplace"))
        yield error("repositories", f"no ref of project {number} at {where!r} is deleted: {refused[number]}{most}")


def _prefixes(location: str, prefixes: tuple[str, ...], named: Named) -> Iterator[Finding]:
    """Report where in the store objects may be deleted, and whether the database names some that may not."""
    if not prefixes:
        hint = "FORGEKEEPER_OBJECT_PREFIXES names the folders outside which nothing is, if you know them"
        yield ok("object prefixes", f"{location}: objects are deleted anywhere in the store; {hint}")
        return
    try:
        names = [paths[0] for paths in named()]
    except (pw.PeeweeException, redis.RedisError):
        return  # reported elsewhere
    outside = [path for path in names if not is_below(prefixes, path)]
    if outside:
        count = f"{len(outside)} of {len(names)} objects looked for, such as {outside[0]}"
        yield warning("object prefixes", f"{location}: {count}, are {OUTSIDE}: they will not be deleted")
    else:
        yield ok("object prefixes", f"{location}: objects are deleted below {', '.join(prefixes)} alone")


def _sentinel(  # noqa: PLR0911, a table of cases
    subject: str, place: sentinel.Place, ours: str | None, *, init: bool, named: Named
) -> Finding:
    """Report on a place's sentinel; with *init* create a missing one or adopt one that names nobody.

    Only once the place is proved to be the right one, by a sample of what the database has *named*.
    """
    found = place.sentinel()
    if found is not None and ours is None:
        return warning(subject, f"{place} has its sentinel, but nobody can say whether it is the right one")
    if found is not None and found.installation == ours:
        return ok(subject, f"{place} has its sentinel")
    if ours is None:
        said = "it gets none while the database does not say which installation it is of: see the lines above"
        return error(subject, f"{place} has no {sentinel.NAME}; {said}")
    if found is None and not init:
        return error(subject, f"{place} has no {sentinel.NAME}; `forgekeeper check --init` creates it")
    if found is not None and (found.installation is not None or not init):
        return error(subject, sentinel.objection(place, found, ours) or "")
    doubt = _doubt(place, ours, named) or _unrecorded(subject, place, ours, adopted=found is not None)
    if doubt is not None:
        return error(subject, f"{place} {doubt}")
    place.create_sentinel(ours)
    done = f"had no {sentinel.NAME}; created it" if found is None else f"had a {sentinel.NAME} of nobody's; adopted it"
    return ok(subject, f"{place} {done}")


def _doubt(place: sentinel.Place, ours: str, named: Named) -> str | None:
    """Say why a place may be the wrong one, None when it is empty as it should be or has what it should have."""
    try:
        names = named()
    except (pw.PeeweeException, redis.RedisError) as refused:
        return f"may be the wrong place: what should be in it is unknown: {clean(str(refused).splitlines()[0])}"
    if place.is_empty():
        said = "is empty, but the database knows what should be in it: is the right disk or bucket there?"
        return said if names else None
    if not names:
        sure = f"if you are sure, write the line `installation: {ours}` into its {sentinel.NAME}"
        return f"is not empty, and the database knows of nothing in it: is it the right one? ({sure})"
    if any(place.has(path) for paths in names for path in paths):
        return None
    tried = f"has none of the {len(names)} things looked for that should be in it"
    return f"{tried}: is it the right disk or bucket, and the right database?"


def _unrecorded(subject: str, place: sentinel.Place, ours: str, *, adopted: bool) -> str | None:
    """Record that the place gets its sentinel; say why that cannot be."""
    try:
        acts.record("check --init", f"{subject} {place}", after={"installation": ours, "adopted": adopted})
    except pw.PeeweeException as refused:
        return f"gets no {sentinel.NAME}, for that cannot be recorded: {sentence(refused)}"
    return None


def _repositories_named() -> list[tuple[str, ...]]:
    """Name repositories that should be below the root; whether their paths are spelled rightly is another question."""
    return [(path.removesuffix(".git"), f"{path.removesuffix('.git')}.git") for path in _projects().values()]


def _projects() -> dict[int, str]:
    """Return some projects, and where their repositories should be."""
    looks = [look for batch in BATCHES.values() for look in batch.known_repositories]
    return {number: path for look in looks for number, path in look(SAMPLE).items()}


def _objects_named(location: str) -> list[tuple[str, ...]]:
    """Name objects that should be at the location."""
    paths = [path for batch in BATCHES.values() for look in batch.known_objects for path in look(location)]
    return [(path,) for path in paths if is_normal(path)]
