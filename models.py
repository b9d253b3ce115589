"""The forge's tables: columns, keys, indexes, and scopes, which select and change nothing.

The changes that a batch makes to the tables are in the batch's module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import IntEnum
from typing import ClassVar

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.platform.connections import client
from forgekeeper.platform.database import Base, BigIdentityField, database, default_sql, exclusions
from forgekeeper.platform.database.survey import find_missed_rows, sample_rows


class UserStatus(Base):
    """The status message of a user, shown until *clear_status_at*."""

    found_by = ("user_id",)
    beside = ("emoji", "message", "message_html", "availability")
    grants = "worker: select, update (user_id), delete; exporter: select"

    user_id = pw.BigIntegerField(primary_key=True)
    emoji = pw.TextField(constraints=default_sql("'speech_balloon'"))
    message = pw.CharField(max_length=100, null=True)
    message_html = pw.TextField(null=True)
    availability = pw.SmallIntegerField(constraints=default_sql("0"))
    clear_status_at = DateTimeTZField(null=True)

    class Meta:
        table_name = "user_statuses"


UserStatus.indexed(
    "user_statuses_clear_status_at on user_statuses (clear_status_at, user_id) where clear_status_at is not null"
)


class DeletionStatus(IntEnum):
    """The state of a request to delete a ref."""

    PENDING = 1
    PROCESSED = 2
    REJECTED = 3


class Project(Base):
    """A project, with the path of its bare repository below the repositories' root."""

    found_by = ("id",)
    grants = "worker: select; exporter: select"

    id = pw.BigIntegerField(primary_key=True)
    disk_path = pw.TextField(unique=True)

    class Meta:
        table_name = "projects"


class GitRefDeletion(Base):
    """A ref to delete.  There is no foreign key: the project may be deleted first."""

    found_by = ("id", "project_id")
    grants = "worker: select, update (status, reason, expected_oid, updated_at, processed_at), delete; exporter: select"

    id = BigIdentityField()
    project_id = pw.BigIntegerField()
    ref = pw.TextField()
    expected_oid = pw.TextField(null=True)
    status = pw.SmallIntegerField(constraints=default_sql("1"))
    reason = pw.TextField(null=True)
    created_at = DateTimeTZField(constraints=default_sql("now()"))
    updated_at = DateTimeTZField(constraints=default_sql("now()"))
    processed_at = DateTimeTZField(null=True)

    class Meta:
        table_name = "batched_git_ref_updates_deletions"

    @classmethod
    def select_pending(cls) -> pw.ModelSelect[GitRefDeletion]:
        """Select the pending deletions."""
        return cls.select().where(cls.status == DeletionStatus.PENDING)

    @classmethod
    def select_rejected(cls) -> pw.ModelSelect[GitRefDeletion]:
        """Select the rejected deletions, with their reasons."""
        return cls.select().where(cls.status == DeletionStatus.REJECTED).order_by(cls.id)


GitRefDeletion.indexed(
    "batched_git_ref_updates_deletions_pending on batched_git_ref_updates_deletions (project_id, id) where status = 1"
)
GitRefDeletion.indexed(
    "batched_git_ref_updates_deletions_processed on batched_git_ref_updates_deletions (processed_at) where status = 2"
)


STALE_AFTER = timedelta(hours=24)


class ImportStatus(IntEnum):
    """The state of an import or an entity; trackers have other numbers."""

    CREATED = 0
    STARTED = 1
    FINISHED = 2
    TIMEOUT = 3
    FAILED = -1
    CANCELED = -2


class TrackerStatus(IntEnum):
    """The state of a tracker: the numbers differ from an import's."""

    CREATED = 0
    STARTED = 1
    FINISHED = 2
    ENQUEUED = 3
    TIMEOUT = 4
    FAILED = -1
    SKIPPED = -2
    CANCELED = -3


UNFINISHED_STATES = (ImportStatus.CREATED, ImportStatus.STARTED)


