"""Sample data of the example forge: one file per batch."""

from demo.sample_data import (
    expired_job_artifacts,
    git_ref_cleanup,
    stale_direct_uploads,
    stale_imports,
    user_status_cleanup,
)

SAMPLE_DATA = {
    "user_status_cleanup": user_status_cleanup.SAMPLE_DATA,
    "git_ref_cleanup": git_ref_cleanup.SAMPLE_DATA,
    "expired_job_artifacts": expired_job_artifacts.SAMPLE_DATA,
    "stale_direct_uploads": stale_direct_uploads.SAMPLE_DATA,
    "stale_imports": stale_imports.SAMPLE_DATA,
}
"""By batch; one that has none is shown without figures."""
