"""The tables, what can be asked of them, and the guarded changes of their state."""

from forgekeeper.runs.batch import FOREVER, Batch
from models.bulk_imports import BulkImport, BulkImportEntity, BulkImportTracker, ImportStatus, TrackerStatus
from forgekeeper.database import (
    Base,
    Patience,
    database,
    now,
    open_per_thread,
    open_pool,
    promptly,
    reachable,
    release,
    sqlstate,
    takes_no_writes,
    unhurried,
)
from forgekeeper.storage.outbox import DeletedObject
from forgekeeper.flags import FLAGS, FeatureFlag
from forgekeeper.installation.row import Installation
from models.job_artifacts import JobArtifact, ProjectStatistics
from forgekeeper.runs.ledger import Ahead, JobRun, Lost, Started
from forgekeeper.runs.passed_over import PassedOver
from forgekeeper.process.rows import Entry, Process
from models.projects import DeletionStatus, GitRefDeletion, Project
from forgekeeper.storage.settled import NoTransaction, SettledUpload
from models.user_status import UserStatus

OURS: tuple[type[Base], ...] = (
    FeatureFlag,
    Batch,
    JobRun,
    DeletedObject,
    Process,
    Installation,
    PassedOver,
    SettledUpload,
)
"""Tables that forgekeeper owns and migrates."""

APPLICATION: tuple[type[Base], ...] = (
    UserStatus,
    Project,
    GitRefDeletion,
    BulkImport,
    BulkImportEntity,
    BulkImportTracker,
    JobArtifact,
    ProjectStatistics,
)
"""Tables that the forge owns; only the example application's migrations create them."""

__all__ = [
    "APPLICATION",
    "FLAGS",
    "FOREVER",
    "OURS",
    "Ahead",
    "Base",
    "Batch",
    "BulkImport",
    "BulkImportEntity",
    "BulkImportTracker",
    "DeletedObject",
    "DeletionStatus",
    "Entry",
    "FeatureFlag",
    "GitRefDeletion",
    "ImportStatus",
    "Installation",
    "JobArtifact",
    "JobRun",
    "Lost",
    "NoTransaction",
    "PassedOver",
    "Patience",
    "Process",
    "Project",
    "ProjectStatistics",
    "SettledUpload",
    "Started",
    "TrackerStatus",
    "UserStatus",
    "database",
    "now",
    "open_per_thread",
    "open_pool",
    "promptly",
    "reachable",
    "release",
    "sqlstate",
    "takes_no_writes",
    "unhurried",
]
