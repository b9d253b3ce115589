"""The tables that are forgekeeper's own: it migrates them, and no other program writes to them."""

from __future__ import annotations

from forgekeeper.audit.acts import Act
from forgekeeper.audit.deletions import Deletion
from forgekeeper.database import Base
from forgekeeper.database.installation import Installation
from forgekeeper.declaring.flags import FeatureFlag
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.processes import Process
from forgekeeper.runs.quarantine import Quarantined
from forgekeeper.runs.totals import RunTotal
from forgekeeper.storage.outbox import DeletedObject
from forgekeeper.storage.settled import SettledUpload

OURS: tuple[type[Base], ...] = (
    *(FeatureFlag, Batch, Hold, JobRun, DeletedObject, Process, Installation),
    *(Quarantined, SettledUpload, RunTotal, Act, Deletion),
)
