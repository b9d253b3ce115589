"""Signs of a GitLab database, and the advice of `check`."""

from __future__ import annotations

from forgekeeper.platform.database.signs import Forge, known_forges
from forges.adoption_findings import AdoptedForge

CRON_JOBS = {
    "user_status_cleanup": "user_status_cleanup_batch_worker",
    "git_ref_cleanup": "batched_git_ref_updates_cleanup_scheduler_worker",
    "stale_direct_uploads": "object_storage_delete_stale_direct_uploads_worker",
    "stale_imports": "bulk_imports_stale_import_worker",
    "expired_job_artifacts": "expire_build_artifacts_worker",
}
"""GitLab's cron job for each batch's work; if both run, they delete and count twice."""
GITLAB = AdoptedForge("gitlab", "GitLab", marker_function="artifact_path")

known_forges["gitlab"] = Forge(
    relations=("p_ci_job_artifacts", "feature_gates"),
    advice=(
        "this is a GitLab database: in GitLab's cron_jobs, switch off the job of each batch that runs here, or both do"
        f" the same work: {', '.join(f'{job} ({batch})' for batch, job in CRON_JOBS.items())}; GitLab's flag"
        " bulk_delete_job_artifacts stops no deletion: if it is on, Ci::ScheduleBulkDeleteJobArtifactCronWorker deletes"
        " artifacts, so switch its cron job off, too, and if it is off, ExpireBuildArtifactsWorker deletes artifacts"
    ),
    refusing={
        "gitlab_schema_prevent_write": (
            "is the locked copy of a table that this GitLab keeps in another database: a batch needs its"
            " tables in one database, so use a GitLab with a single database"
        )
    },
    is_adopted=GITLAB.is_adopted,
    objections=GITLAB.report_outdated_views,
    hints=GITLAB.report_missing_indexes,
)
