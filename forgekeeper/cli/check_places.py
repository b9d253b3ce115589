"""Findings of `check` on places with data to delete: repositories and object stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import peewee as pw
import redis
from pydantic import SecretStr

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import acts
from forgekeeper.cli.connection import describe_with_remedy
from forgekeeper.platform.settings import Settings
from forgekeeper.targets import sentinel
from forgekeeper.targets.git_command import GitError
from forgekeeper.targets.git_repository import RepositoryFailed, open_repository, why_left_to_git_server
from forgekeeper.targets.objects import is_normal
from metrics.logs import clean_text

SampleLookup = Callable[[], list[tuple[str, ...]]]
"""Function that returns samples expected at a place, each with its possible paths."""


class Finding(NamedTuple):
    """One line of the report."""

    level: Literal["ok", "warning", "error"]
    subject: str
    message: str


ok, warning, error = partial(Finding, "ok"), partial(Finding, "warning"), partial(Finding, "error")


def check_repositories(settings: Settings, ours: str | None, *, init: bool) -> Iterator[Finding]:
    """Check the repositories' root."""
    root = settings.repositories_root
    if root is None:
        yield warning("repositories", "FORGEKEEPER_REPOSITORIES_ROOT is not set: no refs can be deleted")
        return
    if said := why_left_to_git_server(root):
        yield (error if settings.git_server == "refuse" else warning)("repositories", said)
    try:
        yield _check_sentinel("repositories", sentinel.Folder(root), ours, init=init, find_samples=_sample_repositories)
    except sentinel.PlaceUnreadable as unreadable:
        yield error("repositories", str(unreadable))
    else:
        with suppress(pw.PeeweeException):  # reported elsewhere
            yield from _check_git_owner(root)


def check_sentinels(settings: Settings, ours: str | None) -> Iterator[Finding]:
    """Check the sentinels only, for a process that deletes nothing."""
    if (root := settings.repositories_root) is not None:
        try:
            yield _check_sentinel("repositories", sentinel.Folder(root), ours, init=False, find_samples=list)
        except sentinel.PlaceUnreadable as unreadable:
            yield error("repositories", str(unreadable))
    yield from (check_store(location, url, ours, init=False) for location, url in settings.object_stores.items())


def _check_git_owner(root: Path) -> Iterator[Finding]:
    """Report the first sampled repository whose files git would give another owner."""
    for path in chain.from_iterable(_sample_repositories()):
        try:
            open_repository(root, path).git_for_writing(until=0.0)
        except RepositoryFailed as refused:
            yield error("repositories", f"{root / path}: {refused}")
            return
        except GitError:
            continue


def check_store(location: str, url: SecretStr, ours: str | None, *, init: bool) -> Finding:
    """Report the installation that an object store belongs to."""
    try:
        place = sentinel.Store(location, url.get_secret_value())
        return _check_sentinel("object store", place, ours, init=init, find_samples=partial(_sample_objects, location))
    except sentinel.PlaceUnreadable as unreadable:
        return error("object store", clean_text(str(unreadable)))


def _check_sentinel(
    subject: str, place: sentinel.Place, ours: str | None, *, init: bool, find_samples: SampleLookup
) -> Finding:
    """Report a place's sentinel; with *init* create a missing one or adopt an unowned one."""
    found = place.read_owner()
    if ours is None:
        return warning(subject, f"{place} may belong to another installation: the database does not name its own")
    if found == ours:
        return ok(subject, f"{place} has its sentinel")
    if init and not found:
        return _claim_place(subject, place, ours, adopted=found is not None, find_samples=find_samples)
    if found is None:
        return error(subject, f"{place} has no {sentinel.SENTINEL_NAME}; `forgekeeper check --init` creates it")
    return error(subject, sentinel.why_not_ours(place, found, ours) or "")


def _claim_place(
    subject: str, place: sentinel.Place, ours: str, *, adopted: bool, find_samples: SampleLookup
) -> Finding:
    """Write the sentinel if the paths of *find_samples* show that the place is right."""
    try:
        if doubt := _explain_doubt(place, ours, find_samples()):
            return error(subject, f"{place} {doubt}")
        acts.record_act("check --init", f"{subject} {place}", after={"installation": ours, "adopted": adopted})
    except (pw.PeeweeException, redis.RedisError) as refused:
        return error(subject, f"{sentinel.SENTINEL_NAME} was not created at {place}: {describe_with_remedy(refused)}")
    place.create_sentinel(ours)
    done = (
        f"had a {sentinel.SENTINEL_NAME} without an installation; claimed it"
        if adopted
        else f"had no {sentinel.SENTINEL_NAME}; created it"
    )
    return ok(subject, f"{place} {done}")


def _explain_doubt(place: sentinel.Place, ours: str, names: list[tuple[str, ...]]) -> str | None:
    """Return why a place may be wrong; None if it is rightly empty or has a sample."""
    if place.is_empty():
        said = "is empty, but the database names data in it: is this the right disk or bucket?"
        return said if names else None
    if not names:
        sure = f"if you are sure, write the line `installation: {ours}` into its {sentinel.SENTINEL_NAME}"
        return f"is not empty, but the database names no data in it: is this the right disk or bucket? ({sure})"
    if any(place.has_path(path) for paths in names for path in paths):
        return None
    tried = f"has none of the {len(names)} paths that the database names"
    return f"{tried}: are this disk or bucket and this database the right ones?"


def _sample_repositories() -> list[tuple[str, ...]]:
    """Return samples of repositories below the root, with and without `.git`.

    The spelling of their paths is not checked here.
    """
    looks = [look for batch in BATCHES.values() for look in batch.known_repositories]
    paths = [path.removesuffix(".git") for look in looks for path in look()]
    return [(path, f"{path}.git") for path in paths]


def _sample_objects(location: str) -> list[tuple[str, ...]]:
    """Return samples of objects at the location."""
    paths = [path for batch in BATCHES.values() for look in batch.known_objects for path in look(location)]
    return [(path,) for path in paths if is_normal(path)]
