"""CI job artifacts, and what they add up to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, BigIdentityField, default
from forgekeeper.database.use import SEEN, WORK, Use

UNLOCKED, TRACE = 0, 3

OWN_FOLDER = re.compile(r"/([0-9]{1,18})/[^/]+\Z")
OLDEST_FOLDER = re.compile(r"\A[0-9]{4}_[0-9]{2}/[0-9]+/([0-9]{1,18})/[^/]+\Z")
"""Where a forge's uploader puts the file of an artifact that has no path: …/id/file; of old month/project/job/file."""


class JobArtifact(Base):
    """A file that a CI job left behind; its object is at the location `artifacts`."""

    location = "artifacts"
    sentence = "an artifact names it"

    found_by = ("id", "project_id", "job_id")
    used_by = Use(SEEN, (("update", ("id",), WORK), ("delete", (), WORK)))

    id = BigIdentityField()
    project_id = pw.BigIntegerField()
    job_id = pw.BigIntegerField()
    partition_id = pw.BigIntegerField(constraints=default("100"))
    file_type = pw.IntegerField()
    file_store = pw.IntegerField(constraints=default("1"))
    file = pw.TextField(null=True)
    file_final_path = pw.TextField(index=True)
    size = pw.BigIntegerField(null=True)
    expire_at = DateTimeTZField(null=True)
    locked = pw.SmallIntegerField(constraints=default("2"))
    created_at = DateTimeTZField(constraints=default("now()"))
    updated_at = DateTimeTZField(constraints=default("now()"))

    class Meta:
        table_name = "ci_job_artifacts"

    @classmethod
    def expired(cls, now: datetime) -> pw.ModelSelect[JobArtifact]:
        """Select what may be destroyed: past its time (strictly), unlocked for certain, and no trace."""
        return cls.select().where(cls.expire_at < now, cls.locked == UNLOCKED, cls.file_type != TRACE)

    @classmethod
    def named(cls, paths: Sequence[str]) -> set[str]:
        """Return those of *paths* that a live artifact still names.

        One without a path has its object in a folder of its own, called by its id, or by its
        job's in the oldest layout; whatever lies there is taken for named.
        """
        naming = cls.select(cls.file_final_path).where(cls.file_final_path.in_(list(paths)))
        named = {artifact.file_final_path for artifact in naming}
        for layout, column in ((OWN_FOLDER, cls.id), (OLDEST_FOLDER, cls.job_id)):
            folders = {path: int(found[1]) for path in paths if (found := layout.search(path))}
            if folders:
                pathless = column.in_(list(set(folders.values()))), pw.fn.coalesce(cls.file_final_path, "") == ""
                rows: Any = cls.select(column).where(*pathless).tuples()
                numbers = {number for (number,) in rows}
                named |= {path for path, number in folders.items() if number in numbers}
        return named


class ProjectStatistics(Base):
    """How many bytes a project's artifacts take up."""

    found_by = ("project_id",)
    used_by = Use(WORK, (("update", ("build_artifacts_size",), WORK),))

    project_id = pw.BigIntegerField(primary_key=True)
    build_artifacts_size = pw.BigIntegerField(constraints=default("0"))

    class Meta:
        table_name = "project_statistics"


JobArtifact.add_index(
    pw.SQL(
        "create index ci_job_artifacts_expired on ci_job_artifacts"
        " (mod(project_id + job_id, 10), expire_at, id) where locked = 0 and file_type <> 3"
    )
)
