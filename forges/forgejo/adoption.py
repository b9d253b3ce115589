"""Forgejo and Gitea: batches can only delete their artifacts.

Status numbers as in `ArtifactStatus` of their models: 1 upload pending, 2 uploaded, 3 upload failed, 4 expired, 5
deletion requested by a user, 6 deleted. Expired rows stay, because the page of a run shows them.
"""

from __future__ import annotations

from collections.abc import Iterator

from forgekeeper.platform.database import database
from forges.adoption import Adoption
from forges.parts import AdoptedPart
from models import CLASS_COUNT

PENDING_UPLOAD_SECONDS = 86_400
"""Seconds without change after which a pending upload has failed; Forgejo does not check."""
ARTIFACT_DUE_AT = f"""case status
        when 1 then to_timestamp(greatest(created_unix, updated_unix) + {PENDING_UPLOAD_SECONDS})
        when 5 then to_timestamp(updated_unix) else to_timestamp(expired_unix) end"""
ARTIFACT_LOCK_STATE = "case when status in (2, 5) or status = 1 and storage_path = '' then 0 else 1 end"
"""A pending or failed upload with an object keeps it, because its content is unknown."""
ARTIFACT_INDEXES = {
    "forgekeeper_expired": (
        f"(pg_catalog.mod(repo_id + run_id, {CLASS_COUNT}), ({ARTIFACT_DUE_AT}), id) where {ARTIFACT_LOCK_STATE} = 0"
    ),
    "forgekeeper_paths": "(storage_path)",
}
SELECT_VALID_ARTIFACT_INDEX = """
    select true from pg_index join pg_class c on c.oid = indexrelid
    where indisvalid and c.relnamespace = to_regnamespace(%s) and c.relname = %s
"""


class ForgejoAdoption(Adoption):
    """The adoption of Forgejo's or Gitea's tables."""

    forge, display_name = "forgejo", "Forgejo"
    every_part = (
        AdoptedPart(
            "artifacts",
            ["ci_job_artifacts"],
            {
                "action_artifact": "id run_id repo_id storage_path file_size file_compressed_size artifact_name status"
                " created_unix updated_unix expired_unix"
            },
        ),
    )

    def fill_template(self, text: str, **words: str) -> str:
        return super().fill_template(text, DUE=ARTIFACT_DUE_AT, LOCKED=ARTIFACT_LOCK_STATE, **words)

    def find_missing_indexes(self) -> Iterator[str]:
        for name, keys in ARTIFACT_INDEXES.items():
            if not database.execute_sql(SELECT_VALID_ARTIFACT_INDEX, (self.tables, name)).fetchone():
                one_line = " ".join(keys.split())
                yield f"create index concurrently if not exists {name} on {self.tables}.action_artifact {one_line};"

    def report_limits(self) -> Iterator[str]:
        yield (
            "failed uploads leave chunks that no row names:"
            " `forgekeeper uploads reconcile artifacts --prefix ''` finds them when they are a day old"
        )


ADOPTION_CLASS = ForgejoAdoption
