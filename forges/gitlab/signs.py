"""How a GitLab gives itself away, and what `check` says of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forgekeeper.database import database
from forgekeeper.database.signs import FORGES, Forge
from forges.gitlab.templates import comment_of_version

if TYPE_CHECKING:
    from forges.gitlab.adoption import Adoption

CRON_JOBS = {
    "user_status_cleanup": "user_status_cleanup_batch_worker",
    "git_ref_cleanup": "batched_git_ref_updates_cleanup_scheduler_worker",
    "stale_direct_uploads": "object_storage_delete_stale_direct_uploads_worker",
    "stale_imports": "bulk_imports_stale_import_worker",
    "expired_job_artifacts": "expire_build_artifacts_worker",
}
"""Which of GitLab's cron jobs does the work of which batch; both at once delete twice, and count twice."""
ADOPTED = """
    select obj_description(n.oid, 'pg_namespace') from pg_namespace as n
    where nspname = %s and exists (select from pg_proc where pronamespace = n.oid and proname = 'artifact_path')
"""


def is_adopted(schema: str) -> bool:
    """Say whether the views in that schema were made by `adopt`."""
    return database.execute_sql(ADOPTED, (schema,)).fetchone() is not None


def say_outdated(schema: str) -> Iterator[str]:
    """Say whether the views of that schema, if there are any, are those that `adopt` would make now."""
    adopted = database.execute_sql(ADOPTED, (schema,)).fetchone()
    if adopted is None:
        return
    comment, again = str(adopted[0]), "run `forgekeeper adopt gitlab` again, as the owner of GitLab's tables"
    if not comment.startswith(comment_of_version()):
        yield f"the views in schema {schema} were made by another version, and may do less or allow more: {again}"
    elif comment != _look(schema, comment).comment:
        yield f"GitLab's tables are not those of which the views in schema {schema} were made: {again}"


def say_slow(schema: str) -> Iterator[str]:
    """Say which indexes the batches' statements want below the views of that schema."""
    from forges.gitlab import indexes

    (comment,) = database.execute_sql(ADOPTED, (schema,)).fetchone()
    if statements := list(indexes.missing(_look(schema, str(comment)))):
        yield (
            "statements on artifacts will be slow until you create the indexes that `forgekeeper adopt gitlab --print`"
            f" ends with; the first of the {len(statements)} statements is `{statements[0].rstrip(';')}`"
        )


def _look(schema: str, comment: str) -> Adoption:
    # It imports models, as only processes do whose settings name them.
    from forges.gitlab import adoption

    return adoption.look(comment.rpartition(", of ")[2] or "public", schema)


FORGES["gitlab"] = Forge(
    relations=("p_ci_job_artifacts", "feature_gates"),
    advice=(
        "this is a GitLab's database: in GitLab's cron_jobs switch off what does the work of each batch that runs here,"
        f" or both do it: {', '.join(f'{job} ({batch})' for batch, job in CRON_JOBS.items())}; its flag"
        " bulk_delete_job_artifacts stops no deletion there: on, Ci::ScheduleBulkDeleteJobArtifactCronWorker deletes"
        " artifacts, so switch its cron job off, too, and off, ExpireBuildArtifactsWorker does"
    ),
    refusing={
        "gitlab_schema_prevent_write": (
            "is the locked copy of a table that this GitLab keeps in another database: as one statement reaches one"
            " database alone, it takes a GitLab with a single one"
        )
    },
    is_adopted=is_adopted,
    objections=say_outdated,
    hints=say_slow,
)
