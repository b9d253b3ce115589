"""The two kinds of batch 65, and a change of some of their records without a run."""

from typing import NamedTuple

from forgekeeper.audit.deletions import Audit
from forgekeeper.deleting.changes import execute
from forgekeeper.runs.brakes import Brakes
from models import BulkImport, BulkImportEntity
from tests.harness.settings import settings_with
from workers import stale_imports


class Kind(NamedTuple):
    """What is given up, and what answers for it."""

    record: str
    model: type
    answer: object


IMPORTS = Kind("bulk_import", BulkImport, stale_imports.imports)
ENTITIES = Kind("entity", BulkImportEntity, stale_imports.entities)


def cleanup_stale(kind, now, ids, *, audit=None):
    """Time those records out, unless somebody moved them on first; return the rows of the ones we did."""
    batch = stale_imports.stale_imports
    brakes = Brakes(batch, settings_with(), batch.outcome(), None)
    return execute(kind.answer(now), now, ids, audit or Audit("a", on=False), brakes)