class BulkImport(Base):
    """One import of groups and projects from another forge."""

    found_by = ("id",)
    beside = ("source_type", "created_at")
    grants = "worker: select, update (status, has_failures, updated_at); exporter: select"

    id = BigIdentityField()
    user_id = pw.BigIntegerField()
    source_type = pw.SmallIntegerField(constraints=default_sql("0"))
    status = pw.SmallIntegerField(constraints=default_sql("0"))
    has_failures = pw.BooleanField(null=True, constraints=default_sql("false"))
    created_at = DateTimeTZField(constraints=default_sql("now()"))
    updated_at = DateTimeTZField(constraints=default_sql("now()"))

    class Meta:
        table_name = "bulk_imports"


class BulkImportEntity(Base):
    """A group or project within an import."""

    found_by = ("id",)
    beside = ("parent_id", "created_at")
    grants = "worker: select, update (status, updated_at); exporter: select"

    id = BigIdentityField()
    bulk_import_id = pw.BigIntegerField()
    parent_id = pw.BigIntegerField(null=True)
    source_type = pw.SmallIntegerField(constraints=default_sql("0"))
    source_full_path = pw.TextField()
    destination_name = pw.TextField()
    destination_namespace = pw.TextField()
    status = pw.SmallIntegerField(constraints=default_sql("0"))
    has_failures = pw.BooleanField(null=True, constraints=default_sql("false"))
    created_at = DateTimeTZField(constraints=default_sql("now()"))
    updated_at = DateTimeTZField(constraints=default_sql("now()"))

    class Meta:
        table_name = "bulk_import_entities"


def is_unfinished(model: type[BulkImport | BulkImportEntity]) -> pw.Node:
    """Return the condition of imports or entities that have not ended."""
    condition: pw.Node = model.status.in_(UNFINISHED_STATES)
    return condition


class BulkImportTracker(Base):
    """The import of one relation of an entity."""

    found_by = ("id", "bulk_import_entity_id")
    beside = ("relation", "stage", "created_at")
    grants = "worker: select, update (status, updated_at)"

    id = BigIdentityField()
    bulk_import_entity_id = pw.BigIntegerField(index=True)
    relation = pw.TextField()
    stage = pw.SmallIntegerField(constraints=default_sql("0"))
    status = pw.SmallIntegerField(constraints=default_sql("0"))
    created_at = DateTimeTZField(constraints=default_sql("now()"))
    updated_at = DateTimeTZField(constraints=default_sql("now()"))

    class Meta:
        table_name = "bulk_import_trackers"


BulkImport.indexed("bulk_imports_unfinished on bulk_imports (updated_at, id) where status in (0, 1)")
BulkImportEntity.indexed(
    "bulk_import_entities_unfinished on bulk_import_entities (updated_at, id) where status in (0, 1)"
)


UNLOCKED_STATE, TRACE_FILE_TYPE = 0, 3

HAS_NO_PATH = "coalesce(file_final_path, '') = '' and coalesce(file, '') <> ''"
"""The artifact has an object whose path only the forge knows; without path and file it has no object."""
IS_DELETABLE = f"locked = {UNLOCKED_STATE} and file_type <> {TRACE_FILE_TYPE} and not ({HAS_NO_PATH})"
"""Condition under which an expired artifact may be deleted: it is known to be unlocked, it is not a trace, and the path
of its object is known."""
WAITING_CONDITIONS = {
    "no_path": f"file_type <> {TRACE_FILE_TYPE} and locked = {UNLOCKED_STATE} and {HAS_NO_PATH}",
    "unknown": f"file_type <> {TRACE_FILE_TYPE} and coalesce(locked, 2) not in (0, 1)",
}
"""Conditions of artifacts that are kept because the forge does not say where their object is, or whether they are
locked, by reason."""

