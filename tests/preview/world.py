"""What the worlds of previews have in common."""

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar

from forgekeeper.api.batches import BATCHES
from forgekeeper.engine.previewing import preview_batch
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.database.exclusions import Exclusion, ExclusionSubject
from tests.harness.performing import perform
from tests.harness.settings import settings_with

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
MICROSECOND, MINUTE, HOUR, DAY = (timedelta(**{one: 1}) for one in ("microseconds", "minutes", "hours", "days"))
EVERYTHING = 1_000
TABLES = """
    select quote_ident(table_name) from information_schema.tables
    where table_schema in ('public', 'forgekeeper') and table_type = 'BASE TABLE'
"""


class World:
    """Records of a batch that are due in some way, or stay for some reason; their keys are small numbers.

    *ways* says of each whether a run takes it: it repeats none of the product's conditions.  `put` makes the record of
    a key, *locking* selects rows to lock, *excluding* says which keys are kept by what people exclude.
    """

    batch: str
    tables: tuple[str, ...]
    ways: dict[str, bool]
    locking: str | None = None
    excluding: ClassVar[dict[str, Callable[[int], bool]]] = {}
    at: datetime | None = NOON

    def __init__(self, folder):
        self.folder = folder
        self.settings = settings_with(**self.options())

    def options(self):
        return {}

    def folders(self):
        return []

    def empty(self):
        database.execute_sql("; ".join(f"delete from {table}" for table in (*self.tables, "exclusions")))

    def exclude(self, what):
        Exclusion.add(
            ExclusionSubject.from_text(what), batch=self.batch, reason="a test", by="a test", since=NOON, until=None
        )

    def kept(self, reason):
        """Say how many records a preview keeps for a reason."""
        parts = preview_batch(BATCHES[self.batch], self.settings, at=self.at).parts
        return sum(part.kept.get(reason, 0) for part in parts)

    def previewed(self):
        """Return the keys of what a run would take, by a preview."""
        parts = preview_batch(BATCHES[self.batch], self.settings, sample=EVERYTHING, at=self.at).parts
        assert not any(part.estimate for part in parts)
        assert all(part.records == len(part.sample) for part in parts)
        return {key for part in parts for shown in part.sample if (key := self.key(part, *shown)) is not None}

    def key(self, _part, number, _name):
        return int(number)

    def run(self):
        perform(BATCHES[self.batch], settings=self.settings, now=self.at)

    def ids(self, statement):
        return {key for (key,) in database.execute_sql(statement).fetchall()}


def everything(folders):
    """Return all there is: each row with its place and its versions, each key of Redis, each file with its times."""
    versions = "select ctid::text, xmin::text, xmax::text, whole::text from {0} as whole order by ctid"
    tables = [name for (name,) in database.execute_sql(TABLES).fetchall()]
    rows = {table: database.execute_sql(versions.format(table)).fetchall() for table in tables}
    keys = {key: client.dump(key) for key in sorted(client.keys())}
    files = {str(path): _stamp(path) for folder in folders for path in (folder, *sorted(Path(folder).rglob("*")))}
    return rows, keys, files


def _stamp(path):
    with suppress(FileNotFoundError):
        found = path.lstat()
        return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return None
