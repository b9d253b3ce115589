"""Who answers for an object: what is asked once more before one is deleted.

The tables name objects of one location, `artifacts`.  Another location may lead to the same
place, or to a folder within it or above it: its objects are looked for under their names there.
"""

from __future__ import annotations

from collections.abc import Sequence

from forgekeeper.settings import Settings
from forgekeeper.storage.opening import place
from forgekeeper.storage.outbox import DeletedObject
from forgekeeper.storage.settled import SettledUpload
from forgekeeper.storage.stores import ARTIFACTS
from models import JobArtifact


def answered_for(location: str, paths: Sequence[str], settings: Settings) -> dict[str, str]:
    """Return those of *paths* that somebody answers for, and who: an artifact, the outbox, or a producer."""
    known = _as_artifacts(location, paths, settings)
    names = list(known.values())
    # The artifacts first: one that is destroyed between the two questions is in the outbox by the second.
    found = dict.fromkeys(JobArtifact.named(names), "an artifact names it")
    found |= dict.fromkeys(DeletedObject.named(names), "the outbox names it")
    kept = {path: found[name] for path, name in known.items() if name in found}
    completed = SettledUpload.named(location, paths, reaped=False)
    return dict.fromkeys(completed, "its producer has completed it") | kept


def _as_artifacts(location: str, paths: Sequence[str], settings: Settings) -> dict[str, str]:
    """Return those of *paths* that lie at the place of the artifacts, and what each is called there."""
    if location == ARTIFACTS:
        return {path: path for path in paths}
    urls = [settings.object_stores.get(name) for name in (location, ARTIFACTS)]
    here, there = (place(url.get_secret_value()) if url else None for url in urls)
    if here is None or there is None:
        return {}
    if there == here[: len(there)]:
        below = "".join(f"{part}/" for part in here[len(there) :])
        return {path: below + path for path in paths}
    if here == there[: len(here)]:
        below = "".join(f"{part}/" for part in there[len(here) :])
        return {path: path.removeprefix(below) for path in paths if path.startswith(below)}
    return {}