CLASS_COUNT = 10
"""Number of classes of artifacts.  Each of ten buckets has one class, each of five buckets two."""
CLASS_EXPRESSION = f"mod(project_id + job_id, {CLASS_COUNT})"
"""The class of an artifact; the index for five and for ten buckets begins with it."""

PATH_WITH_ARTIFACT_ID = re.compile(r"\A(?![0-9]{4}_[0-9]{2}/[0-9]+/[0-9]+/[^/]+\Z).*/([0-9]{1,18})/[^/]+\Z", re.DOTALL)
PATH_WITH_JOB_ID = re.compile(r"\A[0-9]{4}_[0-9]{2}/[0-9]+/([0-9]{1,18})/[^/]+\Z")
"""Paths of files whose artifact lacks a path, as a forge's uploader chooses them: …/id/file, and in the oldest layout
month/project/job/file."""

# The paths are one value: building a statement with a list of a thousand took longer than the lookup.
SELECT_NAMED_PATHS = "select file_final_path from ci_job_artifacts where file_final_path = any(%(paths)s::text[])"

SELECT_IS_TABLE = "select relkind in ('r', 'p') from pg_class where oid = to_regclass('ci_job_artifacts')"
SELECT_PATHLESS_NUMBERS = "select {column} from {source} and {column} = any(%(numbers)s)"


FILE_STORES = {"artifacts": 2, "artifacts_local": 1}
"""The number in the column `file_store`, by the location of the artifact's object."""


class JobArtifact(Base):
    """A file that a CI job left behind; its object is at `artifacts`, or if `file_store` is 1 at `artifacts_local`."""

    location = "artifacts"
    locations: ClassVar[Sequence[str]] = tuple(FILE_STORES)
    sentence = "an artifact names it"

    found_by = ("id", "project_id", "job_id", "partition_id")
    partition = "partition_id"
    # All artifacts that were destroyed before the audit had this column were unlocked.
    unaudited: ClassVar[Mapping[str, int]] = {"locked": UNLOCKED_STATE}
    grants = "worker: select, update (id), delete; exporter: select"

    id = BigIdentityField()
    project_id = pw.BigIntegerField()
    job_id = pw.BigIntegerField()
    partition_id = pw.BigIntegerField(constraints=default_sql("100"))
    file_type = pw.IntegerField()
    file_store = pw.IntegerField(constraints=default_sql("2"))
    file = pw.TextField(null=True)
    file_final_path = pw.TextField(index=True, null=True)
    size = pw.BigIntegerField(null=True)
    expire_at = DateTimeTZField(null=True)
    locked = pw.SmallIntegerField(null=True, constraints=default_sql("2"))
    created_at = DateTimeTZField(constraints=default_sql("now()"))
    updated_at = DateTimeTZField(constraints=default_sql("now()"))

    class Meta:
        table_name = "ci_job_artifacts"

    @classmethod
    def is_expired(cls, now: datetime) -> pw.Node:
        """Return the condition of artifacts to destroy: expired before *now*, unlocked, no trace.

        An artifact is kept if its lock is unknown.  It is also kept if its object's path is unknown: without the row
        nobody could find the object.
        """
        condition: pw.Node = (cls.expire_at < now) & pw.SQL(IS_DELETABLE)
        return condition

    @classmethod
    def is_expired_by_rule(cls, now: datetime) -> pw.Node:
        """Return the condition of expired artifacts with an unknown lock that their jobs unlock."""
        unknown = pw.SQL(f"{WAITING_CONDITIONS['unknown']} and not ({HAS_NO_PATH})")
        condition: pw.Node = (cls.expire_at < now) & unknown & JobLock.is_unlocked(cls.job_id)
        return condition

    @classmethod
    def named(cls, paths: Sequence[str]) -> set[str]:
        """Return the *paths* that live artifacts name, or that artifacts without a path may have."""
        named = {path for (path,) in database.execute_sql(SELECT_NAMED_PATHS, {"paths": list(paths)}).fetchall()}
        return named | PathlessArtifact.named(paths)

    @classmethod
    def sample(cls, location: str) -> list[str]:
        """Return the paths of some live artifacts whose objects are at the location."""
        if location not in FILE_STORES:
            return []
        path = f"case file_store when {FILE_STORES[location]} then file_final_path end"
        return sample_rows("ci_job_artifacts", "id", path)

    @classmethod
    def overlooked(cls) -> set[str]:
        """Return the paths of some live artifacts that `named` misses."""
        return find_missed_rows("ci_job_artifacts", "id", "file_final_path", cls.named)


