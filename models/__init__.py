"""The forge's tables, and what can be asked of them."""

from __future__ import annotations

from forgekeeper.database import Base
from models.bulk_imports import (
    STALE_AFTER,
    UNFINISHED,
    BulkImport,
    BulkImportEntity,
    BulkImportTracker,
    EntityType,
    ImportStatus,
    TrackerStatus,
)
from models.job_artifacts import JobArtifact, ProjectStatistics
from models.projects import DeletionStatus, GitRefDeletion, Project
from models.user_status import UserStatus

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
"""Tables that the forge owns; only the example forge's migrations create them."""

__all__ = [
    "APPLICATION",
    "STALE_AFTER",
    "UNFINISHED",
    "BulkImport",
    "BulkImportEntity",
    "BulkImportTracker",
    "DeletionStatus",
    "EntityType",
    "GitRefDeletion",
    "ImportStatus",
    "JobArtifact",
    "Project",
    "ProjectStatistics",
    "TrackerStatus",
    "UserStatus",
]
