"""Places, sample data and traffic for `demo` and `up --sample`."""

from __future__ import annotations

import json
from pathlib import Path

from demo.sample_data import add_samples
from demo.traffic import add_traffic
from forgekeeper.api.batches import BATCHES, FeatureFlag
from forgekeeper.platform.installation import Installation
from forgekeeper.platform.settings import PREFIX, Settings
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.targets.sentinel import SENTINEL_NAME, Folder
from models import UserStatus

SAMPLE_PLACES = ("repositories", "objects")


def sample_settings(folder: Path, *, grace_seconds: int) -> dict[str, str]:
    """Return settings for repositories and objects below *folder*, with this grace time."""
    stores = {DeletedObject.location: (folder / "objects").absolute().as_uri()}
    return {
        f"{PREFIX}REPOSITORIES_ROOT": str((folder / "repositories").absolute()),
        f"{PREFIX}OBJECT_STORES": json.dumps(stores),
        f"{PREFIX}OBJECT_GRACE": str(grace_seconds),
        # The history is empty, and two fifths of all records are due.
        f"{PREFIX}BREAKER_SHARE": "1",
    }


def prepare_places(folder: Path) -> None:
    """Create places below *folder* with sentinels, and turn each batch on; existing ones stay."""
    for place in SAMPLE_PLACES:
        (folder / place).mkdir(parents=True, exist_ok=True)
        if not (folder / place / SENTINEL_NAME).exists():
            Folder(folder / place).create_sentinel(Installation.ensure_id())
    for batch in BATCHES.values():
        if batch.flag is not None:
            FeatureFlag.turn(batch.flag, on=True)


def prepare_sample(folder: Path, settings: Settings) -> None:
    """Prepare the places, and add sample data unless an earlier `up --sample` has done so."""
    prepare_places(folder)
    if not UserStatus.select().exists():
        add_samples(1, settings, clean=True)
    add_traffic(settings)