class PathlessArtifact(Base):
    """An artifact with an object whose path the forge does not record.

    The forge's uploader has stored the object in a folder named after the artifact's id, or in the oldest layout after
    its job's id.  If the artifacts are a view, only this relation tells which of them lack a path; a table contains
    these artifacts itself.
    """

    optional = True
    grants = "worker: select"
    locations = JobArtifact.locations
    sentence = "an artifact without a path may have it"

    id = pw.BigIntegerField(primary_key=True)
    job_id = pw.BigIntegerField()

    class Meta:
        table_name = "ci_pathless_artifacts"

    @classmethod
    def named(cls, paths: Sequence[str]) -> set[str]:
        """Return the *paths* that are in the folder of an artifact without a path."""
        named: set[str] = set()
        for layout, column in ((PATH_WITH_ARTIFACT_ID, "id"), (PATH_WITH_JOB_ID, "job_id")):
            folders = {path: int(found[1]) for path in paths if (found := layout.search(path))}
            if folders and (source := cls._find_source()):
                statement = SELECT_PATHLESS_NUMBERS.format(column=column, source=source)
                rows = database.execute_sql(statement, {"numbers": list(set(folders.values()))}).fetchall()
                numbers = {number for (number,) in rows}
                named |= {path for path, number in folders.items() if number in numbers}
        return named

    @classmethod
    def _find_source(cls) -> str | None:
        """Return SQL that selects the artifacts without a path; None if the forge has none."""
        if exclusions.is_visible(cls):
            return "ci_pathless_artifacts where true"
        (is_table,) = database.execute_sql(SELECT_IS_TABLE).fetchone()
        return f"ci_job_artifacts where {HAS_NO_PATH}" if is_table else None


def _leaves_objects_to_the_forge() -> bool:
    return client.settings is not None and client.settings.objects == "theirs"


class ForgeOutbox(Base):
    """The forge's own outbox, used if `FORGEKEEPER_OBJECTS` leaves the objects to the forge."""

    is_used = _leaves_objects_to_the_forge
    grants = "worker: insert"

    project_id = pw.BigIntegerField(null=True)
    file_store = pw.IntegerField()
    store_dir = pw.TextField()
    file = pw.TextField()
    pick_up_at = DateTimeTZField(null=True)

    class Meta:
        table_name = "ci_deleted_objects"
        primary_key = pw.CompositeKey("store_dir", "file")


class ProjectStatistics(Base):
    """Total bytes of a project's artifacts.  A forge may lack this relation."""

    optional = True
    found_by = ("project_id",)
    grants = "worker: select, update (build_artifacts_size)"

    project_id = pw.BigIntegerField(primary_key=True)
    build_artifacts_size = pw.BigIntegerField(constraints=default_sql("0"))

    class Meta:
        table_name = "project_statistics"


REFRESH_CREATED = 1
"""The state of a recount that has not begun.  In GitLab the states running, pending and finalizing follow (2 to 4).
GitLab leaves projects in these three states alone, because their sum is not final."""


