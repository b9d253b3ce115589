"""What the worlds of previews have in common."""

from datetime import UTC, datetime, timedelta

from forgekeeper.batches import BATCHES
from forgekeeper.database import database
from forgekeeper.runs.previewing import preview
from tests.harness.performing import perform
from tests.harness.settings import settings_with

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
MICROSECOND, MINUTE, HOUR, DAY = (timedelta(**{one: 1}) for one in ("microseconds", "minutes", "hours", "days"))
EVERYTHING = 1_000


class World:
    """What the worlds have in common; *ways* says of each whether a run takes it, *locking* selects rows to lock."""

    batch: str
    tables: tuple[str, ...]
    ways: dict[str, bool]
    locking: str | None = None
    at: datetime | None = NOON
    stays = False
    """Whether what a run takes stays, and is only changed."""

    def __init__(self, folder):
        self.folder = folder
        self.settings = settings_with(**self.options())

    def options(self):
        return {}

    def folders(self):
        return []

    def empty(self):
        database.execute_sql("; ".join(f"delete from {table}" for table in self.tables))

    def previewed(self):
        """Return the keys of what a run would take, by a preview."""
        parts = preview(BATCHES[self.batch], self.settings, sample=EVERYTHING, at=self.at).parts
        assert not any(part.estimate for part in parts)
        assert all(part.records == len(part.sample) for part in parts)
        return {key for part in parts for shown in part.sample if (key := self.key(part, *shown)) is not None}

    def key(self, _part, number, _name):
        return int(number)

    def run(self):
        perform(BATCHES[self.batch], settings=self.settings, now=self.at)

    def lock(self, other, keys):
        other.execute(self.locking, {"keys": list(keys)})

    def ids(self, statement):
        return {key for (key,) in database.execute_sql(statement).fetchall()}