class StatisticsRefresh(Base):
    """A project whose artifacts the forge recounts.  A forge may lack this relation."""

    optional = True
    grants = "worker: select; exporter: select"

    project_id = pw.BigIntegerField(primary_key=True)
    state = pw.SmallIntegerField()

    class Meta:
        table_name = "project_build_artifacts_size_refreshes"

    @classmethod
    def is_under_way(cls, project: pw.Field[int]) -> pw.Node:
        """Return the condition that a recount of the *project*'s statistics has begun."""
        condition: pw.Node = pw.fn.EXISTS(
            cls.select(pw.SQL("1")).where(cls.project_id == project, cls.state != REFRESH_CREATED)
        )
        return condition


class JobLock(Base):
    """The lock of a job's artifacts by the forge's own rule.  A forge may lack this relation."""

    optional = True
    grants = "worker: select; exporter: select"

    job_id = pw.BigIntegerField(primary_key=True)
    locked = pw.SmallIntegerField()

    class Meta:
        table_name = "ci_job_locks"

    @classmethod
    def is_known(cls) -> bool:
        """Return whether the forge has the relation."""
        return exclusions.is_visible(cls)

    @classmethod
    def is_unlocked(cls, job: pw.Field[int]) -> pw.Node:
        """Return the condition that the artifacts of the *job* are unlocked."""
        condition: pw.Node = pw.fn.EXISTS(
            cls.select(pw.SQL("1")).where(cls.job_id == job, cls.locked == UNLOCKED_STATE)
        )
        return condition


class ArtifactState(Base):
    """The verification of an artifact's copy; the forge deletes the row with the artifact."""

    optional = True
    grants = "worker: select"

    job_artifact_id = pw.BigIntegerField()
    partition_id = pw.BigIntegerField()

    class Meta:
        table_name = "ci_job_artifact_states"
        primary_key = pw.CompositeKey("job_artifact_id", "partition_id")


class ArtifactReport(Base):
    """The content of an artifact that is a report; the forge deletes it with the artifact."""

    optional = True
    grants = "worker: select"

    job_artifact_id = pw.BigIntegerField()
    partition_id = pw.BigIntegerField()

    class Meta:
        table_name = "p_ci_job_artifact_reports"
        primary_key = pw.CompositeKey("job_artifact_id", "partition_id")


class TraceMetadata(Base):
    """The archive of a trace.  It refers to the trace's artifact; traces are never deleted."""

    optional = True
    grants = "worker: select"

    build_id = pw.BigIntegerField()
    partition_id = pw.BigIntegerField()
    trace_artifact_id = pw.BigIntegerField(null=True)

    class Meta:
        table_name = "p_ci_build_trace_metadata"
        primary_key = pw.CompositeKey("build_id", "partition_id")


FOLLOWER_MODELS: tuple[type[Base], ...] = (ArtifactState, ArtifactReport, TraceMetadata)
"""Relations that a forge may have, whose rows it deletes with an artifact."""


class ProjectGroup(Base):
    """A project and a group that contains it, directly or through another group.

    Without this relation no group can be excluded.
    """

    optional = True
    grants = "worker: select; exporter: select"

    project_id = pw.BigIntegerField()
    group_id = pw.BigIntegerField()

    class Meta:
        table_name = "project_groups"
        primary_key = pw.CompositeKey("project_id", "group_id")


exclusions.declare_groups(ProjectGroup.project_id, ProjectGroup.group_id)

JobArtifact.indexed(
    "ci_job_artifacts_expired on ci_job_artifacts"
    f" ({CLASS_EXPRESSION}, expire_at, id) where locked = {UNLOCKED_STATE} and file_type <> {TRACE_FILE_TYPE}"
)
JobArtifact.indexed(
    "ci_job_artifacts_waiting on ci_job_artifacts (expire_at)"
    f" where {' or '.join(f'({condition})' for condition in WAITING_CONDITIONS.values())}"
)


FORGE_MODELS: tuple[type[Base], ...] = (
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

OPTIONAL_MODELS: tuple[type[Base], ...] = (StatisticsRefresh, JobLock, ProjectGroup, PathlessArtifact)
"""Relations that a forge may lack; batches only read them."""
